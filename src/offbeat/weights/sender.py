"""Trainer rank 0's side of a transfer: `weights_offer`, `weights_send`, `weights_close`.

    source.tensors() ─ cast, pack ─▶ buffer A ─ lane: broadcast ─▶ engines
                                     buffer B    (A is on its way while B is packed and digested)

The group is kept between transfers and is used again when the same nonce is offered. Another nonce, a failure or
`weights_close` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offbeat.errors import WeightSyncError
from offbeat.faults import point
from offbeat.ports import WeightSource
from offbeat.rpc.messages import Manifest, WeightsAbandon, WeightsMove, WeightsMoved, WeightsOffer, WeightsOffered
from offbeat.rpc.server import Method
from offbeat.rpc.work import WorkLog
from offbeat.weights.group import collective_version, require_backend
from offbeat.weights.manifest import manifest_hash, torch_dtype
from offbeat.weights.member import Deadline, Member, run_guarded
from offbeat.weights.packing import Bucket, entry_bytes, pack, phase_of
from offbeat.weights.rendezvous import Rendezvous
from offbeat.weights.verify import NOT_FINITE, Digest, all_finite

if TYPE_CHECKING:
    from offbeat.rpc.server import Progress
    from offbeat.weights.lane import Job


class WeightSender:
    """Serves the trainer's weights to the members of one group at a time. `version` says what the source now holds."""

    def __init__(self, source: WeightSource, version: Callable[[], int], progress: Progress) -> None:
        self._source = source
        self._version = version
        self._progress = progress
        self._member: Member | None = None
        self._offer: tuple[WeightsOffer, Manifest] | None = None
        self._closed: dict[str, str] = {}

    def methods(self) -> dict[str, Method]:
        return {
            "weights_offer": Method(WeightsOffer, self.offer),
            "weights_send": Method(WeightsMove, self.send),
            "weights_close": Method(WeightsAbandon, self.close, urgent=True),
        }

    def offer(self, call: WeightsOffer) -> WeightsOffered:
        """Hold a listener for this group (or keep the one that stands) and say what will be sent."""
        require_backend(call.backend)
        manifest = self._source.manifest(call.dtype)
        pack(manifest.entries, call.bucket_bytes)  # a tensor that cannot be sent is refused here, before anybody waits
        if (reason := self._closed.get(call.nonce)) is not None:
            raise WeightSyncError(f"group {call.nonce!r} was closed before it was offered: {reason}")
        member = self._member
        if member is None or not self._stands(member, call):
            if member is not None:
                member.close()
            server = Rendezvous(call.host, call.nonce, call.members, call.timeout_s)
            member = Member(server.endpoint, nonce=call.nonce, rank=0, members=call.members, backend=call.backend)
            member.server = server
            self._member = member
        self._offer = (call, manifest)
        return WeightsOffered(
            host=member.endpoint.host,
            port=member.endpoint.port,
            manifest=manifest,
            manifest_hash=manifest_hash(manifest),
            collective_version=collective_version(call.backend),
        )

    def send(self, call: WeightsMove) -> WeightsMoved:
        """Send every tensor once. Returns the digests of what was sent."""
        member, offer = self._member, self._offer
        if member is None or offer is None or member.nonce != call.nonce:
            reason = self._closed.get(call.nonce, "it was not offered")
            raise WeightSyncError(f"group {call.nonce!r} cannot send: {reason}.")
        if call.version != self._version():
            raise WeightSyncError(f"asked to send version {call.version}, but the trainer is at {self._version()}.")
        started, log = time.monotonic(), WorkLog()
        deadline = Deadline(call.timeout_s, call.stall_s)
        member.connect(deadline)
        digests, size = run_guarded(
            member, "trainer", lambda: self._send_all(member, offer[0], offer[1], deadline, log), lambda _: None
        )
        return WeightsMoved(
            version=call.version,
            digests=digests,
            bytes_moved=size,
            seconds=time.monotonic() - started,
            spans=log.spans(),
        )

    def close(self, call: WeightsAbandon) -> None:
        """Free whoever waits in this group and let go of it. Urgent: may run while `send` works."""
        self._closed[call.nonce] = call.reason
        member = self._member
        if member is not None and member.nonce == call.nonce:
            member.cancel(call.reason)
            member.close(wait_s=0.0)

    @staticmethod
    def _stands(member: Member, call: WeightsOffer) -> bool:
        same = (member.nonce, member.members, member.backend) == (call.nonce, call.members, call.backend)
        return same and member.usable

    def _send_all(
        self, member: Member, offer: WeightsOffer, manifest: Manifest, deadline: Deadline, log: WorkLog
    ) -> tuple[tuple[str, ...], int]:
        member.form(deadline)
        log.lap("rendezvous")
        plan = pack(manifest.entries, offer.bucket_bytes)
        room = max((bucket.size for bucket in plan), default=0)
        buffers = [torch.empty(room, dtype=torch.uint8, device=member.device) for _ in range(2)]
        under_way: list[tuple[Job[None], str] | None] = [None, None]
        fill = _Filler(manifest, self._source.tensors())
        for number, bucket in enumerate(plan):
            side = number % 2
            if (sent := under_way[side]) is not None:
                member.finish(sent[0], deadline, sent[1])
            phase = phase_of("sending", number, plan, manifest.entries)
            packed = buffers[side][: bucket.size]
            fill.bucket(bucket, packed)
            point("trainer.send")
            under_way[side] = (member.broadcast(packed, deadline, phase), phase)
            fill.digest(bucket, packed)
            self._progress.advance(phase)
        for sent in (under_way[len(plan) % 2], under_way[1 - len(plan) % 2]):
            if sent is not None:
                member.finish(sent[0], deadline, sent[1])
        fill.end()
        log.lap("send weights")
        return fill.digests(), sum(bucket.size for bucket in plan)


class _Filler:
    """Writes tensors, cast to the manifest's dtypes, into buckets, in the one order that the plan has."""

    def __init__(self, manifest: Manifest, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._entries = manifest.entries
        self._tensors = tensors
        self._index = -1
        self._flat = torch.empty(0)
        self._digests: dict[int, Digest] = {}

    def bucket(self, bucket: Bucket, buffer: Tensor) -> None:
        for piece in bucket.pieces:
            while self._index < piece.entry:
                self._next()
            dtype = torch_dtype(self._entries[piece.entry].dtype)
            first = piece.start // dtype.itemsize
            part = self._flat[first : first + piece.size // dtype.itemsize]
            buffer[piece.offset : piece.offset + piece.size].view(dtype).copy_(part)  # casts on the way

    def digest(self, bucket: Bucket, buffer: Tensor) -> None:
        """Of the bytes in the buffer, while they are on their way. WeightSyncError when one is no number."""
        for piece in bucket.pieces:
            entry = self._entries[piece.entry]
            digest = self._digests.setdefault(piece.entry, Digest(entry_bytes(entry)))
            data = buffer[piece.offset : piece.offset + piece.size]
            digest.add(data, piece.start)
            if not all_finite(data.view(torch_dtype(entry.dtype))):
                raise WeightSyncError(
                    f"{entry.name} {list(entry.shape)} {entry.dtype} {NOT_FINITE}; nothing was committed."
                )

    def end(self) -> None:
        """Every entry was taken from the source, and the source has no more."""
        while self._index < len(self._entries) - 1:
            self._next()
        if (more := next(self._tensors, None)) is not None:
            raise WeightSyncError(f"the source gave {more[0]}, which its manifest does not have.")

    def digests(self) -> tuple[str, ...]:
        return tuple(
            self._digests.get(index, Digest(entry_bytes(entry))).text() for index, entry in enumerate(self._entries)
        )

    def _next(self) -> None:
        self._index += 1
        entry = self._entries[self._index]
        name, tensor = next(self._tensors, ("nothing", torch.empty(0)))
        if name != entry.name or tuple(tensor.shape) != entry.shape:
            raise WeightSyncError(
                f"the source gave {name} {list(tensor.shape)} where its manifest has {entry.name} {list(entry.shape)}."
            )
        self._flat = tensor.detach().reshape(-1)
