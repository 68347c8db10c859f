"""Each reward function by itself: mean and spread, under the name by which it reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from offbeat.types import Scored


def part_means(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean value of each reward function over the samples that have one; a failed call counts as its 0."""
    return {name: math.fsum(found) / len(found) for name, found in _values(scored).items()}


def part_deviations(scored: Sequence[Scored]) -> dict[str, float]:
    """Standard deviation of each (divided by n); exactly 0 where all values are the same."""
    return {name: _deviation(found) for name, found in _values(scored).items()}


def part_errors(scored: Sequence[Scored]) -> dict[str, int]:
    """Failed calls of each reward function that failed; an error begins with the function's name."""
    found = ((part, error) for sample in scored for error in sample.errors for part in sample.parts)
    return dict(Counter(part for part, error in found if error.startswith(f"{part}: ")))


def _deviation(values: Sequence[float]) -> float:
    if min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _values(scored: Sequence[Scored]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for sample in scored:
        for part, value in sample.parts.items():
            values.setdefault(part, []).append(value)
    return values
