"""The first signal lets the step at hand be finished and saved, whoever sends it; the second ends the run."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_display_terminal import session

from offbeat.interrupt import Interrupt
from offbeat.metrics.live import LiveDisplay


@pytest.fixture(name="hangup")
def _hangup() -> Iterator[None]:
    """A lost terminal must not end the tests themselves."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def told_of(*numbers: signal.Signals, at_hand: bool = True) -> tuple[int, int]:
    """(times that the step at hand was told to be the last, times that the run was ended at once)."""
    finished, told = list[None](), list[str]()

    async def body() -> None:
        interrupt = Interrupt(asyncio.current_task(), told.append)
        with interrupt.installed():
            interrupt.finish = (lambda: finished.append(None)) if at_hand else None
            for number in numbers:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)

    task = asyncio.create_task(body())
    await asyncio.wait([task], timeout=10)
    assert len(told) == len(finished)
    return len(finished), int(task.cancelled())


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_finishes_the_step_at_hand(number: signal.Signals) -> None:
    assert asyncio.run(told_of(number)) == (1, 0)
    assert asyncio.run(told_of(number, at_hand=False)) == (0, 1)


@pytest.mark.usefixtures("hangup")
def test_the_second_one_ends_the_run_unless_it_says_again_that_the_terminal_is_gone() -> None:
    assert asyncio.run(told_of(signal.SIGINT, signal.SIGINT)) == (1, 1)
    assert asyncio.run(told_of(signal.SIGHUP, signal.SIGHUP, signal.SIGHUP)) == (1, 0)
    assert asyncio.run(told_of(signal.SIGINT, signal.SIGHUP)) == (1, 0)
    assert asyncio.run(told_of(signal.SIGHUP, signal.SIGTERM)) == (1, 1)


@pytest.mark.usefixtures("hangup")
def test_under_nohup_a_closed_terminal_is_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert asyncio.run(told_of(signal.SIGHUP)) == (0, 0)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_display_whose_terminal_is_gone_says_nothing_and_ends_nothing(tmp_path: Path) -> None:
    """What it writes is answered by an input/output error, as after a lost connection."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream, Path(os.devnull).open("w") as nowhere:
        display = LiveDisplay(stream)
        os.close(master)
        with pytest.raises(OSError, match="rror"):
            os.write(slave, b"x")
        session(display, tmp_path, steps=3)
        display.warn("stopping")
        with pytest.raises(OSError, match="rror"):  # what is left in its buffer
            stream.flush()
        os.dup2(nowhere.fileno(), slave)
