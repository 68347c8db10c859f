"""An engine's side of a transfer: `weights_prepare`, `weights_receive`, `weights_commit`, `weights_abandon`.

    lane: broadcast ─▶ buffer A ─ view as tensors ─▶ sink.load ─▶ the model's memory ─▶ digests
                       buffer B    (B is being filled while A is loaded)

The state goes STALE → RECEIVING → PROBING → SERVING; any failure, and `weights_abandon` of this group, makes it STALE.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offbeat.errors import OffbeatError, WeightSyncError
from offbeat.faults import point
from offbeat.network import Endpoint
from offbeat.ports import WeightSink
from offbeat.rpc.messages import (
    Manifest,
    TensorEntry,
    WeightsAbandon,
    WeightsCommit,
    WeightsJoin,
    WeightsJoined,
    WeightsMove,
    WeightsMoved,
)
from offbeat.rpc.server import Method
from offbeat.rpc.work import WorkLog
from offbeat.weights.group import collective_version, require_backend
from offbeat.weights.manifest import manifest_hash, torch_dtype
from offbeat.weights.member import Deadline, Member, run_guarded
from offbeat.weights.packing import Bucket, entry_bytes, pack, phase_of
from offbeat.weights.session import EngineState
from offbeat.weights.verify import digest

if TYPE_CHECKING:
    from offbeat.rpc.server import Progress
    from offbeat.weights.lane import Job


class WeightReceiver:
    """Receives into `sink` and moves `state`. One group at a time; it is kept between transfers."""

    def __init__(self, sink: WeightSink, state: EngineState, progress: Progress) -> None:
        self._sink = sink
        self._state = state
        self._progress = progress
        self._member: Member | None = None
        self._join: WeightsJoin | None = None
        self._abandoned: dict[str, str] = {}
        self._past: set[str] = set()

    def methods(self) -> dict[str, Method]:
        return {
            "weights_prepare": Method(WeightsJoin, self.prepare),
            "weights_receive": Method(WeightsMove, self.receive),
            "weights_commit": Method(WeightsCommit, self.commit),
            "weights_abandon": Method(WeightsAbandon, self.abandon, urgent=True),
        }

    def prepare(self, call: WeightsJoin) -> WeightsJoined:
        """Check that the manifest is what the model needs, and reach the group's store. A failure makes it STALE."""
        try:
            return self._prepare(call)
        except BaseException as error:
            self._state.fail(f"preparing the transfer failed: {error}")
            raise

    def _prepare(self, call: WeightsJoin) -> WeightsJoined:
        require_backend(call.backend)
        own_hash = manifest_hash(call.manifest)
        if own_hash != call.manifest_hash:
            raise WeightSyncError(
                f"the manifest arrived changed: its hash is {own_hash}, the trainer's is {call.manifest_hash}."
            )
        pack(call.manifest.entries, call.bucket_bytes)
        self._sink.check(call.manifest)
        self._refuse_abandoned(call.nonce)
        member = self._member
        if member is None or member.nonce != call.nonce or not member.usable:
            if member is not None:
                self._past.add(member.nonce)
                member.close()  # of an earlier group: its trainer may be gone, this one is fresh
            member = Member(
                Endpoint(call.host, call.port),
                nonce=call.nonce,
                rank=call.rank,
                members=call.members,
                backend=call.backend,
            )
            self._member = member
        try:
            member.connect(Deadline(call.timeout_s, call.timeout_s))
        except OffbeatError as error:
            member.fail(str(error))
            raise
        self._join = call
        return WeightsJoined(manifest_hash=own_hash, collective_version=collective_version(call.backend))

    def receive(self, call: WeightsMove) -> WeightsMoved:
        """Receive every tensor once, load it, and digest what then lies in the model's memory."""
        self._refuse_abandoned(call.nonce)
        member, join = self._member, self._join
        if member is None or join is None or member.nonce != call.nonce:
            raise WeightSyncError(f"group {call.nonce!r} cannot be received: it was not prepared.")
        started, work_log = time.monotonic(), WorkLog()
        deadline = Deadline(call.timeout_s, call.stall_s)

        def work() -> tuple[str, ...]:
            self._state.begin(call.version, drain_s=deadline.left("drain"))
            digests = self._receive_all(member, join, deadline, work_log)
            self._state.loaded(call.version)
            return digests

        digests = run_guarded(member, f"engine of rank {member.rank}", work, self._state.fail)
        size = sum(bucket.size for bucket in pack(join.manifest.entries, join.bucket_bytes))
        return WeightsMoved(
            version=call.version,
            digests=digests,
            bytes_moved=size,
            seconds=time.monotonic() - started,
            spans=work_log.spans(),
        )

    def commit(self, call: WeightsCommit) -> None:
        """Serve this version. Caches were reset after the load."""
        point("engine.before_commit")
        self._state.commit(call.version)

    def abandon(self, call: WeightsAbandon) -> None:
        """Drop this group and serve nothing. Urgent: frees a `receive` that waits.

        A group that a newer one has replaced is ignored: a late message must not end what works.
        """
        self._abandoned[call.nonce] = call.reason
        member = self._member
        if call.nonce in self._past and (member is None or member.nonce != call.nonce):
            return
        self._state.fail(call.reason)
        if member is not None and member.nonce == call.nonce:
            member.cancel(call.reason)
            member.close(wait_s=0.0)

    def _refuse_abandoned(self, nonce: str) -> None:
        if (reason := self._abandoned.get(nonce)) is not None:
            raise WeightSyncError(f"group {nonce!r} was abandoned: {reason}")

    def _receive_all(self, member: Member, join: WeightsJoin, deadline: Deadline, log: WorkLog) -> tuple[str, ...]:
        member.form(deadline)
        log.lap("rendezvous")
        manifest = join.manifest
        self._sink.load(self._arriving(member, join, deadline))
        point("engine.after_load")
        log.lap("load weights")
        self._progress.advance("loaded")
        memory = self._sink.finish(manifest)
        digests = tuple(_held_digest(entry, memory) for entry in manifest.entries)
        log.lap("digest")
        return digests

    def _arriving(self, member: Member, join: WeightsJoin, deadline: Deadline) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors as they come. Each is a view of a buffer, good until the next one is asked for."""
        entries = join.manifest.entries
        plan = pack(entries, join.bucket_bytes)
        room = max((bucket.size for bucket in plan), default=0)
        buffers = [torch.empty(room, dtype=torch.uint8, device=member.device) for _ in range(2)]
        jobs: list[Job[None]] = []

        def ask(number: int) -> None:
            if number < len(plan):
                buffer = buffers[number % 2][: plan[number].size]
                jobs.append(member.broadcast(buffer, deadline, phase_of("receiving", number, plan, entries)))

        whole = _Assembler(join.manifest)
        ask(0)
        for number, bucket in enumerate(plan):
            phase = phase_of("receiving", number, plan, entries)
            ask(number + 1)  # its buffer is free: the bucket before this one was loaded
            member.finish(jobs[number], deadline, phase)
            point("engine.receive")
            yield from whole.bucket(bucket, buffers[number % 2])
            self._progress.advance(phase)
        yield from whole.rest()


class _Assembler:
    """Whole tensors out of buckets. What was split over buckets is put together in memory of its own."""

    def __init__(self, manifest: Manifest) -> None:
        self._entries = manifest.entries
        self._next = 0
        self._split: Tensor | None = None

    def bucket(self, bucket: Bucket, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        for piece in bucket.pieces:
            yield from self._empty(until=piece.entry)
            entry = self._entries[piece.entry]
            total = entry_bytes(entry)
            data = buffer[piece.offset : piece.offset + piece.size]
            if piece.size == total:
                yield self._tensor(entry, data)
                continue
            if self._split is None:
                self._split = torch.empty(total, dtype=torch.uint8, device=buffer.device)
            self._split[piece.start : piece.start + piece.size].copy_(data)
            if piece.start + piece.size == total:
                data, self._split = self._split, None
                yield self._tensor(entry, data)

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Empty tensors after the last piece."""
        yield from self._empty(until=len(self._entries))

    def _empty(self, until: int) -> Iterator[tuple[str, Tensor]]:
        while self._next < until:
            entry = self._entries[self._next]
            yield self._tensor(entry, torch.empty(0, dtype=torch.uint8))

    def _tensor(self, entry: TensorEntry, data: Tensor) -> tuple[str, Tensor]:
        self._next += 1
        return entry.name, data.view(torch_dtype(entry.dtype)).view(entry.shape)


def _held_digest(entry: TensorEntry, memory: dict[str, Tensor]) -> str:
    held = memory.get(entry.name)
    if held is None:
        raise WeightSyncError(f"{entry.name}: the engine cannot show its memory of it, so it cannot be verified.")
    # A model may hold a tensor in a wider dtype than it was sent in; casting back is exact then.
    return digest(held.to(torch_dtype(entry.dtype)))
