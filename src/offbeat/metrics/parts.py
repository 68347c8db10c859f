"""Each reward function by itself: its mean, under a name short enough to read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offbeat.types import Scored


def part_means(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean value of each reward function over the samples that have one; a failed call counts as its 0."""
    values: dict[str, list[float]] = {}
    for sample in scored:
        for part, value in sample.parts.items():
            values.setdefault(part, []).append(value)
    names = short_names(list(values))
    return {names[part]: math.fsum(found) / len(found) for part, found in values.items()}


def short_names(functions: Sequence[str]) -> dict[str, str]:
    """`/long/path/rewards.py:correct` → `correct`; functions that would share a name keep their whole one."""
    short = {function: function.rpartition(":")[2] or function for function in functions}
    taken = list(short.values())
    return {function: name if taken.count(name) == 1 else function for function, name in short.items()}
