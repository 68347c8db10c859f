"""The overlap timeline from trace.json, and where the seconds went. Pure.

trace.json is Chrome's trace event format, one event a line: complete events ("X", microseconds) and names of processes.
The closing bracket is optional, so the file of a run that goes on, or was killed, is as good.

    seconds of a category in a process   length of the union of its events: nested or parallel ones count once
    traced seconds                       length of the union of all events of all processes: the pause between two
                                         parts of a run is in none
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from offbeat.report.lines import number, short, text, whole

Json: TypeAlias = dict[str, Any]

EVENT_LIMIT = 40_000
"""Events drawn: the longest of the run."""
ROW_LIMIT = 64
NAME_LIMIT = 400
DEPTH_LIMIT = 4
"""Levels of nesting drawn."""
ROUNDING_US = 5.0
"""Two events that follow each other may overlap by so much, as their times were rounded."""
ORDER = ("generate", "reward", "train", "sync", "evaluate", "save", "start", "warmup")


@dataclass
class Trace:
    """All events as columns. Names, categories and processes are numbers into lists."""

    start_us: array[float] = field(default_factory=lambda: array("d"))
    dur_us: array[float] = field(default_factory=lambda: array("d"))
    row: array[int] = field(default_factory=lambda: array("l"))
    track: array[int] = field(default_factory=lambda: array("l"))
    name: array[int] = field(default_factory=lambda: array("l"))
    category: array[int] = field(default_factory=lambda: array("l"))
    step: array[int] = field(default_factory=lambda: array("l"))
    """-1: of no step."""
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """Process id → row."""
    tracks: dict[str, int] = field(default_factory=dict[str, int])
    names: dict[str, int] = field(default_factory=dict[str, int])
    categories: dict[str, int] = field(default_factory=dict[str, int])
    process_names: dict[str, str] = field(default_factory=dict[str, str])
    sort_index: dict[str, float] = field(default_factory=dict[str, float])
    broken: int = 0

    def add(self, event: Json) -> None:
        """An event that is neither complete nor a process's name is of no use here; a damaged one is counted."""
        pid = _id(event.get("pid"))
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        match event.get("ph"):
            case "M" if event.get("name") == "process_name":
                self.process_names[pid] = text(args.get("name"))[:200]
            case "M" if event.get("name") == "process_sort_index":
                self.sort_index[pid] = number(args.get("sort_index")) or 0.0
            case "X":
                start, dur = number(event.get("ts")), number(event.get("dur"))
                if start is None or dur is None or dur < 0:
                    self.broken += 1
                    return
                step = whole(args.get("step"))
                self.start_us.append(start)
                self.dur_us.append(dur)
                self.row.append(_place(self.rows, pid, ROW_LIMIT))
                self.track.append(_place(self.tracks, _id(event.get("tid")), 1000))
                self.name.append(_place(self.names, text(event.get("name"))[:200], NAME_LIMIT))
                category = text(event.get("cat"))[:100] or "other"
                self.category.append(_place(self.categories, category, NAME_LIMIT))
                self.step.append(-1 if step is None or step < 0 else step)
            case _:
                pass


def _id(value: object) -> str:
    return text(value)[:100]


def _place(places: dict[str, int], key: str, limit: int) -> int:
    """The number of a key; all keys beyond the limit share the last."""
    if key in places:
        return places[key]
    if len(places) >= limit:
        return limit - 1
    places[key] = len(places)
    return places[key]


def read_trace(lines: Iterable[bytes], trace: Trace | None = None) -> Trace:
    """Lines of trace.json; brackets and the commas between events are skipped. `trace`: of an older file, continued."""
    trace = trace or Trace()
    for line in lines:
        body = line.strip(b" \t\r\n,[]")
        if not body:
            continue
        try:
            event = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            trace.broken += 1
            continue
        if isinstance(event, dict):
            trace.add(event)
        else:
            trace.broken += 1
    return trace


@dataclass(frozen=True)
class Columns:
    """The same as arrays in order of the start; of two that start together the longer, which holds the other, first."""

    start: np.ndarray
    end: np.ndarray
    row: np.ndarray
    track: np.ndarray
    name: np.ndarray
    category: np.ndarray
    step: np.ndarray


def columns(trace: Trace) -> Columns:
    start, dur = np.array(trace.start_us, dtype=np.float64), np.array(trace.dur_us, dtype=np.float64)
    order = np.lexsort((-dur, start))
    return Columns(
        start[order],
        (start + dur)[order],
        *(
            np.array(values, dtype=np.int64)[order]
            for values in (trace.row, trace.track, trace.name, trace.category, trace.step)
        ),
    )


def covered_us(start: np.ndarray, end: np.ndarray) -> float:
    """Length of the union of intervals that are in order of their start."""
    if not len(start):
        return 0.0
    reach = np.maximum.accumulate(end)
    before = np.concatenate(([-np.inf], reach[:-1]))
    return float(np.sum(np.maximum(0.0, end - np.maximum(start, before))))


def timeline(trace: Trace) -> Json:
    """Busy shares, and rows of events for drawing. `traced_s` is 0 for a trace without events."""
    found = columns(trace)
    pids = sorted(trace.rows, key=lambda pid: (trace.sort_index.get(pid, 1e9), trace.rows[pid]))
    names = [trace.process_names.get(pid) or f"process {pid}" for pid in pids]
    categories = list(trace.categories)
    traced_us = covered_us(found.start, found.end)
    busy = [_busy(trace, found, trace.rows[pid], name, traced_us) for pid, name in zip(pids, names, strict=True)]
    return {
        "traced_s": short(traced_us / 1e6),
        "span_s": short((float(found.end.max()) - float(found.start.min())) / 1e6) if len(found.start) else 0,
        "categories": sorted(categories, key=lambda c: (ORDER.index(c) if c in ORDER else len(ORDER), c)),
        "processes": busy,
        "events_total": len(found.start),
        "broken": trace.broken,
    }


def _busy(trace: Trace, found: Columns, row: int, name: str, traced_us: float) -> Json:
    own = found.row == row
    start, end, category, label = found.start[own], found.end[own], found.category[own], found.name[own]
    busy_us = covered_us(start, end)

    def seconds(mask: np.ndarray) -> float | int | None:
        return short(covered_us(start[mask], end[mask]) / 1e6)

    all_names, all_categories = list(trace.names), list(trace.categories)
    by_name: list[Json] = []
    # One name has several categories: an engine decodes for steps, for evaluations and for the parity probe.
    for index, kind in np.unique(np.stack((label, category)), axis=1).T.tolist():
        mask = (label == index) & (category == kind)
        by_name.append(
            {
                "name": all_names[index],
                "category": all_categories[kind],
                "seconds": seconds(mask),
                "count": int(np.count_nonzero(mask)),
            }
        )
    return {
        "name": name,
        "busy_s": short(busy_us / 1e6),
        "idle_s": short(max(0.0, traced_us - busy_us) / 1e6),
        "by_category": {all_categories[i]: seconds(category == i) for i in np.unique(category).tolist()},
        "by_name": sorted(by_name, key=lambda one: -float(one["seconds"] or 0))[:40],
    }


def drawing(trace: Trace) -> Json:
    """The events to draw, as columns: lanes of rows, starts and durations in whole microseconds since the first.

    A lane is one level of nesting of one track of a process. At most `EVENT_LIMIT` events, the longest.
    """
    found = columns(trace)
    depth = nesting(found)
    keep = np.flatnonzero(depth < DEPTH_LIMIT)
    if len(keep) > EVENT_LIMIT:
        longest = np.argsort(-(found.end - found.start)[keep], kind="stable")[:EVENT_LIMIT]
        keep = np.sort(keep[longest])
    pids = sorted(trace.rows, key=lambda pid: (trace.sort_index.get(pid, 1e9), trace.rows[pid]))
    order = {trace.rows[pid]: place for place, pid in enumerate(pids)}
    lanes = sorted({(order[int(found.row[i])], int(found.track[i]), int(depth[i])) for i in keep})[:400]
    place = {lane: i for i, lane in enumerate(lanes)}
    lane_of = [place.get((order[int(found.row[i])], int(found.track[i]), int(depth[i])), -1) for i in keep]
    origin = float(found.start.min()) if len(found.start) else 0.0
    return {
        "processes": [trace.process_names.get(pid) or f"process {pid}" for pid in pids],
        "lanes": [row for row, _, _ in lanes],
        "names": list(trace.names),
        "categories": list(trace.categories),
        "lane": lane_of,
        "start": [int(v) for v in np.diff(np.concatenate(([0.0], np.round(found.start[keep] - origin))))],
        "dur": [int(v) for v in np.round((found.end - found.start)[keep])],
        "name": found.name[keep].tolist(),
        "category": found.category[keep].tolist(),
        "step": found.step[keep].tolist(),
    }


def nesting(found: Columns) -> np.ndarray:
    """How many events of the same track are around each event."""
    depth = np.zeros(len(found.start), dtype=np.int64)
    open_ends: dict[tuple[int, int], list[float]] = {}
    for i in range(len(found.start)):
        stack = open_ends.setdefault((int(found.row[i]), int(found.track[i])), [])
        while stack and stack[-1] <= found.start[i] + ROUNDING_US:
            stack.pop()
        depth[i] = len(stack)
        # A span that outlasts the one around it is no child of it; it is drawn below and does not hide what follows.
        stack.append(float(min(found.end[i], stack[-1]) if stack else found.end[i]))
    return depth
