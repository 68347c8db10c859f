"""The kept samples as compressed chunks, which the page opens when it shows them.

A chunk is a JSON array of groups (zlib's format, base64), about `CHUNK_BYTES` of JSON. A first, small chunk is the
index: what filters and orders need of every kept sample, in columns. The page never holds all texts at once.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from offbeat.metrics.samples import bounded
from offbeat.report.lines import decode, number, rounded, short, text, whole
from offbeat.report.sample_index import Groups, SampleIndex, choose

Json: TypeAlias = dict[str, Any]
ReadLine: TypeAlias = Callable[[int, int, int], bytes]
"""(file, offset, size) → the line."""

TEXT_LIMIT = 8_000
"""Characters of a prompt or a completion in the page; of a longer one its two ends are kept."""
CHUNK_BYTES = 256 << 10
LARGEST_RATIO = 8.0
"""Bytes of samples.jsonl to bytes of the page, at most."""
LISTED = 64
"""Parts, errors and versions of one sample that are kept."""


@dataclass(frozen=True)
class Packed:
    index: str
    chunks: tuple[str, ...]
    groups: tuple[int, ...]
    cut: int
    """Texts that are not whole."""

    @property
    def size(self) -> int:
        return len(self.index) + sum(map(len, self.chunks))


def packed_json(value: Any) -> str:
    """Compressed JSON as text that is safe inside any HTML element."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(encoded, 6)).decode("ascii")


def pack(index: SampleIndex, groups: Groups, read: ReadLine, limit_bytes: int) -> Packed:
    """As many groups as `limit_bytes` of page hold, chosen by `choose`; of text that packs very well, not more than
    `LARGEST_RATIO` times as many bytes of samples.jsonl, so that the page stays quick to search. Where none of those
    fits, the smallest group, if it does."""
    smallest = [int(groups.bytes.argmin())] if len(groups.bytes) else []
    packed = _pack(index, choose(index, groups, limit_bytes) or smallest, read)
    if packed.size < limit_bytes and len(packed.groups) < len(groups.block):  # a first part told how well it packs
        packed = _pack(index, choose(index, groups, _room(groups, packed, limit_bytes)), read)
    while packed.size > limit_bytes and packed.groups:
        packed = _pack(index, choose(index, groups, _room(groups, packed, limit_bytes)), read)
    if not packed.groups and smallest:
        alone = _pack(index, smallest, read)
        packed = alone if alone.size <= limit_bytes else packed
    return packed


def _room(groups: Groups, packed: Packed, limit_bytes: int) -> float:
    """Bytes of samples.jsonl that would take `limit_bytes`, a little less to be sure."""
    taken = float(groups.bytes[list(packed.groups)].sum())
    return limit_bytes * min(LARGEST_RATIO, 0.95 * taken / packed.size)


def _pack(index: SampleIndex, chosen: Sequence[int], read: ReadLine) -> Packed:
    """The lines of each chosen group are read again; memory holds one chunk's texts."""
    keys = list(index.groups)
    blocks = list(index.blocks)
    chunks: list[str] = []
    waiting: list[Json] = []
    size = cut = 0
    columns = _Columns()
    for group, members in _members(index, chosen):
        value, cut_here, length = _group([decode(read(*_where(index, i))) or {} for i in members])
        block, prompt_id, epoch = keys[group]
        columns.add(
            blocks[block], prompt_id, epoch, len(chunks), len(waiting), [_sample_row(index, i) for i in members]
        )
        waiting.append(value)
        cut += cut_here
        size += length
        if size >= CHUNK_BYTES:
            chunks.append(packed_json(waiting))
            waiting, size = [], 0
    if waiting:
        chunks.append(packed_json(waiting))
    return Packed(packed_json(columns.value()), tuple(chunks), tuple(chosen), cut)


def _members(index: SampleIndex, chosen: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """(group, its samples in order of their index), for each chosen group."""
    group = np.array(index.group, dtype=np.int64)
    place = np.array(index.place, dtype=np.int64)
    order = np.lexsort((np.arange(len(group)), place, group))
    ordered = group[order]
    for one in chosen:
        first, last = np.searchsorted(ordered, [one, one + 1])
        yield one, order[first:last].tolist()


def _where(index: SampleIndex, i: int) -> tuple[int, int, int]:
    return index.file[i], index.offset[i], index.size[i]


def _sample_row(index: SampleIndex, i: int) -> tuple[float | int | None, int, int]:
    return short(index.reward[i]), index.tokens[i], index.flags[i]


class _Columns:
    """The index: one entry a group, and one a sample in the order of the groups."""

    def __init__(self) -> None:
        self._sets: dict[str | None, int] = {None: 0}
        self._groups: dict[str, list[Any]] = {
            key: [] for key in ("set", "step", "prompt_id", "epoch", "chunk", "at", "count")
        }
        self._samples: dict[str, list[Any]] = {key: [] for key in ("reward", "tokens", "flags")}

    def add(
        self,
        block: tuple[str | None, int],
        prompt_id: str,
        epoch: int,
        chunk: int,
        at: int,
        rows: Sequence[tuple[float | int | None, int, int]],
    ) -> None:
        evaluation, step = block
        number_of_set = self._sets.setdefault(evaluation, len(self._sets))
        one = (number_of_set, step, text(prompt_id)[:300], epoch, chunk, at, len(rows))
        for column, value in zip(self._groups.values(), one, strict=True):
            column.append(value)
        for row in rows:
            for column, value in zip(self._samples.values(), row, strict=True):
                column.append(value)

    def value(self) -> Json:
        sets = [text(name)[:300] for name in self._sets if name is not None]
        return {"sets": [None, *sets], "groups": self._groups, "samples": self._samples}


def _group(lines: Sequence[Mapping[str, Any]]) -> tuple[Json, int, int]:
    """(one group, texts that were cut, about how many bytes). The prompt is there once."""
    prompt, cut = _cut(lines[0].get("prompt"))
    samples: list[Json] = []
    size = len(prompt)
    for line in lines:
        completion, cut_here = _cut(line.get("completion"))
        samples.append(_sample(line, completion))
        cut += cut_here
        size += len(completion) + 120
    source = text(lines[0].get("source"))[:300]
    return {"prompt": prompt, "source": source, "samples": samples}, cut, size


def _cut(value: object) -> tuple[str, bool]:
    found = text(value)
    return (bounded(found, TEXT_LIMIT), True) if len(found) > TEXT_LIMIT else (found, False)


def _sample(line: Mapping[str, Any], completion: str) -> Json:
    parts, errors, versions = line.get("parts"), line.get("errors"), line.get("versions")
    return {
        "completion": completion,
        "index": whole(line.get("sample_index")),
        "reward": short(number(line.get("reward"))),
        "parts": [[text(k)[:200], short(number(v))] for k, v in list(parts.items())[:LISTED]]
        if isinstance(parts, dict)
        else [],
        "errors": [bounded(text(e), 2_000) for e in errors[:LISTED]] if isinstance(errors, list) else [],
        "advantage": short(number(line.get("advantage"))),
        "finish": text(line.get("finish_reason"))[:50],
        "versions": [rounded(map(number, run[:2])) for run in versions[:LISTED] if isinstance(run, list)]
        if isinstance(versions, list)
        else [],
        "engine": text(line.get("engine"))[:100],
        "prompt_tokens": whole(line.get("prompt_tokens")),
        "tokens": whole(line.get("completion_tokens")),
    }
