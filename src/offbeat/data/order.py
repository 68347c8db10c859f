"""Which row comes when: pure functions of (seed, weights, sizes, position), so any position can be reached at once.

`slots` mixes sources by weight: source i, with share p_i, is due for its j-th row at time (j + ½) / p_i, and rows
are taken in order of due time: evenly spread, in exact proportion over time, without random numbers. `permutation`
shuffles a source's rows: another order for each seed, source and epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Weights as exact shares that sum to 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def slots(parts: Sequence[Fraction], first: int, count: int) -> list[tuple[int, int]]:
    """(source, how many rows of that source came before) for each of the slots `first … first + count - 1`."""
    if len(parts) == 1:
        return [(0, position) for position in range(first, first + count)]
    # Until time t source i has had floor(p_i·t + ½) rows, so all of them together t rows, to within half a row each.
    margin = len(parts)
    begin, end = max(first - margin, 0), first + count + margin
    before = 0
    due: list[tuple[Fraction, int, int]] = []
    for source, part in enumerate(parts):
        low = _due_before(part, begin)
        before += low
        due.extend(((j + Fraction(1, 2)) / part, source, j) for j in range(low, _due_before(part, end)))
    due.sort()
    return [(source, j) for _, source, j in due[first - before : first - before + count]]


def _due_before(part: Fraction, time: int) -> int:
    """Rows with due time (j + ½) / part < time."""
    return max(math.ceil(part * time - Fraction(1, 2)), 0)


@lru_cache(maxsize=16)
def permutation(seed: int, source: str, epoch: int, size: int) -> np.ndarray:
    """The order of `size` rows in one epoch. Read-only.

    Raw generator output is sorted, since numpy keeps its bit streams stable but not its `permutation`.
    """
    key = hashlib.blake2b(f"{seed}\x1f{source}\x1f{epoch}".encode(), digest_size=16).digest()
    generator = np.random.PCG64(int.from_bytes(key, "little"))
    order = np.argsort(generator.random_raw(size), kind="stable")
    order.flags.writeable = False
    return order
