"""When each side worked, on one clock: the monotonic clock of the controller.

    timeline = Timeline()
    with timeline.span("engines", "generate", step=4):
        ...                                              what processes tell of themselves meanwhile belongs to step 4
    window = timeline.window(step=3)                     since the previous window, what still runs included

A side is `engines`, `trainer`, `rewards` or `controller`; the names that offbeat's records read are
`generate`, `train`, `reward`, `sync`, `evaluate`. `step` is the step whose samples the work is for, so the
generation of step 4 that runs while step 3 trains has `step=4`.

There are two views of one piece of work: what the controller ordered and waited for (`span`), and what a process
says that it did (`worked`). Records are made of the first; the second is finer, and goes to who listens (`heard`).
All processes of a Linux host share the monotonic clock. One on another host would need an offset, which nothing adds
yet: all processes of a run are on one host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

from offbeat.rpc.messages import WorkSpan

Side: TypeAlias = Literal["engines", "trainer", "rewards", "controller"]

CONTROLLER = "controller"


@dataclass(frozen=True)
class Span:
    """One piece of work from `start_s` to `end_s`."""

    side: Side
    name: str
    start_s: float
    end_s: float
    step: int | None = None
    category: str = ""
    """What the work was for: of a controller's span its name, unless it says otherwise; of a process's that of the
    controller's span around it (`prefill` for `generate`, `evaluate` or the probe of `sync`)."""
    process: str = CONTROLLER
    """Who measured it."""

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


@dataclass(frozen=True, eq=False)
class OpenSpan:
    """Work that has begun. Two that opened in the same instant are two."""

    side: Side
    name: str
    start_s: float
    step: int | None
    category: str

    def until(self, end_s: float) -> Span:
        return Span(self.side, self.name, self.start_s, end_s, self.step, self.category)


_around: ContextVar[OpenSpan | None] = ContextVar("_around", default=None)
"""The innermost open span of this task, and of those that it starts."""


class Timeline:
    """Collects spans for the step records; forgets what no later record can need.

    Used from one thread (the controller's event loop); spans of several tasks may be open at once.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        heard: Callable[[Sequence[Span]], None] = lambda spans: None,
    ) -> None:
        """`heard` gets every span when it is over."""
        self._clock = clock
        self._heard = heard
        self._closed: list[Span] = []
        self._open: list[OpenSpan] = []
        self._window_start_s = clock()

    @contextmanager
    def span(self, side: Side, name: str, *, step: int | None = None, category: str = "") -> Generator[None]:
        """Records the time of the block, also when it fails or is cancelled. `category`: default `name`."""
        opened = OpenSpan(side, name, self._clock(), step, category or name)
        self._open.append(opened)
        token = _around.set(opened)
        try:
            yield
        finally:
            _around.reset(token)
            self._open.remove(opened)
            span = opened.until(self._clock())
            self._closed.append(span)
            self._heard([span])

    def worked(self, process: str, spans: Sequence[WorkSpan]) -> None:
        """What a process says that it did, as part of the span that is open in this task."""
        around = _around.get()
        side, step, category = (around.side, around.step, around.category) if around else (CONTROLLER, None, "")
        self._heard(
            [
                Span(side, span.name, span.start_s, span.end_s, step, category or span.name, process)
                for span in spans
                if span.start_s <= span.end_s
            ]
        )

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
