"""What people see of a run: a live status in a terminal, plain lines elsewhere, nothing when asked.

    make_display()  ──▶ LiveDisplay    a terminal that can move its cursor
                        PlainDisplay   a file, a pipe, CI, NO_COLOR, a dumb terminal, an encoding without UTF-8
                        SilentDisplay  the Python interface, tests

A display never ends a run: when nobody reads any more (a closed pipe, a full disk), it falls silent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO, TypeAlias

from offbeat.metrics import figures
from offbeat.metrics.evaluation import EvalResult
from offbeat.metrics.status import (
    Activity,
    Header,
    RunStatus,
    evaluation_words,
    reward_words,
    sampled_words,
    time_words,
)
from offbeat.metrics.summary import Summary, summary_lines

Record: TypeAlias = Mapping[str, Any]

PHASE_EVERY_S = 10.0
"""A phase of start-up that goes on prints a plain line no more often than this."""
SAMPLED_EVERY_S = 15.0
"""A phase that samples, such as an evaluation, prints a plain line so often."""
LATE_S = 2.0
"""A phase between two steps prints a plain line once it has taken so long."""


class Display(Protocol):
    """Called by the controller's thread, in this order: begin, then anything, then finish or not, then close."""

    def begin(self, header: Header, history: Sequence[Record] = ()) -> None:
        """`history`: the records of the part that a resume continues."""
        ...

    def phase(self, text: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        """What is done before the first step, or between two. Another text begins another phase; steps and evaluations
        end one. A `total` alone is of samples: how many are finished is in the activity."""
        ...

    def step(self, record: Record) -> None:
        """A step is done. Alarms that follow from the record are shown by the display itself."""
        ...

    def evaluation(self, result: EvalResult) -> None: ...

    def warn(self, text: str) -> None: ...

    def activity(self, activity: Activity) -> None:
        """May be called often; shown at most a few times a second."""
        ...

    def finish(self, summary: Summary) -> None:
        """The last words. The run has ended, well or by interruption; not called when it failed."""
        ...

    def close(self) -> None:
        """Gives the terminal back. Always called, more than once if need be."""
        ...


class SilentDisplay:
    """Shows nothing."""

    def begin(self, header: Header, history: Sequence[Record] = ()) -> None: ...

    def phase(self, text: str, done: int | None = None, total: int | None = None, note: str = "") -> None: ...

    def step(self, record: Record) -> None: ...

    def evaluation(self, result: EvalResult) -> None: ...

    def warn(self, text: str) -> None: ...

    def activity(self, activity: Activity) -> None: ...

    def finish(self, summary: Summary) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """One line for each thing that happens, one a step, no control characters.

    `quiet` leaves out the header, start-up and steps: evaluations, warnings and the summary stay.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._quiet = quiet
        self._clock = clock
        self._status = RunStatus(steps=0)
        self._phase = ""
        self._phase_line = ""
        self._phase_told_s = 0.0
        self._stepped = False
        self._untold: tuple[float, str] | None = None
        """A phase between two steps: since when, and its line."""
        self._sampling: tuple[str, int] | None = None
        """A phase that samples: its text, and how many samples there will be."""
        self._sampling_told_s = 0.0
        self._deaf = False

    def begin(self, header: Header, history: Sequence[Record] = ()) -> None:
        self._status = RunStatus(header.steps)
        self._status.restore(history)
        self._detail(f"offbeat   {header.title}")
        for label, text in header.rows:
            self._detail(f"{label:<9} {text}")

    def phase(self, text: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        counts = "" if done is None else f" {done}/{total}" if total is not None else f" {done}"
        line = f"{text}{counts}{f' · {note}' if note else ''}"
        self._sampling = (text, total) if done is None and total is not None else None
        self._sampling_told_s = self._clock()
        if self._stepped:
            self._untold = (self._clock(), line)
            return
        finished = done is not None and done == total
        late = self._clock() - self._phase_told_s >= PHASE_EVERY_S
        if line != self._phase_line and (text != self._phase or finished or late):
            self._phase, self._phase_line, self._phase_told_s = text, line, self._clock()
            self._detail(f"start     {line}")

    def step(self, record: Record) -> None:
        self._stepped = True
        self._end_phase()
        warnings = self._status.add(record)
        gap = record.get("logprob_gap_max")
        words = [
            f"step {record['step']}  {reward_words(record)}",
            time_words(record).replace("   ", " │ "),
            "" if gap is None else f"gap {figures.decimal(gap, 4)}",
            f"ETA {figures.duration(self._status.eta_s())}",
        ]
        self._detail(" │ ".join(word for word in words if word))
        for warning in warnings:
            self.warn(warning)

    def evaluation(self, result: EvalResult) -> None:
        self._end_phase()
        self._line(f"eval {result.step}  {evaluation_words(result, self._status.difference(result))}")

    def warn(self, text: str) -> None:
        self._line(f"! {text}")

    def activity(self, activity: Activity) -> None:
        if self._untold is not None and self._clock() - self._untold[0] >= LATE_S:
            self._detail(f"now       {self._untold[1]}")
            self._untold = None
        if self._sampling is not None and self._clock() - self._sampling_told_s >= SAMPLED_EVERY_S:
            text, total = self._sampling
            words = sampled_words(activity, total)
            if words:
                self._detail(f"{'now' if self._stepped else 'start':<9} {text} · {words}")
                self._sampling_told_s = self._clock()

    def finish(self, summary: Summary) -> None:
        self._end_phase()
        for line in summary_lines(summary):
            self._line(line)

    def close(self) -> None: ...

    def _end_phase(self) -> None:
        self._phase, self._phase_line, self._untold, self._sampling = "", "", None, None

    def _detail(self, text: str) -> None:
        if not self._quiet:
            self._line(text)

    def _line(self, text: str) -> None:
        if self._deaf:
            return
        one_line = " ".join(figures.printable(text, self._stream.encoding).split("\n"))
        try:
            self._stream.write(one_line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a full disk, a closed stream: the run goes on
            self._deaf = True


def make_display(
    *, quiet: bool = False, stream: TextIO | None = None, environ: Mapping[str, str] | None = None
) -> Display:
    """The display for this stream (default: standard output)."""
    out: TextIO = sys.stdout if stream is None else stream
    if quiet or not wants_live(out, os.environ if environ is None else environ):
        return PlainDisplay(out, quiet=quiet)
    from offbeat.metrics.live import LiveDisplay

    return LiveDisplay(out)


def wants_live(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True for a terminal that can move its cursor and show blocks, with a person before it."""
    if environ.get("CI", "").lower() not in {"", "0", "false"} or environ.get("NO_COLOR"):
        return False
    if environ.get("TERM", "dumb").lower() in {"", "dumb", "unknown"}:
        return False
    if "utf" not in (stream.encoding or "").lower():
        return False
    return stream.isatty()
