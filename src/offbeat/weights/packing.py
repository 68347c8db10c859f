"""The packing plan: which bytes of which tensor lie where in which bucket. Pure; both ends call `pack`.

    entries   a ────────  b ──  c ────────────────────
    buckets   │a     b  │c         │c       │             each at most `bucket_bytes`

The sender states the bucket size and the entries; nothing is derived from a machine's own memory. A tensor that does
not fit into what is left of a bucket starts a new one, unless it is larger than a whole bucket: then it is split. Every
piece starts on a multiple of `ALIGN` bytes in its bucket and in its tensor, so that it can be viewed as any dtype.
An empty tensor has no piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import TensorEntry

ALIGN = 64
"""Bytes. A multiple of every element size, and of the digest's word."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Every dtype that can be sent, by torch's name without the prefix."""


@dataclass(frozen=True)
class Piece:
    """Bytes `start … start + size` of one tensor, at `offset` in its bucket."""

    entry: int
    """Index into the manifest's entries."""
    start: int
    offset: int
    size: int


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries. Gaps between pieces are alignment."""

    pieces: tuple[Piece, ...]
    size: int


def entry_bytes(entry: TensorEntry) -> int:
    """Size of a tensor. WeightSyncError for a dtype that cannot be sent or a negative dimension."""
    if entry.dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        raise WeightSyncError(f"tensor {entry.name!r}: dtype {entry.dtype!r} cannot be sent; known: {known}.")
    if any(size < 0 for size in entry.shape):
        raise WeightSyncError(f"tensor {entry.name!r}: shape {entry.shape} has a negative dimension.")
    return prod(entry.shape) * ITEM_BYTES[entry.dtype]


def pack(entries: Sequence[TensorEntry], bucket_bytes: int) -> tuple[Bucket, ...]:
    """The plan of a whole transfer: every byte of every entry once, in manifest order."""
    limit = bucket_bytes - bucket_bytes % ALIGN
    if limit < ALIGN:
        raise WeightSyncError(f"bucket of {bucket_bytes} bytes: give at least {ALIGN} (weights.bucket_mib).")
    return tuple(_buckets(entries, limit))


def _buckets(entries: Sequence[TensorEntry], limit: int) -> Iterator[Bucket]:
    pieces: list[Piece] = []
    used = 0
    for index, entry in enumerate(entries):
        total = entry_bytes(entry)
        start = 0
        while start < total:
            left = limit - _aligned(used)
            if left <= 0 or (pieces and left < total <= limit):
                yield Bucket(tuple(pieces), used)
                pieces, used = [], 0
                continue
            offset = _aligned(used)
            size = min(total - start, left)
            pieces.append(Piece(index, start, offset, size))
            used = offset + size
            start += size
    if pieces:
        yield Bucket(tuple(pieces), used)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def phase_of(verb: str, number: int, plan: Sequence[Bucket], entries: Sequence[TensorEntry]) -> str:
    """What a person reads when bucket `number` is where it stopped: its place in the plan and the tensors in it."""
    pieces = plan[number].pieces
    first, last = entries[pieces[0].entry].name, entries[pieces[-1].entry].name
    return f"{verb} bucket {number + 1} of {len(plan)} ({first} … {last})"
