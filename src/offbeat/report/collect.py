"""Reads the files of a run folder and puts the value of the page together. Writes nothing; any file may be missing."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import offbeat
from offbeat.metrics.writer import OLDER_SAMPLES, OLDER_TRACE, SAMPLES, TRACE
from offbeat.report.curves import clean_records, curves, totals, trained
from offbeat.report.header import failure_of, header, journal_facts
from offbeat.report.lines import Lines, decode, whole
from offbeat.report.sample_chunks import TEXT_LIMIT as SAMPLE_TEXT_LIMIT
from offbeat.report.sample_chunks import Packed, pack, packed_json
from offbeat.report.sample_index import SampleIndex, counts, group_curves, groups_of, head_of
from offbeat.report.timeline import EVENT_LIMIT, Trace, drawing, read_trace, timeline

Json: TypeAlias = dict[str, Any]

CONFIG_LIMIT = 16 << 20
LOG_TAIL = 64 << 10
TRACE_BEGINS_S = 60.0
"""A trace whose first span is later than this has lost its beginning."""


@dataclass(frozen=True)
class Report:
    """What the page is made of."""

    value: Json
    """JSON: everything but the events of the timeline and the samples."""
    events: str
    """Packed events of the timeline; empty without any."""
    samples: Packed


def collect(run: Path, *, samples_bytes: int) -> Report:
    """`samples_bytes` is the room for samples in the page."""
    with _open(run / "config.json") as file:
        config = _config(file)
        remarks = [file.remark() if file.state != "read" or config else "config.json cannot be read as JSON."]
    with _open(run / "journal.jsonl") as file:
        journal = journal_facts(file.objects())
        remarks.append(None if file.state == "missing" else file.remark())
    with _open(run / "metrics.jsonl") as file:
        records = clean_records(record for _, record in file.objects())
        remarks.append(file.remark())
    trace, trace_remarks = _trace(run)
    remarks += trace_remarks
    steps = trained(records)
    sampled, sample_remarks = _samples(run, samples_bytes)
    exact = dict(zip(sampled.curves["steps"], sampled.curves["errors"], strict=True))
    locked = is_locked(run)
    value = {
        "header": header(
            name=run.name, config=config, steps=steps, journal=journal, locked=locked, failure=_failure(run)
        ),
        "offbeat": offbeat.__version__,
        "made": int(time.time()),
        "totals": totals(records),
        "curves": curves(records, exact, whole(config.get("prompts_per_step"))),
        "groups": sampled.curves,
        "timeline": {**timeline(trace), "events_limit": EVENT_LIMIT},
        "samples": {**sampled.counts, "cut": sampled.packed.cut, "text_limit": SAMPLE_TEXT_LIMIT},
        "remarks": [remark for remark in [*remarks, *sample_remarks] if remark],
    }
    events = packed_json(drawing(trace)) if len(trace.start_us) else ""
    return Report(value, events, sampled.packed)


def _trace(run: Path) -> tuple[Trace, list[str | None]]:
    """Both files: the older one is there when a run's trace has outgrown one file, and replaces one before it."""
    trace = Trace()
    remarks: list[str | None] = []
    with ExitStack() as stack:
        files = _newer_and_older(stack, run / TRACE, run / OLDER_TRACE)
        for file in files:
            before = trace.broken
            read_trace((line for _, line in file), trace)
            broken = trace.broken - before
            # Half an event at the end is counted as broken, and is the rule while a run goes on.
            file.broken += broken - (1 if file.unfinished and broken else 0)
            remarks.append(file.remark() if file.state != "read" or file.broken else None)
        begins_s = min(trace.start_us, default=0.0) / 1e6
        if len(files) > 1 and begins_s > TRACE_BEGINS_S:
            remarks.append(f"{OLDER_TRACE} begins {begins_s:,.0f} s after the run did: earlier spans were not kept.")
    return trace, remarks


def _newer_and_older(stack: ExitStack, newer_path: Path, older_path: Path) -> list[Lines]:
    """Those that are there, the older first. A file that is moved aside between the two openings is there once."""
    newer = stack.enter_context(_open(newer_path))
    older = stack.enter_context(_open(older_path))
    return [newer] if older.file is None or _same(older, newer) else [older, newer]


@contextmanager
def _open(path: Path) -> Generator[Lines]:
    lines = Lines.open(path)
    try:
        yield lines
    finally:
        lines.close()


def _config(file: Lines) -> Mapping[str, Any]:
    return (decode(file.read(0, CONFIG_LIMIT)) or {}) if file.state == "read" else {}


@dataclass(frozen=True)
class _Sampled:
    curves: Json
    counts: Json
    packed: Packed


def _samples(run: Path, limit_bytes: int) -> tuple[_Sampled, list[str | None]]:
    """Two passes over the same open files: a file that the run moves aside meanwhile is still the one that was read."""
    with ExitStack() as stack:
        files = _newer_and_older(stack, run / SAMPLES, run / OLDER_SAMPLES)
        index = SampleIndex()
        for number, file in enumerate(files):
            _index(index, number, file)
        groups = groups_of(index, SAMPLE_TEXT_LIMIT)
        packed = pack(index, groups, lambda file, offset, size: files[file].read(offset, size), limit_bytes)
        found = _Sampled(group_curves(index, groups), counts(index, groups, packed.groups), packed)
        return found, [file.remark() for file in files]


def _index(index: SampleIndex, number: int, file: Lines) -> None:
    for offset, line in file:
        head = head_of(line)
        if head is not None:
            index.add(number, offset, len(line), head)
        elif line.endswith(b"\n"):
            file.broken += 1


def _same(left: Lines, right: Lines) -> bool:
    """Moved between the two openings."""
    if left.file is None or right.file is None:
        return False
    return os.path.sameopenfile(left.file.fileno(), right.file.fileno())


def is_locked(run: Path) -> bool:
    """Whether a process trains into the folder now. The lock is shared for an instant when nobody has it."""
    try:
        with (run / ".lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False


def _failure(run: Path) -> str | None:
    """The error of the run's newest part; None when a later part wrote metrics since, or there was none."""
    log, metrics = run / "logs" / "controller.log", run / "metrics.jsonl"
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            tail = file.read().decode("utf-8", "replace")
        later = metrics.stat().st_mtime > log.stat().st_mtime if metrics.exists() else False
    except OSError:
        return None
    return None if later else failure_of(tail)
