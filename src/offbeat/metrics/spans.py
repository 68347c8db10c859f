"""When each side worked, on one clock: the monotonic clock of the controller.

    timeline = Timeline()
    with timeline.span("engines", "generate", step=4) as span:
        ...
        span.busy_s = result.busy_s
    window = timeline.window(step=3)     # since the previous window, what still runs included

A side is `engines`, `trainer`, `rewards` or `controller`; the names that offbeat's records read are
`generate`, `train`, `reward`, `sync`, `evaluate`. `step` is the step whose samples the work is for, so the
generation of step 4 that runs while step 3 trains has `step=4`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["engines", "trainer", "rewards", "controller"]


@dataclass(frozen=True)
class Span:
    """One piece of work from `start_s` to `end_s`."""

    side: Side
    name: str
    start_s: float
    end_s: float
    step: int | None = None
    busy_s: float | None = None
    """Seconds of work as the process itself counted them, its waiting left out; None where it did not say."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Window:
    """One step on the clock: from the end of the previous window to now."""

    start_s: float
    end_s: float
    spans: tuple[Span, ...]
    """All that overlaps the window, and earlier work for this step. Not clipped; what still runs ends at `end_s`."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class OpenSpan:
    """Work that has begun. The one thing that may be added while it runs is `busy_s`."""

    side: Side
    name: str
    start_s: float
    step: int | None
    busy_s: float | None = None

    def until(self, end_s: float) -> Span:
        return Span(self.side, self.name, self.start_s, end_s, self.step, self.busy_s)


class Timeline:
    """Collects spans for the step records; forgets what no later record can need.

    Used from one thread (the controller's event loop); spans of several tasks may be open at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._closed: list[Span] = []
        self._open: list[OpenSpan] = []
        self._window_start_s = clock()

    @contextmanager
    def span(self, side: Side, name: str, *, step: int | None = None) -> Generator[OpenSpan]:
        """Records the time of the block, also when it fails or is cancelled."""
        opened = OpenSpan(side, name, self._clock(), step)
        self._open.append(opened)
        try:
            yield opened
        finally:
            # By identity: two spans opened in the same instant are equal as values.
            self._open = [other for other in self._open if other is not opened]
            self._closed.append(opened.until(self._clock()))

    def add(self, span: Span) -> None:
        """A span measured elsewhere on the same clock."""
        self._closed.append(span)

    def begin(self) -> None:
        """The first window starts now: call it when start-up is over and the first step begins."""
        self._window_start_s = self._clock()

    @property
    def held(self) -> int:
        """Finished spans that a later record may need."""
        return len(self._closed)

    def window(self, step: int) -> Window:
        """Ends the window of `step` and starts the next one at the same instant."""
        start_s, end_s = self._window_start_s, self._clock()
        running = [opened.until(end_s) for opened in self._open]
        spans = sorted((*self._closed, *running), key=lambda span: (span.start_s, span.end_s, span.name))
        kept = [span for span in spans if span.end_s > start_s or span.step == step]
        self._closed = [
            span for span in self._closed if span.end_s > end_s or (span.step is not None and span.step > step)
        ]
        self._window_start_s = end_s
        return Window(start_s, end_s, tuple(kept))
