"""Lines on the terminal, with whatever a model wrote made harmless; a progress bar for what takes longer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from offbeat.metrics import figures
from offbeat.metrics.sample_text import Line


def console() -> Console:
    return Console(highlight=False, soft_wrap=True, emoji=False, markup=False)


def show(lines: Iterable[Line], out: Console) -> None:
    """Print them. A character that the terminal cannot show, or that would steer it, becomes another one."""
    for style, text in lines:
        out.print(Text(figures.printable(text.replace("\n", " "), out.encoding), style))


def show_paged(lines: list[Line], out: Console) -> None:
    """Through $PAGER where a person sits at a terminal and it is more than a screen; plain elsewhere."""
    if out.is_terminal and sys.stdin.isatty() and len(lines) > out.height:
        with out.pager():
            show(lines, out)
    else:
        show(lines, out)


@contextlib.contextmanager
def progress(what: str, total: int) -> Generator[Callable[[int], Any]]:
    """A bar on standard error, if that is a terminal; gone when done. Yields what to call with each advance."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=max(total, 1))
        yield lambda done: bar.advance(task, done)


@contextlib.contextmanager
def phase(what: str) -> Generator[None]:
    """A spinner on standard error, if that is a terminal; gone when done."""
    err = Console(stderr=True)
    with err.status(what) if err.is_terminal else contextlib.nullcontext():
        yield
