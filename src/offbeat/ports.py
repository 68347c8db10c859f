"""The seams: what the controller needs of each part, and nothing about how it is done. No torch at import.

A seam has one to four methods and speaks the domain. Each has a real implementation in a process of its own and a
fake in `offbeat.testing` that takes time; `offbeat.testing` also has a conformance suite to run against your own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from offbeat.rpc.messages import EngineDescription, Manifest, PauseCall, UpdateResult, WorkSpan
from offbeat.types import Batch, FloatArray, GenerateRequest, Prompt, Rollout, Sampling, Scored

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """Samples. One engine process, or a pool of them behind the same four methods."""

    async def describe(self) -> EngineDescription: ...

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        """One rollout for each seed of each request, in that order. Refused unless the engine is serving.

        A call takes a whole batch, so that which rows are computed together does not depend on arrival times.
        """
        ...

    async def pause(self, mode: PauseCall) -> None: ...

    async def resume(self) -> None: ...


class Prompts(Protocol):
    """The prompts of each step: a pure function of (seed, step), so that resuming needs no replay."""

    def batch(self, step: int, /) -> list[Prompt]: ...


class Trainer(Protocol):
    """Learns. All ranks of the trainer behind one object."""

    async def update(self, batch: Batch) -> UpdateResult: ...

    async def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling
    ) -> list[FloatArray]:
        """Logprobs of (prompt, continuation) pairs under the current weights."""
        ...

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str) -> None: ...


class WeightSync(Protocol):
    """Moves the trainer's weights to every engine as one bounded, verified transaction."""

    async def sync(self, version: int) -> SyncReport: ...


class SyncReport(Protocol):
    """What a finished transaction says of itself."""

    @property
    def version(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def phases(self) -> Sequence[WorkSpan]:
        """`rendezvous`, `transfer`, `verify`, `probe`, … as they ran on the controller's clock; those it can tell."""
        ...

    @property
    def probe_gap_mean(self) -> float | None:
        """Mean |logprob difference| of the parity probe; None where no probe ran."""
        ...

    @property
    def probe_gap_max(self) -> float | None:
        """Largest |logprob difference| of the parity probe; None where no probe ran."""
        ...


class Reward(Protocol):
    async def score(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Scored]:
        """One `Scored` for each rollout, in order; `prompts[i]` is the prompt of `rollouts[i]`.

        All rollouts of a group come in one call, so that a group function sees the whole group.
        """
        ...


class WeightSource(Protocol):
    """The trainer's side of a transfer, in its process."""

    def manifest(self, dtype: str | None) -> Manifest: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors in manifest order, at their own dtype. Collective: every trainer rank iterates."""
        ...


class WeightSink(Protocol):
    """The engine's side of a transfer, in its process."""

    def check(self, manifest: Manifest) -> None:
        """Raises `WeightSyncError` that names every missing, unexpected or misshapen tensor."""
        ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies whole tensors into the model as they come."""
        ...

    def finish(self, manifest: Manifest) -> dict[str, Tensor]:
        """After the last tensor: derived copies are refreshed, tying is confirmed, caches are reset.

        Returns the model's own memory of every manifest entry: what its digest is taken of.
        """
        ...
