"""Ctrl-C, SIGTERM and SIGHUP: the first lets the step at hand finish and be saved, the second ends the run now.

SIGHUP says that the terminal is gone. A shell and the system may both say it, so it never ends a step at hand, however
often it comes. A run that was started to ignore it (`nohup`) goes on ignoring it.

Before there is a step at hand (processes start, the warm-up runs) the first of any ends the run now, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Interrupt:
    """Made and installed in the running event loop. Ending now means: `task` is cancelled."""

    task: asyncio.Task[Any] | None
    told: Callable[[str], None]
    """Where the one line about it goes."""
    finish: Callable[[], None] | None = None
    """Set when there is a step at hand: tells the loop to finish it and do no more."""
    finishing: bool = False

    def __call__(self, number: signal.Signals) -> None:
        if self.finish is not None and not self.finishing:
            self.finishing = True
            self.finish()
            self.told("stopping: the step at hand is finished and saved first (Ctrl-C again ends the run now)")
        elif self.task is not None and not (self.finishing and number is signal.SIGHUP):
            self.task.cancel()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Signals come here meanwhile. Outside the main thread they stay somebody else's."""
        loop = asyncio.get_running_loop()
        installed: list[signal.Signals] = []
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self, number)
                installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)
