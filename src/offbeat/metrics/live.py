"""The live display: a block of fixed height at the bottom of the terminal, redrawn in place; all else scrolls above.

    eval 0     held-out avg@4 .152 ±.012 · version 0                          above: stays
    step 10    reward .38 · spread 61 % · …
    ───
    step 12    ━━━━━━━━━━━━━━━━━━━━━━━  16 % of 80 · ETA 51 min               block: redrawn
               reward .49 ▂▃▄▅ · spread 61 % · truncated 2 % · length 231 · lag 1
               generate 9.1s │ train 7.4s │ sync .2s   slower side: engines
               gap .002 · parity ok at step 0
    now        generating 12,345 tokens · training: update, micro-batch 3 of 8

Rich redraws from a thread of its own, so the block moves while the controller computes. That thread only reads
`_lines`, a tuple that is replaced whole. No line of the block ever wraps: what does not fit ends in `…`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from offbeat.metrics import figures
from offbeat.metrics.evaluation import EvalResult
from offbeat.metrics.status import (
    Activity,
    Header,
    RunStatus,
    activity_words,
    evaluation_words,
    gap_words,
    milestone_words,
    of,
    reward_words,
    sampled_words,
    time_words,
)
from offbeat.metrics.summary import Summary, summary_lines

Record: TypeAlias = Mapping[str, Any]

LABEL = 11
"""Columns of the label on the left."""
MILESTONES = 10
"""So many steps of a run leave a line that stays."""


@dataclass(frozen=True)
class _Phase:
    text: str
    done: int | None
    total: int | None
    note: str
    began_s: float


class LiveDisplay:
    """See the module. Use from one thread."""

    def __init__(
        self, stream: TextIO, *, width: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self._clock = clock
        self._status = RunStatus(steps=0)
        self._phase: _Phase | None = None
        self._record: Record | None = None
        self._activity = Activity()
        self._lines: tuple[Text, ...] = ()
        self._drawing = threading.Lock()
        self._drawn: tuple[int, tuple[Text, ...]] = (0, ())
        """Width of the terminal and lines of the newest block."""
        self._live = Live(
            console=self._console,
            get_renderable=self.renderable,
            refresh_per_second=5,
            vertical_overflow="crop",
            # What else is printed goes above the block; an error stream that leads elsewhere stays what it is.
            redirect_stderr=sys.stderr.isatty(),
        )

    def begin(self, header: Header, history: Sequence[Record] = ()) -> None:
        self._status = RunStatus(header.steps)
        self._status.restore(history)
        self._row("offbeat", header.title, "bold")
        for label, text in header.rows:
            self._row(label, text)
        self._live.start()

    def phase(self, text: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        old = self._phase
        if old is not None and old.text != text:
            self._end_phase()
        began_s = old.began_s if old is not None and old.text == text else self._clock()
        self._phase = _Phase(text, done, total, note, began_s)
        if old is None or old.text != text:
            self._activity = Activity()  # what was sampled before is not of this phase
        self._compose()

    def step(self, record: Record) -> None:
        self._end_phase()
        warnings = self._status.add(record)
        self._record = record
        self._activity = Activity()
        if _is_milestone(record["step"], self._status.steps):
            self._show(_line(f"step {record['step']}", milestone_words(record), "dim"))
        for warning in warnings:
            self.warn(warning)
        self._compose()

    def evaluation(self, result: EvalResult) -> None:
        self._end_phase()
        words = evaluation_words(result, self._status.difference(result))
        self._row(f"eval {result.step}", words, "cyan")

    def warn(self, text: str) -> None:
        self._row("!", text, "yellow", indent=2)

    def activity(self, activity: Activity) -> None:
        self._activity = activity
        self._compose()

    def finish(self, summary: Summary) -> None:
        self._end_phase()
        # The block has nothing to add to the summary: it makes room.
        self._live.transient = True
        self.close()
        self._show(Text())
        for line in summary_lines(summary):
            self._show(Text(figures.printable(line, None), overflow="fold"))

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self._live.stop()

    def _row(self, label: str, text: str, style: str = "", indent: int = LABEL) -> None:
        """A line that stays: it may take several, each under the first, and is broken between its parts."""
        parts = figures.wrapped(figures.printable(text, None), max(8, self._console.width - indent))
        row = Text(f"{label:<{indent}}", "bold", overflow="fold")
        self._show(row.append(f"\n{' ' * indent}".join(parts), f"not bold {style}"))

    def _show(self, line: RenderableType) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone: the run goes on
            self._console.print(line)

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None and self._record is None:
            took = figures.duration(self._clock() - phase.began_s)
            self._row("start", f"{_phase_words(phase)} · {took}", "dim")
        self._compose()

    def _compose(self) -> None:
        lines: list[Text] = []
        if self._record is not None:
            lines += self._step_lines(self._record)
        now = activity_words(self._activity)
        if self._phase is not None and self._record is None:
            lines.append(self._phase_line(self._phase))
        if self._phase is not None:
            sampled = sampled_words(self._activity, self._phase.total) if self._phase.done is None else ""
            text = "" if self._record is None else _phase_words(self._phase)
            now = " · ".join(word for word in (text, sampled, now) if word)
        # An empty line keeps the height of the block: one that comes and goes makes the terminal jump.
        lines.append(_line("now" if now else "", now, "green"))
        self._lines = tuple(lines)

    def _step_lines(self, record: Record) -> list[Text]:
        status = self._status
        share = status.done / status.steps if status.steps else 0.0
        tail = f" {figures.percent(share)} of {status.steps} · ETA {figures.duration(status.eta_s())}"
        return [
            _line(f"step {record['step']}", "").append_text(self._bar(share, len(tail))).append(tail),
            _line("", reward_words(record, status.rewards, self._console.width - LABEL)),
            _line("", time_words(record)),
            _line("", gap_words(record, status.gap), "dim"),
        ]

    def _phase_line(self, phase: _Phase) -> Text:
        line = _line("start", phase.text + "  ")
        if phase.done is None:
            return line.append(figures.printable(phase.note, None))
        tail = f" {of(phase.done, phase.total)}" + (f" · {phase.note}" if phase.note else "")
        if phase.total:
            line.append_text(self._bar(phase.done / phase.total, len(tail) + len(line.plain) - LABEL))
        return line.append(figures.printable(tail, None))

    def _bar(self, share: float, beside: int) -> Text:
        width = max(4, min(40, self._console.width - LABEL - beside - 1))
        full = round(width * min(1.0, max(0.0, share)))
        return Text("━" * full, "green").append("━" * (width - full), "bright_black")

    def renderable(self) -> RenderableType:
        """The block as it is now. Rich asks for it right before it moves the cursor to where the last one began."""
        width, lines = self._console.width, self._lines
        with self._drawing:
            (old_width, old_lines), self._drawn = self._drawn, (width, lines)
            # Terminals break lines anew when they get narrower: the old block takes more rows than rich knows of.
            rows = sum((min(line.cell_len, old_width) - 1) // width for line in old_lines if line.cell_len)
            if rows > 0:
                up = (ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
                self._console.control(Control(*up * rows))
        return Group(*lines)


def _line(label: str, text: str, style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(f"{label:<{LABEL}}", "bold").append(figures.printable(text, None), style)


def _phase_words(phase: _Phase) -> str:
    counts = "" if phase.done is None else f" {of(phase.done, phase.total)}"
    return f"{phase.text}{counts}" + (f" · {phase.note}" if phase.note else "")


def _is_milestone(step: int, steps: int) -> bool:
    return step % max(1, steps // MILESTONES) == 0 or step == steps - 1
