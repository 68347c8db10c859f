"""When a call worked on what, measured in its own process: laps on the monotonic clock, a bounded number of them.

    work = WorkLog()
    ...                                  prefill
    work.lap("prefill")                  all since the last lap was this
    ...                                  10,000 decode steps, `work.lap("decode")` after each: one span
    GenerateResult(…, spans=work.spans())

A lap costs one look at the clock. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.rpc.messages import WorkSpan

MAX_SPANS = 64
"""Of one call. Beyond, neighbours become one span with the name of the longer, so that what is told stays small."""


@dataclass
class _Lap:
    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class WorkLog:
    """Laps of one call, the first from when it was made. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._laps: list[_Lap] = []
        self._since = clock()

    def lap(self, name: str) -> None:
        """All time since the last lap was `name`; laps of one name in a row are one span."""
        now = self._clock()
        if self._laps and self._laps[-1].name == name:
            self._laps[-1].end_s = now
        else:
            self._laps.append(_Lap(name, self._since, now))
            if len(self._laps) > MAX_SPANS:
                self._laps = _halved(self._laps)
        self._since = now

    def spans(self) -> tuple[WorkSpan, ...]:
        return tuple(WorkSpan(lap.name, lap.start_s, lap.end_s) for lap in self._laps)


def _halved(laps: list[_Lap]) -> list[_Lap]:
    """Neighbours as one; the newest stays as it is when their number is odd."""
    joined: list[_Lap] = []
    for index in range(0, len(laps), 2):
        pair = laps[index : index + 2]
        name = max(pair, key=lambda lap: lap.seconds).name
        if joined and joined[-1].name == name:
            joined[-1].end_s = pair[-1].end_s
        else:
            joined.append(_Lap(name, pair[0].start_s, pair[-1].end_s))
    return joined
