"""An engine process as the controller sees it: `ports.Engine` over RPC. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.config import LimitsSection
from offbeat.rpc.client import Worker
from offbeat.rpc.messages import EngineDescription, GenerateCall, GenerateResult, Nothing, PauseCall
from offbeat.types import GenerateRequest, Rollout, Sampling

DESCRIBE_S = 30.0
IF_SLOW = "raise limits.stall_s, or lower rollout.max_rows."


class RemoteEngine:
    """Every call has the run's limits as its deadline; errors are those of `Worker.call`."""

    def __init__(self, worker: Worker, limits: LimitsSection) -> None:
        self.worker = worker
        self._generate_s = limits.generate_s
        self._stall_s = limits.stall_s

    @property
    def name(self) -> str:
        return self.worker.name

    async def describe(self) -> EngineDescription:
        # The worker answers one call after the other: behind a long generate this one waits as long.
        timeout_s = self._generate_s + DESCRIBE_S
        return await self.worker.call("describe", Nothing(), EngineDescription, timeout_s=timeout_s)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        call = GenerateCall(requests=tuple(requests), sampling=sampling)
        result = await self.worker.call(
            "generate", call, GenerateResult, timeout_s=self._generate_s, stall_s=self._stall_s, if_slow=IF_SLOW
        )
        return list(result.rollouts)

    async def pause(self, mode: PauseCall) -> None:
        """Returns when admission is closed and nothing runs any more."""
        await self.worker.call("pause", mode, Nothing, timeout_s=DESCRIBE_S)
        # Answered by the thread that generates, after whatever it was at: its reply is the acknowledgement.
        await self.describe()

    async def resume(self) -> None:
        await self.worker.call("resume", Nothing(), Nothing, timeout_s=self._generate_s + DESCRIBE_S)
