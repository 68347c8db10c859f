"""Micro-batches: padded right, packed by length under a budget of padded tokens. numpy only.

Which rows are computed together is a matter of memory. Nothing here knows a denominator, and nothing is inferred from
token values: a row's length says what is prompt, continuation and padding, so that a pad id equal to a stop id, several
stop ids or none, and any filler are all the same.

    row     p0 p1 p2 r0 r1 r2  0  0      prompt P = 3, continuation T = 3, width L = 8
    scores         ^  ^  ^               the logits at P-1 … P+T-2 predict r0 … r2

Shapes: B rows, L columns, N continuation tokens of all rows (row after row).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.types import IntArray

PAD_ID = 0
"""Any valid id does: no real token attends to padding and padding is never scored."""


class Sequenced(Protocol):
    """A prompt with its continuation."""

    @property
    def prompt_token_ids(self) -> IntArray: ...
    @property
    def token_ids(self) -> IntArray: ...


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed at once."""

    rows: tuple[int, ...]
    """Their places in what was given to `micro_batches`."""
    ids_BL: np.ndarray
    """int64."""
    scored_BL: np.ndarray
    """bool: True at the positions whose logits predict a continuation token; N of them."""
    targets_N: np.ndarray
    """int64: the continuation tokens."""
    sample_N: np.ndarray
    """int64: the row of this micro-batch that each continuation token is of."""
    first_column: int
    last_column: int
    """All scored positions lie in columns first_column … last_column."""


def micro_batches(sequences: Sequence[Sequenced], budget: int) -> Iterator[MicroBatch]:
    """All sequences with a continuation, longest first, each micro-batch with at most `budget` padded tokens.

    A sequence longer than the budget is a micro-batch of its own.

    Raises:
        ValueError: a prompt without tokens: its first continuation token could not be scored.
    """
    prompt = np.asarray([len(s.prompt_token_ids) for s in sequences], dtype=np.int64)
    continuation = np.asarray([len(s.token_ids) for s in sequences], dtype=np.int64)
    if len(sequences) and bool((prompt[continuation > 0] == 0).any()):
        raise ValueError("a prompt has no tokens: its continuation cannot be scored; give every prompt at least one")
    for rows in pack(prompt + continuation, budget, skip=continuation == 0):
        yield _collate(sequences, rows, prompt[rows], continuation[rows])


def pack(lengths: np.ndarray, budget: int, *, skip: np.ndarray | None = None) -> list[np.ndarray]:
    """Row numbers of each micro-batch: longest first, ties in the order given. Pure arithmetic, never empty."""
    order = np.argsort(-lengths, kind="stable")
    if skip is not None:
        order = order[~skip[order]]
    packs: list[np.ndarray] = []
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, int(lengths[order[start]])))
        packs.append(order[start : start + rows])
        start += rows
    return packs


def _collate(
    sequences: Sequence[Sequenced], rows: np.ndarray, prompt_B: np.ndarray, continuation_B: np.ndarray
) -> MicroBatch:
    length_B = prompt_B + continuation_B
    column_L = np.arange(int(length_B.max()))
    ids_BL = np.full((len(rows), len(column_L)), PAD_ID, dtype=np.int64)
    chosen = [sequences[row] for row in rows.tolist()]
    ids_BL[column_L < length_B[:, None]] = np.concatenate(
        [part for s in chosen for part in (s.prompt_token_ids, s.token_ids)]
    )
    return MicroBatch(
        rows=tuple(rows.tolist()),
        ids_BL=ids_BL,
        scored_BL=(column_L >= prompt_B[:, None] - 1) & (column_L < length_B[:, None] - 1),
        targets_N=np.concatenate([s.token_ids for s in chosen]).astype(np.int64),
        sample_N=np.repeat(np.arange(len(rows)), continuation_B),
        first_column=int(prompt_B.min()) - 1,
        last_column=int(length_B.max()) - 2,
    )
