"""Where every sample lies and what it scored, and which samples a page of bounded size keeps.

The texts are skipped: a sample takes about 50 bytes here (samples.jsonl is limited to two GiB, so memory is too).

Samples are kept by whole groups (all samples of a prompt in a step), in rounds. In each round every step, and every
evaluation, offers one group more: first the one with errors, then those with the worst, best and longest sample and the
widest spread, then the others in an order that is the hash of the prompt's id. A round that does not fit whole is
spread evenly over the run. The newest evaluation of each set comes first, within a quarter of the room.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from offbeat.metrics.records import has_spread
from offbeat.report.lines import decode, number, rounded, short, text, whole

Json: TypeAlias = dict[str, Any]

TRUNCATED, ERRORS, ABORTED = 1, 2, 4
NEWEST_SHARE = 0.25
"""Of the room, for the newest evaluations."""


class Head(msgspec.Struct):
    """What the index needs of a sample; all else is skipped without being decoded."""

    step: int
    prompt_id: str
    eval: str | None = None
    sample_index: int | None = None
    epoch: int | None = None
    reward: float | None = None
    errors: list[msgspec.Raw] = []
    finish_reason: str | None = None
    completion_tokens: int | None = None


@dataclass
class SampleIndex:
    """All samples as columns, in the order of the files. A block is a step's, or an evaluation's, samples."""

    file: array[int] = field(default_factory=lambda: array("b"))
    offset: array[int] = field(default_factory=lambda: array("q"))
    size: array[int] = field(default_factory=lambda: array("l"))
    group: array[int] = field(default_factory=lambda: array("l"))
    place: array[int] = field(default_factory=lambda: array("l"))
    """`sample_index` within the group."""
    reward: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("l"))
    flags: array[int] = field(default_factory=lambda: array("b"))
    blocks: dict[tuple[str | None, int], int] = field(default_factory=dict[tuple[str | None, int], int])
    """(evaluation set or None, step) → block."""
    groups: dict[tuple[int, str, int], int] = field(default_factory=dict[tuple[int, str, int], int])
    """(block, prompt id, epoch) → group."""

    def __len__(self) -> int:
        return len(self.offset)

    def add(self, file: int, offset: int, size: int, head: Head) -> None:
        block = self.blocks.setdefault((head.eval, head.step), len(self.blocks))
        group = self.groups.setdefault((block, head.prompt_id, head.epoch or 0), len(self.groups))
        flags = TRUNCATED * (head.finish_reason == "length") + ERRORS * bool(head.errors)
        self.file.append(file)
        self.offset.append(offset)
        self.size.append(size)
        self.group.append(group)
        self.place.append(head.sample_index or 0)
        self.reward.append(math.nan if head.reward is None else head.reward)
        self.tokens.append(head.completion_tokens or 0)
        self.flags.append(flags + ABORTED * (head.finish_reason == "abort"))


_DECODER = msgspec.json.Decoder(Head)


def head_of(line: bytes) -> Head | None:
    """None for a line that is no sample. Values of a wrong type count as missing."""
    try:
        head = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return _lenient_head(line)
    sizes = (head.step, head.sample_index or 0, head.epoch or 0, head.completion_tokens or 0)
    return head if all(0 <= value < 1 << 31 for value in sizes) else _lenient_head(line)


def _lenient_head(line: bytes) -> Head | None:
    values = decode(line)
    step = None if values is None else _count(values.get("step"))
    if values is None or step is None or not isinstance(values.get("prompt_id"), str | int):
        return None
    return Head(
        step=step,
        prompt_id=text(values["prompt_id"]),
        eval=None if values.get("eval") is None else text(values["eval"]),
        sample_index=_count(values.get("sample_index")),
        epoch=_count(values.get("epoch")),
        reward=number(values.get("reward")),
        errors=[msgspec.Raw(b"0")] if values.get("errors") else [],
        finish_reason=text(values.get("finish_reason")),
        completion_tokens=_count(values.get("completion_tokens")),
    )


def _count(value: object) -> int | None:
    found = whole(value)
    return found if found is not None and 0 <= found < 1 << 31 else None


# --- what all samples tell ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """One row a group: numbers of its samples."""

    block: np.ndarray
    count: np.ndarray
    bytes: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    longest: np.ndarray
    errors: np.ndarray


def groups_of(index: SampleIndex, text_limit: int) -> Groups:
    """`bytes` is what a group would take in the page before packing, each sample's texts cut at `text_limit`."""
    n, group = len(index.groups), np.array(index.group, dtype=np.int64)
    reward = np.array(index.reward, dtype=np.float64)
    known = ~np.isnan(reward)
    count, scored = np.bincount(group, minlength=n), np.bincount(group[known], minlength=n)
    low, high, longest = np.full(n, np.inf), np.full(n, -np.inf), np.zeros(n, dtype=np.int64)
    np.minimum.at(low, group[known], reward[known])
    np.maximum.at(high, group[known], reward[known])
    np.maximum.at(longest, group, np.array(index.tokens, dtype=np.int64))
    total = np.bincount(group[known], weights=reward[known], minlength=n)
    size = np.minimum(np.array(index.size, dtype=np.float64), 4.0 * text_limit)
    has_errors = np.array(index.flags, dtype=np.int64) & ERRORS > 0
    return Groups(
        block=np.array([block for block, _, _ in index.groups], dtype=np.int64),
        count=count,
        bytes=np.bincount(group, weights=size, minlength=n),
        mean=np.where(scored > 0, total / np.maximum(scored, 1), np.nan),
        low=np.where(scored > 0, low, np.nan),
        high=np.where(scored > 0, high, np.nan),
        longest=longest,
        errors=np.bincount(group[has_errors], minlength=n),
    )


QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def group_curves(index: SampleIndex, groups: Groups) -> Json:
    """Per training step: quantiles of the groups' mean rewards, shares of groups all equal, and the standard error."""
    steps: list[int] = []
    rows: list[list[float | int | None]] = []
    errors: list[float | None] = []
    spread: list[float | None] = []
    for step, means, ranges in _training_blocks(index, groups):
        steps.append(step)
        rows.append(rounded(np.quantile(means, QUANTILES).tolist()))
        errors.append(float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None)
        spread.append(float(np.mean([has_spread((low, high)) for low, high in ranges])))
    return {
        "steps": steps,
        "quantiles": [list(column) for column in zip(*rows, strict=True)] if rows else [],
        "errors": rounded(errors),
        "with_spread": rounded(spread),
    }


def _training_blocks(index: SampleIndex, groups: Groups) -> Iterator[tuple[int, np.ndarray, list[tuple[float, float]]]]:
    """(step, mean of each scored group, its lowest and highest reward), in order of the steps."""
    order = np.argsort(groups.block, kind="stable")
    edges = np.searchsorted(groups.block[order], np.arange(len(index.blocks) + 1))
    for (evaluation, step), block in sorted(index.blocks.items(), key=lambda item: item[0][1]):
        own = order[edges[block] : edges[block + 1]]
        own = own[~np.isnan(groups.mean[own])]
        if evaluation is None and len(own):
            yield step, groups.mean[own], list(zip(groups.low[own], groups.high[own], strict=True))


# --- what is kept -------------------------------------------------------------------------------------------------


def choose(index: SampleIndex, groups: Groups, room_bytes: float) -> list[int]:
    """The groups to keep, in order of the file. The same files give the same choice."""
    if float(groups.bytes.sum()) <= room_bytes:
        return list(range(len(groups.block)))
    chosen: set[int] = set()
    newest = _newest_evaluations(index)
    left = room_bytes
    for blocks, room in ((newest, room_bytes * NEWEST_SHARE), (set(index.blocks.values()), math.inf)):
        left -= _take(_by_round(index, groups, blocks), groups, chosen, min(room, left))
    return sorted(chosen)


def _take(order: Iterable[int], groups: Groups, chosen: set[int], room: float) -> float:
    """Adds groups as long as they fit; one that is too large is passed over. Returns what was used."""
    used = 0.0
    for group in order:
        size = float(groups.bytes[group])
        if group not in chosen and used + size <= room:
            chosen.add(group)
            used += size
    return used


def _newest_evaluations(index: SampleIndex) -> set[int]:
    newest: dict[str, tuple[int, int]] = {}
    for (evaluation, step), block in index.blocks.items():
        if evaluation is not None:
            newest[evaluation] = max(newest.get(evaluation, (-1, -1)), (step, block))
    return {block for _, block in newest.values()}


def _by_round(index: SampleIndex, groups: Groups, blocks: set[int]) -> list[int]:
    """All groups of these blocks: the first of each block, then the second of each, …"""
    ids = [prompt_id for _, prompt_id, _ in index.groups]
    members: dict[int, list[int]] = {block: [] for block in sorted(blocks)}
    for group, block in enumerate(groups.block.tolist()):
        if block in members:
            members[block].append(group)
    keyed = [
        (turn, _bit_reversed(place), group)
        for place, own in enumerate(members.values())
        for turn, group in enumerate(_ranked(own, groups, ids))
    ]
    return [group for _, _, group in sorted(keyed)]


def _ranked(own: Sequence[int], groups: Groups, ids: Sequence[str]) -> list[int]:
    """The groups of one block, most telling first."""
    hashed = sorted(own, key=lambda g: (zlib.crc32(ids[g].encode("utf-8", "replace")), g))
    scored = [g for g in hashed if not math.isnan(groups.low[g])]
    first: list[int] = []
    first += sorted((g for g in hashed if groups.errors[g]), key=lambda g: -int(groups.errors[g]))[:1]
    if scored:
        first.append(min(scored, key=lambda g: (groups.low[g], groups.mean[g])))
        first.append(max(scored, key=lambda g: (groups.high[g], groups.mean[g])))
        first.append(max(scored, key=lambda g: groups.high[g] - groups.low[g]))
    first += [max(hashed, key=lambda g: int(groups.longest[g]))] if hashed else []
    return list(dict.fromkeys([*first, *hashed]))


def _bit_reversed(place: int, bits: int = 32) -> int:
    """0, 1/2, 1/4, 3/4, … of the whole: any beginning of this order is spread evenly."""
    return int(f"{place:0{bits}b}"[::-1], 2)


def counts(index: SampleIndex, groups: Groups, chosen: Sequence[int]) -> Json:
    """How much there is, and how much of it is kept."""
    kept = np.array(chosen, dtype=np.int64)
    return {
        "samples": len(index),
        "groups": len(groups.block),
        "samples_kept": int(groups.count[kept].sum()) if len(kept) else 0,
        "groups_kept": len(kept),
        "bytes": short(float(np.sum(np.array(index.size, dtype=np.float64)))),
    }
