"""The controller's weight sync: one bounded, verified transaction over the trainer and every engine. No torch.

    offer ──▶ prepare all ──▶ send + receive ──▶ compare digests ──▶ probe ──▶ commit all ──▶ confirm
      └───────────┴───────────────┴─ any failure ─┴────────────────────┴──────────┘
                                        ▼
            every member is told and freed; every engine is stale; nothing was committed

One deadline (`weights.timeout_s`) owns all inner ones. The group is kept for the next sync; after a failure the next
sync makes a fresh one. The error raised is the first cause, in the words of the process where it happened.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from offbeat.config import Dtype, WeightsSection
from offbeat.errors import CallTimeout, OffbeatError, RemoteError, WeightSyncError, WorkerDied
from offbeat.rpc.client import Worker
from offbeat.rpc.messages import (
    Arguments,
    EngineDescription,
    GenerateCall,
    GenerateResult,
    LogprobsCall,
    LogprobsResult,
    Nothing,
    ScoredSequence,
    TrainerDescription,
    WeightsAbandon,
    WeightsCommit,
    WeightsJoin,
    WeightsJoined,
    WeightsMove,
    WeightsMoved,
    WeightsOffer,
    WeightsOffered,
    WorkSpan,
)
from offbeat.types import GenerateRequest, Rollout, Sampling
from offbeat.weights.hello import check_collective, check_hello, check_versions
from offbeat.weights.parity import Gap, Probes, check_gap, gap, tolerance
from offbeat.weights.phases import sync_phases
from offbeat.weights.session import PEER_ENDED, Moved, Offered, Prepared, Probed, Verified, first_difference

R = TypeVar("R")
Calls = Mapping[str, Callable[[], Coroutine[Any, Any, R]]]

_MARGIN_S = 1.0
"""A call is given a little longer than the work in it, so that the worker's own words arrive."""
_FREE_S = 5.0


@dataclass(frozen=True)
class Probe:
    """A few short requests whose samples both sides score. Sampled as the run samples."""

    requests: tuple[GenerateRequest, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Report:
    """A finished transaction."""

    version: int
    bytes_moved: int
    """To each engine."""
    seconds: float
    phases: tuple[WorkSpan, ...]
    """rendezvous, transfer, verify, probe (where one ran), commit: see `offbeat.weights.phases`."""
    probe_gap_mean: float | None
    probe_gap_max: float | None
    """None where no probe ran."""


class WeightTransaction:
    """`WeightSync` over real workers. One sync at a time; make a new one when a worker was replaced."""

    def __init__(
        self, trainer: Worker, engines: Sequence[Worker], weights: WeightsSection, dtype: Dtype, probe: Probe
    ) -> None:
        """`dtype` is what the engines compute in: floating weights are sent at it."""
        self._trainer = trainer
        self._engines = {engine.name: engine for engine in engines}
        if len(self._engines) != len(engines) or not engines:
            raise ValueError("engines need distinct names, and there must be one")
        self._weights = weights
        self._dtype: Dtype = dtype
        self._coarsest: Dtype = dtype
        self._probe = probe
        self._nonce: str | None = None
        self._greeted = False
        self.probes = Probes(weights.parity_every)
        """When the next parity probe is due, and against what."""
        self._phases: dict[str, tuple[float, float]] = {}
        self._end = 0.0

    async def sync(self, version: int) -> Report:
        """Every engine serves `version` when this returns. WeightSyncError otherwise, and then none serves anything."""
        started = time.monotonic()
        self._end = self._trainer.awake_s() + self._weights.timeout_s
        self._phases = {}
        nonce = self._nonce = self._nonce or secrets.token_hex(8)
        try:
            if not self._greeted:
                await self._greet()
            offered = await self._offer(version, nonce)
            prepared = await self._prepare(offered)
            moved = await self._move(prepared)
            verified = self._compare(moved)
            probed = await self._compute(verified)
            await self._commit(probed)
        except BaseException as error:
            await self._failed(version, nonce, error)
            raise
        return Report(
            version=version,
            bytes_moved=moved.sent.bytes_moved,
            seconds=time.monotonic() - started,
            phases=sync_phases(self._phases, [moved.sent, *(held for _, held in moved.held)]),
            probe_gap_mean=probed.gap_mean,
            probe_gap_max=probed.gap_max,
        )

    async def close(self) -> None:
        """Ends the kept group on all sides. Engines go stale. For a run that goes on without these engines."""
        if self._nonce is not None:
            await self._free(self._nonce, "the group was closed")
            self._nonce = None

    # --- the stages, in order ---------------------------------------------------------------------------------------

    async def _greet(self) -> None:
        with self._phase("hello"):
            trainer = await self._call(self._trainer, "describe", Nothing(), TrainerDescription)
            engines = await self._describe_engines()
        check_hello(trainer, tuple(engines.values()), dtype=self._dtype)
        if "bfloat16" in (trainer.dtype, self._dtype):
            self._coarsest = "bfloat16"
        self._greeted = True

    async def _offer(self, version: int, nonce: str) -> Offered:
        call = WeightsOffer(
            nonce=nonce,
            host=self._weights.host,
            backend=self._weights.backend,
            dtype=self._dtype,
            bucket_bytes=self._bucket_bytes,
            members=1 + len(self._engines),
            timeout_s=self._left(),
        )
        with self._phase("offer"):
            offer = await self._call(self._trainer, "weights_offer", call, WeightsOffered)
        return Offered(version, nonce, offer)

    async def _prepare(self, offered: Offered) -> Prepared:
        offer = offered.offer
        with self._phase("prepare"):
            joined = await self._all(
                {
                    name: self._caller(engine, "weights_prepare", self._join(offered, rank), WeightsJoined)
                    for rank, (name, engine) in enumerate(self._engines.items(), start=1)
                },
                offered.nonce,
            )
        for name, answer in joined.items():
            if answer.manifest_hash != offer.manifest_hash:
                raise WeightSyncError(
                    f"{name} computes manifest hash {answer.manifest_hash}, the trainer {offer.manifest_hash}: they "
                    "run different offbeat versions."
                )
        versions = {name: answer.collective_version for name, answer in joined.items()}
        check_collective(self._weights.backend, {self._trainer.name: offer.collective_version, **versions})
        return Prepared(offered)

    async def _move(self, prepared: Prepared) -> Moved:
        offered = prepared.offered
        left = self._left()
        stall = min(self._weights.stall_s, left)
        call = WeightsMove(nonce=offered.nonce, version=offered.version, timeout_s=left, stall_s=stall)
        calls = {self._trainer.name: self._caller(self._trainer, "weights_send", call, WeightsMoved)}
        calls |= {n: self._caller(e, "weights_receive", call, WeightsMoved) for n, e in self._engines.items()}
        with self._phase("move"):
            moved = await self._all(calls, offered.nonce)
        return Moved(offered, moved[self._trainer.name], tuple((name, moved[name]) for name in self._engines))

    def _compare(self, moved: Moved) -> Verified:
        with self._phase("verify"):
            for name, held in moved.held:
                if (
                    found := first_difference(moved.offered.offer.manifest, moved.sent.digests, held.digests)
                ) is not None:
                    raise WeightSyncError(
                        f"{name} does not hold what the trainer sent: {found}. Its loader changed, skipped or "
                        "misplaced it."
                    )
                if held.bytes_moved != moved.sent.bytes_moved:
                    raise WeightSyncError(f"{name} received {held.bytes_moved} bytes of {moved.sent.bytes_moved}.")
        return Verified(moved)

    async def _compute(self, verified: Verified) -> Probed:
        """The parity probe, when it is due."""
        version = verified.moved.offered.version
        if not self.probes.due(version, self._coarsest):
            return Probed(verified, None, None)
        with self._phase("probe"):
            gaps = await self._gaps(version, verified.moved.offered.nonce)
        baseline = self.probes.baseline
        limit = tolerance(self._coarsest, baseline and baseline.gap, self._weights.parity_tolerance)
        for name, found in gaps.items():
            check_gap(name, found, limit, version=version, sampling=self._probe.sampling)
        largest = max(found.max for found in gaps.values())
        self.probes.passed(version, self._coarsest, largest)
        return Probed(verified, sum(found.mean for found in gaps.values()) / len(gaps), largest)

    async def _commit(self, probed: Probed) -> None:
        offered = probed.verified.moved.offered
        call = WeightsCommit(version=offered.version)
        with self._phase("commit"):
            calls = {n: self._caller(e, "weights_commit", call, Nothing) for n, e in self._engines.items()}
            await self._all(calls, offered.nonce)
            check_versions(offered.version, await self._describe_engines())

    # --- the probe --------------------------------------------------------------------------------------------------

    async def _gaps(self, version: int, nonce: str) -> dict[str, Gap]:
        call = GenerateCall(requests=self._probe.requests, sampling=self._probe.sampling, probe=True)
        calls = {n: self._caller(e, "generate", call, GenerateResult) for n, e in self._engines.items()}
        samples = {name: result.rollouts for name, result in (await self._all(calls, nonce)).items()}
        for name, rollouts in samples.items():
            self._check_samples(name, rollouts, version)
        scored = await self._call(
            self._trainer,
            "logprobs",
            LogprobsCall(
                sequences=tuple(
                    ScoredSequence(prompt_token_ids=rollout.prompt_token_ids, token_ids=rollout.token_ids)
                    for rollouts in samples.values()
                    for rollout in rollouts
                ),
                sampling=self._probe.sampling,
            ),
            LogprobsResult,
        )
        if scored.weights_version != version:
            raise WeightSyncError(
                f"parity probe: the trainer scored with version {scored.weights_version}, the engines have {version}."
            )
        logprobs = iter(scored.logprobs)
        return {
            name: gap(
                name, rollouts, [array for _, array in zip(rollouts, logprobs, strict=False)], self._probe.sampling
            )
            for name, rollouts in samples.items()
        }

    def _check_samples(self, name: str, rollouts: Sequence[Rollout], version: int) -> None:
        wanted = sum(len(request.seeds) for request in self._probe.requests)
        if len(rollouts) != wanted:
            raise WeightSyncError(f"parity probe of {name}: {wanted} samples were asked for, {len(rollouts)} came.")
        for rollout in rollouts:
            if {stamp for stamp, _ in rollout.versions} != {version}:
                raise WeightSyncError(
                    f"parity probe of {name}: its tokens are stamped {rollout.versions}, the version under way "
                    f"is {version}."
                )

    # --- calls ------------------------------------------------------------------------------------------------------

    @property
    def _bucket_bytes(self) -> int:
        return max(64, int(self._weights.bucket_mib * (1 << 20)))

    def _join(self, offered: Offered, rank: int) -> WeightsJoin:
        offer = offered.offer
        return WeightsJoin(
            nonce=offered.nonce,
            host=offer.host,
            port=offer.port,
            rank=rank,
            members=1 + len(self._engines),
            backend=self._weights.backend,
            bucket_bytes=self._bucket_bytes,
            manifest=offer.manifest,
            manifest_hash=offer.manifest_hash,
            timeout_s=min(self._left(), self._weights.stall_s),
        )

    def _left(self) -> float:
        left = self._end - self._trainer.awake_s()
        if left <= 0:
            raise WeightSyncError(f"the sync took longer than its {self._weights.timeout_s:g} s (weights.timeout_s).")
        return left

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._phases[name] = started, time.monotonic()

    async def _call(self, worker: Worker, method: str, arguments: Arguments, result: type[R]) -> R:
        return await worker.call(method, arguments, result, timeout_s=self._left() + _MARGIN_S)

    def _caller(
        self, worker: Worker, method: str, arguments: Arguments, result: type[R]
    ) -> Callable[[], Coroutine[Any, Any, R]]:
        return lambda: self._call(worker, method, arguments, result)

    async def _describe_engines(self) -> dict[str, EngineDescription]:
        names = list(self._engines)
        answers = await asyncio.gather(
            *(self._call(self._engines[name], "describe", Nothing(), EngineDescription) for name in names)
        )
        return dict(zip(names, answers, strict=True))

    async def _all(self, calls: Calls[R], nonce: str) -> dict[str, R]:
        """All answers, or the first cause. At the first error the others are told, and freed within a bound."""
        tasks = {asyncio.create_task(make(), name=name): name for name, make in calls.items()}
        try:
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if failed := next((task for task in done if task.exception() is not None), None):
                rest = asyncio.wait(waiting, timeout=_FREE_S) if waiting else asyncio.sleep(0)
                deaf, _ = await asyncio.gather(self._free(nonce, f"{tasks[failed]}: {failed.exception()}"), rest)
                raise _first_cause(tasks, failed, deaf)
            return {name: task.result() for task, name in tasks.items()}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _free(self, nonce: str, reason: str) -> tuple[str, ...]:
        """Tell every process that this group is over. Returns who did not answer."""
        call = WeightsAbandon(nonce=nonce, reason=reason[:2000])
        workers = {self._trainer.name: (self._trainer, "weights_close")}
        workers |= {name: (engine, "weights_abandon") for name, engine in self._engines.items()}
        answers = await asyncio.gather(
            *(worker.call(method, call, Nothing, timeout_s=_FREE_S) for worker, method in workers.values()),
            return_exceptions=True,
        )
        return tuple(n for n, answer in zip(workers, answers, strict=True) if isinstance(answer, CallTimeout))

    async def _failed(self, version: int, nonce: str, error: BaseException) -> None:
        """Free everybody, then raise the first cause in its own words. Cancellation and defects pass through."""
        self._nonce = None
        self.probes.failed()
        phase = next(reversed(self._phases), "start")
        cause = error.first if isinstance(error, _Failed) else error
        reason = f"the sync of version {version} failed in {phase!r}: {cause or type(cause).__name__}"
        unfreed = error.deaf if isinstance(error, _Failed) else await self._free(nonce, reason)
        if not isinstance(cause, OffbeatError):
            return
        words = f"{cause.process}: {cause.message}" if isinstance(cause, RemoteError) else str(cause)
        silent = f" No answer from {', '.join(unfreed)} within {_FREE_S:g} s." if unfreed else ""
        raise WeightSyncError(
            f"weight sync of version {version} failed in phase {phase!r}: {words}{silent} Every engine is stale "
            "until a full sync succeeds.",
            unresponsive=unfreed,
        ) from cause


class _Failed(Exception):
    """Carries the first cause out of `_all`, with who did not answer."""

    def __init__(self, first: BaseException, deaf: tuple[str, ...]) -> None:
        super().__init__(str(first))
        self.first = first
        self.deaf = deaf


def _first_cause(tasks: Mapping[asyncio.Task[Any], str], failed: asyncio.Task[Any], deaf: Sequence[str]) -> _Failed:
    """What to tell the user: a death before everything, then an error that does not only report another member's."""
    errors = [failed.exception(), *(t.exception() for t in tasks if t.done() and not t.cancelled())]
    found = [error for error in errors if error is not None]
    deaths = [error for error in found if isinstance(error, WorkerDied)]
    own = [error for error in found if PEER_ENDED not in str(error)]
    silent = [name for task, name in tasks.items() if not task.done() or isinstance(task.exception(), CallTimeout)]
    return _Failed([*deaths, *own, *found][0], tuple(dict.fromkeys((*silent, *deaf))))
