"""Which sample a reward worker is grading, and since when: one page of memory shared with the controller.

A heartbeat cannot say it: native code may hold the interpreter's lock, and then no thread of the worker runs. The
worker writes before and after each sample; the controller reads whenever a deadline may be over. Both are on one
host and share its monotonic clock. The page is an anonymous memory file that the worker opens through the
controller's descriptor in /proc: nothing is left on disk whichever of them dies.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

_BYTES = 16
_IDLE = 0.0


@dataclass(frozen=True)
class Current:
    index: int
    started_s: float
    """Monotonic clock of the host."""


class Board:
    """Made by the controller with `Board()`, opened by the worker with `Board(path)`."""

    def __init__(self, path: str | None = None) -> None:
        self._fd = os.memfd_create("offbeat-reward-board", os.MFD_CLOEXEC) if path is None else os.open(path, os.O_RDWR)
        if path is None:
            os.ftruncate(self._fd, _BYTES)
        self._map = mmap.mmap(self._fd, _BYTES)
        self._cells = memoryview(self._map).cast("d")

    @property
    def path(self) -> str:
        """For the worker's settings; valid while this process holds the board."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def enter(self, index: int, started_s: float | None = None) -> None:
        # Marked idle between the two writes, so that a reader never pairs one sample with another's start.
        self._cells[1] = _IDLE
        self._cells[0] = float(index)
        self._cells[1] = time.monotonic() if started_s is None else started_s

    def leave(self) -> None:
        self._cells[1] = _IDLE

    def read(self) -> Current | None:
        """None while no sample is being graded."""
        for _ in range(8):
            started, index = self._cells[1], self._cells[0]
            if started == self._cells[1]:
                return None if started == _IDLE else Current(int(index), started)
        return None

    def close(self) -> None:
        self._cells.release()
        self._map.close()
        os.close(self._fd)
