"""The trainer as the controller sees it: `ports.Trainer` over RPC. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from offbeat.config import LimitsSection
from offbeat.rpc.client import Worker
from offbeat.rpc.messages import (
    Arguments,
    LoadCall,
    LoadResult,
    LogprobsCall,
    LogprobsResult,
    Nothing,
    SaveCall,
    SaveResult,
    ScoredSequence,
    SuperviseCall,
    TrainerDescription,
    UpdateCall,
    UpdateResult,
)
from offbeat.types import Batch, FloatArray, Sampling, SupervisedSample

R = TypeVar("R")
DESCRIBE_S = 30.0
IF_SLOW = "raise limits.stall_s, or lower trainer.micro_batch_tokens."


class RemoteTrainer:
    """Every call has the run's limits as its deadline; errors are those of `Worker.call`."""

    def __init__(self, worker: Worker, limits: LimitsSection) -> None:
        self.worker = worker
        self._update_s = limits.update_s
        self._stall_s = limits.stall_s

    async def describe(self) -> TrainerDescription:
        # The worker answers one call after the other: behind a long update this one waits as long.
        timeout_s = self._update_s + DESCRIBE_S
        return await self.worker.call("describe", Nothing(), TrainerDescription, timeout_s=timeout_s)

    async def update(self, batch: Batch) -> UpdateResult:
        return await self._compute("update", UpdateCall(batch=batch), UpdateResult)

    async def supervise(self, samples: Sequence[SupervisedSample], lr: float, *, last: bool = False) -> UpdateResult:
        """One supervised update; `last` drops its optimizer afterwards."""
        call = SuperviseCall(samples=tuple(samples), lr=lr, last=last)
        return await self._compute("supervise", call, UpdateResult)

    async def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling
    ) -> list[FloatArray]:
        """-inf where a token lies outside the trainer's own nucleus (only when `sampling` truncates)."""
        call = LogprobsCall(
            sequences=tuple(
                ScoredSequence(
                    prompt_token_ids=np.asarray(prompt, dtype=np.int32),
                    token_ids=np.asarray(continuation, dtype=np.int32),
                )
                for prompt, continuation in sequences
            ),
            sampling=sampling,
        )
        result = await self._compute("logprobs", call, LogprobsResult)
        return list(result.logprobs)

    async def _compute(self, method: str, call: Arguments, result: type[R]) -> R:
        return await self.worker.call(
            method, call, result, timeout_s=self._update_s, stall_s=self._stall_s, if_slow=IF_SLOW
        )

    async def save(self, folder: str) -> None:
        # No stall limit: a large file is written without a sign of progress in between.
        await self.worker.call("save", SaveCall(folder=folder), SaveResult, timeout_s=self._update_s)

    async def load(self, folder: str) -> None:
        await self.worker.call("load", LoadCall(folder=folder), LoadResult, timeout_s=self._update_s)
