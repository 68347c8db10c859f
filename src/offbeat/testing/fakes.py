"""Fakes for every seam. They take time (they yield to the event loop), or ordering errors would pass.

They share one `World`: a log of what began and ended when, and the truth about versions. `FakeEngine` stamps each token
with the version that it holds at the moment when the token is made, so a sync under a running generation shows.

Rows carry their identity: the prompt of row r of epoch e is the token list `[r]`, and the default reward is a function
of (row, version), so that groups, order, exactly-once use and weights versions can be read off the samples.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from offbeat.errors import RunError, WeightSyncError
from offbeat.rpc.messages import EngineDescription, PauseCall, UpdateResult, WorkSpan
from offbeat.types import (
    Batch,
    FloatArray,
    GenerateRequest,
    Prompt,
    Rollout,
    Sampling,
    Scored,
    run_length,
)

FAKE_VOCAB = 64


@dataclass(frozen=True)
class Event:
    """Something that took from `started_s` to `ended_s`. `version` is the one that it used or brought."""

    name: str
    started_s: float
    ended_s: float
    version: int
    rows: tuple[int, ...] = ()


@dataclass
class World:
    """What the fakes share. `events` is in order of their ends."""

    events: list[Event] = field(default_factory=list)
    trainer_version: int = 0

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class FakeEngine:
    """An engine that makes one token every `token_s` for all samples at once, `tokens` tokens each."""

    world: World
    name: str = "engine-0"
    version: int = -1
    tokens: int = 4
    token_s: float = 0.25
    refuse_stale: bool = True
    fail_after_tokens: int | None = None
    busy: int = 0
    paused: bool = False

    def __post_init__(self) -> None:
        self._idle = asyncio.Event()
        self._idle.set()

    async def describe(self) -> EngineDescription:
        return EngineDescription(
            engine="fake",
            engine_version="1",
            torch_version="",
            weights_version=self.version,
            state="serving" if self.version >= 0 else "stale",
            vocab_size=FAKE_VOCAB,
            dtype="float32",
            device="cpu",
            capabilities=(),
            max_length=4096,
        )

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        if self.version < 0 and self.refuse_stale:
            raise WeightSyncError(f"{self.name} is stale: it serves nothing before its first sync")
        if self.paused:
            raise RunError(f"{self.name} is paused")
        async with self._at_work():
            started, stamps = _now(), list[int]()
            for made in range(min(self.tokens, sampling.max_new_tokens)):
                if self.fail_after_tokens is not None and made >= self.fail_after_tokens:
                    raise RuntimeError(f"{self.name} fails after {made} tokens")
                await asyncio.sleep(self.token_s)
                stamps.append(self.version)
            rows = tuple(int(request.token_ids[0]) for request in requests)
            if requests:
                self.world.events.append(Event("generate", started, _now(), min(stamps), rows))
            return [
                self._rollout(request, index, stamps, started, sampling)
                for request in requests
                for index in range(len(request.seeds))
            ]

    async def pause(self, mode: PauseCall) -> None:
        self.paused = True
        await self._idle.wait()

    async def resume(self) -> None:
        await asyncio.sleep(0)
        self.paused = False

    @asynccontextmanager
    async def _at_work(self) -> AsyncGenerator[None]:
        self.busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.busy -= 1
            if not self.busy:
                self._idle.set()

    def _rollout(
        self, request: GenerateRequest, index: int, stamps: list[int], started: float, sampling: Sampling
    ) -> Rollout:
        drawn = [fake_token(request.seeds[index], position, sampling) for position in range(len(stamps))]
        tokens, logprobs = [token for token, _ in drawn], [logprob for _, logprob in drawn]
        stops = [position for position, token in enumerate(tokens) if token in sampling.stop_token_ids]
        if stops:
            tokens = tokens[: stops[0] + 1]
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=index,
            epoch=request.epoch,
            prompt_token_ids=request.token_ids,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(logprobs[: len(tokens)], np.float32),
            versions=run_length(stamps[: len(tokens)]),
            finish_reason="stop" if stops else "length",
            engine=self.name,
            started_s=started,
            finished_s=_now(),
        )


def fake_token(seed: int, position: int, sampling: Sampling) -> tuple[int, float]:
    """A token that depends on the sample's own seed and the position only, and its logprob.

    The logit of token t is 2 cos t - t/50, whatever came before. Of `sampling` temperature and top_k count.
    """
    logits = {token: (2 * math.cos(token) - token / 50) / (sampling.temperature or 1.0) for token in range(FAKE_VOCAB)}
    ranked = sorted(logits, key=lambda token: -logits[token])
    kept = ranked[: sampling.top_k or FAKE_VOCAB if sampling.temperature else 1]
    largest = max(logits.values())
    weights = [math.exp(logits[token] - largest) for token in kept]
    (token,) = random.Random(f"{seed}/{position}").choices(kept, weights)
    every = weights if sampling.temperature else [math.exp(logit - largest) for logit in logits.values()]
    return token, logits[token] - largest - math.log(sum(every))


@dataclass
class FakeTrainer:
    """A trainer that takes `train_s` a step and remembers every sample that it was given."""

    world: World
    train_s: float = 1.0
    batches: list[Batch] = field(default_factory=list)

    async def update(self, batch: Batch) -> UpdateResult:
        started = _now()
        await asyncio.sleep(self.train_s)
        version = self.world.trainer_version
        rows = tuple(int(s.prompt_token_ids[0]) for m in batch.minibatches for s in m.samples)
        self.world.events.append(Event("train", started, _now(), version, rows))
        self.world.trainer_version += 1
        self.batches.append(batch)
        return UpdateResult(
            metrics={"loss": 0.0, "lr": 1e-6, "grad_norm": 1.0},
            weights_version=self.world.trainer_version,
            optimizer_updates=self.world.trainer_version * len(batch.minibatches),
            skipped=(),
            busy_s=self.train_s,
        )

    async def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling
    ) -> list[FloatArray]:
        await asyncio.sleep(0)
        return [np.full(len(continuation), -math.log(FAKE_VOCAB), np.float32) for _, continuation in sequences]

    async def save(self, folder: str) -> None:
        await asyncio.sleep(0)

    async def load(self, folder: str) -> None:
        await asyncio.sleep(0)


@dataclass(frozen=True)
class FakeSyncReport:
    version: int
    bytes_moved: int = 1000
    seconds: float = 0.1
    probe_gap_max: float | None = 0.0
    probe_gap_mean: float | None = 0.0
    phases: tuple[WorkSpan, ...] = ()


@dataclass
class FakeWeightSync:
    """Gives the trainer's version to the engines. `busy_engines` counts syncs under a running generation."""

    world: World
    engines: Sequence[FakeEngine]
    sync_s: float = 0.1
    busy_engines: int = 0

    async def sync(self, version: int) -> FakeSyncReport:
        started = _now()
        self.busy_engines += sum(engine.busy > 0 for engine in self.engines)
        await asyncio.sleep(self.sync_s)
        for engine in self.engines:
            engine.version = version
        self.world.events.append(Event("sync", started, _now(), version))
        return FakeSyncReport(version, seconds=self.sync_s, phases=(WorkSpan("transfer", started, _now()),))


@dataclass
class FakeReward:
    """A reward that takes time and shows what it saw: by default 1 for odd sample indices, else 0."""

    value: Callable[[Rollout], float] = lambda rollout: float(rollout.sample_index % 2)
    score_s: float = 0.05

    async def score(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Scored]:
        await asyncio.sleep(self.score_s)
        return [
            Scored(rollout=r, prompt=p, text="", reward=self.value(r), parts={"fake": self.value(r)})
            for r, p in zip(rollouts, prompts, strict=True)
        ]


@dataclass(frozen=True)
class FakePrompts:
    """`rows` rows in order, epoch after epoch; step k takes the next `prompts_per_step`."""

    rows: int = 1000
    prompts_per_step: int = 4

    def batch(self, step: int) -> list[Prompt]:
        first = step * self.prompts_per_step
        return [self._prompt(position) for position in range(first, first + self.prompts_per_step)]

    def _prompt(self, position: int) -> Prompt:
        epoch, row = divmod(position, self.rows)
        return Prompt(
            id=f"rows/{row}",
            epoch=epoch,
            source="rows",
            token_ids=np.array([row], np.int32),
            text=str(row),
            columns={"row": row},
        )
