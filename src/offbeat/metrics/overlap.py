"""How much of the shorter side's work was hidden behind the other's. Pure arithmetic on spans.

    engines  ─────██████████──        E: seconds in which any engine generates
    trainer  ──█████████──────        T: seconds in which the trainer trains
    both     ─────██████──────        B: seconds in which both do

    overlap = B / min(E, T)           0 when either side did nothing

1 means that the side with less work was wholly hidden; 0 that the two took turns. Work that runs several times at once
(two engines) counts once: each side is a union of intervals. Only `generate` and `train` count; evaluation and
weight sync are nobody's overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offbeat.metrics.spans import Span, Window

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants as disjoint intervals in order; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered, each instant once."""
    return sum((end - start for start, end in union(intervals)), 0.0)


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The instants in both, as disjoint intervals in order."""
    lefts, rights = union(left), union(right)
    shared: list[Interval] = []
    i = j = 0
    while i < len(lefts) and j < len(rights):
        start, end = max(lefts[i][0], rights[j][0]), min(lefts[i][1], rights[j][1])
        if end > start:
            shared.append((start, end))
        if lefts[i][1] < rights[j][1]:
            i += 1
        else:
            j += 1
    return shared


def intervals_of(spans: Iterable[Span], name: str) -> list[Interval]:
    """When work of this name was done."""
    return [(span.start_s, span.end_s) for span in spans if span.name == name]


def overlap(spans: Sequence[Span], start_s: float, end_s: float) -> float:
    """The formula above for the window from `start_s` to `end_s`; spans are clipped to it. Between 0 and 1."""
    window = [(start_s, end_s)]
    engines = intersection(intervals_of(spans, "generate"), window)
    trainer = intersection(intervals_of(spans, "train"), window)
    shorter = min(length(engines), length(trainer))
    if shorter <= 0.0:
        return 0.0
    # Sums of floats may differ in the last bit; the value promised is a share.
    return min(1.0, length(intersection(engines, trainer)) / shorter)


def seconds_of(window: Window, name: str, step: int | None = None) -> float:
    """Seconds of work of this name: for `step` wherever it lies, or inside the window when `step` is None."""
    if step is not None:
        return length(intervals_of((span for span in window.spans if span.step == step), name))
    inside = intersection(intervals_of(window.spans, name), [(window.start_s, window.end_s)])
    return length(inside)
