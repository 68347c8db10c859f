"""trace.json: where the seconds of every process went, in the trace event format that Perfetto opens.

    [                                                                  the array form of the format
    {"ph": "M", "name": "first_start", …, "args": {"unix_s": …}},      when ts 0 was
    {"ph": "M", "name": "process_name", …},  …                         a name and a place for each row
    {"ph": "X", "name": "decode", "cat": "generate", "pid": …, "tid": …, "ts": …, "dur": …, "args": {"step": 4}},
    …
    ]                                                                  only where a part of the run ended in order

A span is one line, written whole and flushed when it is over; the format does not need the closing bracket, so a run
that was killed leaves a file that opens. `ts` counts microseconds from the first start of the run: the wall clock says
where a resumed part begins, the monotonic clock all within a part. What a resumed run does again is there twice: that
time was spent twice.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.metrics.spans import CONTROLLER, Span
from offbeat.metrics.writer import OLDER_TRACE, TRACE, RunFolder

_log = logging.getLogger("offbeat")

LIMIT_BYTES = 64 << 20
"""A file that has grown past it is moved to trace.older.json, replacing what is there."""
SIDES = ("engines", "rewards", "trainer", "controller")
"""Tracks of the controller, from the top."""
LANE_MEMORY = 64
"""Finished spans of a row that a later one is compared with, those inside others left out."""
_FIRST_PID = {CONTROLLER: 1, "trainer": 100, "engine": 1_000, "reward": 10_000}
_OTHER_PID = 20_000
_TRACKS_A_PROCESS = 100
_NAME = 100
_TAIL = 1_000

Event = dict[str, Any]


# --- from spans to events: values only ----------------------------------------------------------------------------


@dataclass
class _Lane:
    """One row of a track. Spans of a row may hold one another, but none may run out of another."""

    tid: int
    ended: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def takes(self, start: int, end: int) -> bool:
        """Spans come in order of their ends, so a new one lies behind each that is here, or holds it."""
        return all(e <= start or end <= s or (start <= s and e <= end) for s, e in self.ended)

    def put(self, start: int, end: int) -> None:
        apart = [(s, e) for s, e in self.ended if not (start <= s and e <= end)]
        self.ended = [*apart, (start, end)][-LANE_MEMORY:]


class Rows:
    """Places spans in rows: a group of rows (`pid`) for each process, a row (`tid`) for each track.

    Ids depend on names alone, so that a resumed run continues its rows. Spans of a track that overlap without one
    holding the other get a row each, as they must in this format.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], list[_Lane]] = {}
        self._pids: dict[str, int] = {}
        self._others = 0

    def events(self, spans: Iterable[Span], zero_s: float) -> list[Event]:
        """One event a span, preceded by what names its row where that is new. `zero_s` is when ts 0 was."""
        events: list[Event] = []
        for span in spans:
            start, end = round((span.start_s - zero_s) * 1e9), round((span.end_s - zero_s) * 1e9)
            pid, tid, names = self._place(span, start, end)
            events += names
            events.append(
                {
                    "ph": "X",
                    "name": span.name[:_NAME],
                    "cat": (span.category or span.name)[:_NAME],
                    "pid": pid,
                    "tid": tid,
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "args": {"step": span.step},
                }
            )
        return events

    def _place(self, span: Span, start: int, end: int) -> tuple[int, int, list[Event]]:
        group = "rewards" if re.fullmatch(r"reward-\d+", span.process) else span.process
        track = span.side if span.process == CONTROLLER else span.process
        names: list[Event] = []
        if group not in self._pids:
            pid = self._pids[group] = self._pid(group)
            names.append(_naming("process_name", pid, pid * _TRACKS_A_PROCESS, {"name": group[:_NAME]}))
            names.append(_naming("process_sort_index", pid, pid * _TRACKS_A_PROCESS, {"sort_index": pid}))
        pid = self._pids[group]
        lanes = self._lanes.setdefault((pid, track), [])
        lane = next((lane for lane in lanes if lane.takes(start, end)), None)
        if lane is None:
            lane = _Lane(self._tid(pid, track))
            lanes.append(lane)
            label = track if len(lanes) == 1 else f"{track} ({len(lanes)})"
            names.append(_naming("thread_name", pid, lane.tid, {"name": label[:_NAME]}))
            names.append(_naming("thread_sort_index", pid, lane.tid, {"sort_index": lane.tid}))
        lane.put(start, end)
        return pid, lane.tid, names

    def _pid(self, group: str) -> int:
        kind, _, number = group.partition("-")
        if group == "rewards":
            return _FIRST_PID["reward"]
        if kind in _FIRST_PID and (number.isdigit() or not number):
            return _FIRST_PID[kind] + int(number or 0)
        self._others += 1
        return _OTHER_PID + self._others

    def _tid(self, pid: int, track: str) -> int:
        """Of no other process either: viewers take thread ids for those of a machine."""
        first = SIDES.index(track) * 10 if track in SIDES else 0
        taken = {lane.tid for lanes in self._lanes.values() for lane in lanes}
        return next(tid for tid in range(pid * _TRACKS_A_PROCESS + first, 1 << 31) if tid not in taken)


def _naming(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


# --- the file -----------------------------------------------------------------------------------------------------


class TraceFile:
    """Appends spans to trace.json; continues a file that is there. Never ends a run: a full disk silences it."""

    def __init__(
        self,
        path: Path,
        older: Path,
        *,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._older, self._limit_bytes = path, older, limit_bytes
        self._rows = Rows()
        now_s, now_unix_s = clock(), wall()
        found = _reopened(path)
        if found is None:
            self._first_unix_s = now_unix_s
            self._zero_s = now_s
            path.write_bytes(_head(now_unix_s))
        else:
            self._first_unix_s, end_us = found
            # A wall clock that was set back must not lay the parts over each other.
            self._zero_s = now_s - max(now_unix_s - self._first_unix_s, end_us / 1e6)
        self._file = path.open("ab")

    def add(self, spans: Sequence[Span]) -> None:
        """One write for all of them."""
        if self._file.closed:
            return
        try:
            if self._file.tell() > self._limit_bytes:
                self._begin_another()
            self._file.write(b"".join(_line(event) for event in self._rows.events(spans, self._zero_s)))
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """The array is closed: the part of the run ended in order, or with an error of its own."""
        if self._file.closed:
            return
        try:
            self._file.close()
            _close_array(self._path)
        except OSError as error:
            self._give_up(error)

    def _begin_another(self) -> None:
        self._file.close()
        _close_array(self._path)
        os.replace(self._path, self._older)
        self._path.write_bytes(_head(self._first_unix_s))
        self._rows = Rows()
        self._file = self._path.open("ab")

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s is not continued: %s", self._path, error)
        try:
            self._file.close()
        except OSError:
            return  # what is buffered cannot be written either; half a line is cut when the file is opened again

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trace_file(folder: RunFolder) -> TraceFile:
    """trace.json of a run, new or continued; the newest 64 to 128 MiB are kept."""
    return TraceFile(folder.path / TRACE, folder.path / OLDER_TRACE)


def _line(event: Event) -> bytes:
    return json.dumps(event).encode() + b",\n"


def _head(unix_s: float) -> bytes:
    return b"[\n" + _line(_naming("first_start", 1, 1, {"unix_s": unix_s}))


def _close_array(path: Path) -> None:
    """`,` and line feed of the last line become the end of the array."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\n]\n")


def _reopened(path: Path) -> tuple[float, float] | None:
    """(time of the first start, µs of the last end) of a file that can now be appended to; None where there is none.

    The closing bracket and what a crash left of a last line are cut off.
    """
    if not path.is_file():
        return None
    lines = path.read_bytes().split(b"\n")
    first = _event(lines[1]) if len(lines) > 1 and lines[0] == b"[" else None
    if first is None or first.get("name") != "first_start":
        return None
    while _event(lines[-1]) is None:
        lines.pop()
    lines[-1] = lines[-1].removesuffix(b",")
    with path.open("r+b") as file:
        file.truncate(sum(len(line) + 1 for line in lines) - 1)
        file.seek(0, os.SEEK_END)
        file.write(b",\n")
    events = [event for line in lines[-_TAIL:] if (event := _event(line)) is not None]
    return float(first["args"]["unix_s"]), max(
        (event.get("ts", 0) + event.get("dur", 0) for event in events), default=0
    )


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line.removesuffix(b","))
    except ValueError:
        return None
    return event if isinstance(event, dict) and "ph" in event else None
