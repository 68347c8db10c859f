"""Old scores against new ones, added up sample by sample: memory does not grow with their number. Pure.

comparison.add(samples of whole groups, new scores)  …  comparison_lines(comparison)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.metrics import figures
from offbeat.metrics.recorded import Group, RecordedSample
from offbeat.metrics.records import has_spread

LARGEST = 3
"""Samples with the largest change that are kept to be shown."""


@dataclass(frozen=True)
class Score:
    """A sample's new one."""

    reward: float
    parts: dict[str, float]
    errors: tuple[str, ...]


@dataclass
class PartChange:
    """One reward function, or their weighted sum. A value is missing where the function abstained."""

    old_count: int = 0
    old_sum: float = 0.0
    new_count: int = 0
    new_sum: float = 0.0
    both: int = 0
    up: int = 0
    down: int = 0

    def add(self, old: float | None, new: float | None) -> None:
        if old is not None:
            self.old_count += 1
            self.old_sum += old
        if new is not None:
            self.new_count += 1
            self.new_sum += new
        if old is not None and new is not None:
            self.both += 1
            if has_spread([old, new]):
                self.up += new > old
                self.down += new < old

    @property
    def old_mean(self) -> float | None:
        return self.old_sum / self.old_count if self.old_count else None

    @property
    def new_mean(self) -> float | None:
        return self.new_sum / self.new_count if self.new_count else None

    @property
    def agreement(self) -> float | None:
        """Share of equal values, of the samples that have both."""
        return 1 - (self.up + self.down) / self.both if self.both else None


@dataclass
class Comparison:
    samples: int = 0
    groups: int = 0
    spread_before: int = 0
    spread_after: int = 0
    total: PartChange = field(default_factory=PartChange)
    parts: dict[str, PartChange] = field(default_factory=dict[str, PartChange])
    old_errors: int = 0
    new_errors: int = 0
    first_error: str | None = None
    steps: tuple[int, int] | None = None
    _largest: list[tuple[float, int, RecordedSample, Score]] = field(
        default_factory=list[tuple[float, int, RecordedSample, Score]]
    )

    def add(self, samples: Sequence[RecordedSample], scores: Sequence[Score]) -> None:
        """Samples of the same group must come in one call."""
        groups: dict[Group, list[tuple[float | None, float]]] = {}
        for sample, score in zip(samples, scores, strict=True):
            self._add(sample, score)
            groups.setdefault(sample.group, []).append((sample.reward, score.reward))
        for group in groups.values():
            self.spread_before += has_spread([old for old, _ in group if old is not None] or [0.0])
            self.spread_after += has_spread([new for _, new in group])
        self.groups += len(groups)

    def _add(self, sample: RecordedSample, score: Score) -> None:
        self.samples += 1
        low, high = self.steps or (sample.step, sample.step)
        self.steps = (min(low, sample.step), max(high, sample.step))
        self.total.add(sample.reward, score.reward)
        for name in dict.fromkeys([*sample.parts, *score.parts]):
            self.parts.setdefault(name, PartChange()).add(sample.parts.get(name), score.parts.get(name))
        self.old_errors += len(sample.errors)
        self.new_errors += len(score.errors)
        if score.errors and self.first_error is None:
            self.first_error = f"{score.errors[0]} (sample {sample.prompt_id} #{sample.sample_index})"
        change = abs(score.reward - (sample.reward or 0.0))
        if has_spread([score.reward, sample.reward or 0.0]):
            heapq.heappush(self._largest, (change, -self.samples, sample, score))
            if len(self._largest) > LARGEST:
                heapq.heappop(self._largest)

    @property
    def largest(self) -> list[tuple[RecordedSample, Score]]:
        """Largest change first, of equal ones the earliest."""
        return [(sample, score) for _, _, sample, score in sorted(self._largest, key=lambda e: e[:2], reverse=True)]


def comparison_lines(comparison: Comparison) -> list[str]:
    low, high = comparison.steps or (0, 0)
    steps = f"step {low}" if low == high else f"steps {low} to {high}"
    groups = max(1, comparison.groups)
    spread = [figures.percent(n / groups) for n in (comparison.spread_before, comparison.spread_after)]
    lines = [
        f"samples    {figures.counted(comparison.samples, 'sample')} of {figures.counted(comparison.groups, 'group')}, "
        f"{steps}",
        f"reward     {_change(comparison.total)}",
        *(f"           {name} {_change(part)}" for name, part in comparison.parts.items()),
    ]
    if comparison.samples > comparison.groups:  # one sample a group has nothing to differ from
        lines.append(f"spread     {spread[0]} → {spread[1]} of groups have different rewards")
    if comparison.old_errors or comparison.new_errors:
        lines.append(f"errors     {comparison.old_errors:,} → {comparison.new_errors:,}")
    if comparison.first_error is not None:
        lines.append(f"           the first: {comparison.first_error}")
    return lines


def _change(part: PartChange) -> str:
    """`.412 → .380 · up 10 · down 43 · same 95 %`"""
    words = [f"{figures.decimal(part.old_mean, 3)} → {figures.decimal(part.new_mean, 3)}"]
    if not part.old_count:
        words.append("new")
    elif not part.new_count:
        words.append("gone")
    else:
        words += [f"up {part.up:,}", f"down {part.down:,}", f"same {figures.percent(part.agreement)}"]
        if part.old_count != part.both:
            words.append(f"None now {part.old_count - part.both:,}")
        if part.new_count != part.both:
            words.append(f"None before {part.new_count - part.both:,}")
    return " · ".join(words)
