"""trace.json: valid, continued, cut anywhere, bounded; spans that overlap never share a row."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.metrics.spans import Side, Span, Timeline
from offbeat.metrics.trace import Rows, TraceFile
from offbeat.rpc.messages import WorkSpan


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def span(name: str, start_s: float, end_s: float, process: str = "controller", side: Side = "engines") -> Span:
    return Span(side, name, start_s, end_s, 3, "generate", process)


def opened(path: Path, *, now: float = 50.0, unix: float = 1_000.0, limit_bytes: int = 1 << 20) -> TraceFile:
    older = path.with_name("older.json")
    return TraceFile(path, older, limit_bytes=limit_bytes, clock=Clock(now), wall=Clock(unix))


def tolerant(data: bytes) -> list[dict[str, Any]]:
    """As the format asks of a reader: the closing bracket and what follows the last whole event do not matter."""
    assert data.startswith(b"[\n")
    events: list[dict[str, Any]] = []
    for line in data[2:].split(b"\n"):
        text = line.rstrip(b",")
        if text in (b"", b"]"):
            continue
        try:
            events.append(json.loads(text))
        except ValueError:
            break
    return events


def slices(events: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]


def check_format(events: Sequence[dict[str, Any]]) -> None:
    """The rules of the trace event format for the two kinds of events that are written."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert set(event) == {"ph", "name", "pid", "tid", "args"}
            continue
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["dur"] >= 0
        assert set(event["args"]) == {"step"}
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for (a, b), (c, d) in itertools.combinations(spans, 2):
            apart = b <= c + 1e-3 or d <= a + 1e-3
            held = (a <= c and d <= b) or (c <= a and b <= d)
            assert apart or held, f"{(a, b)} and {(c, d)} run out of each other in one row"


def test_each_process_has_its_rows_with_names_and_times_in_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with opened(path) as trace:
        trace.add([span("generate", 51.0, 53.5)])
        trace.add([span("prefill", 51.0, 51.25, "engine-1"), span("decode", 51.25, 53.0, "engine-1")])
        trace.add([span("score", 53.5, 53.75, "reward-0"), span("score", 53.5, 53.75, "reward-1")])
    events = json.loads(path.read_text())
    check_format(events)
    assert slices(events) == [
        ("generate", 1e6, 2.5e6),
        ("prefill", 1e6, 0.25e6),
        ("decode", 1.25e6, 1.75e6),
        ("score", 3.5e6, 0.25e6),
        ("score", 3.5e6, 0.25e6),
    ]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {3}
    groups = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(groups) == ["controller", "engine-1", "rewards"]
    assert groups["controller"] == 1
    tracks = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "thread_name"}
    assert {name: next(key for key, pid in groups.items() if pid == of) for name, of in tracks.items()} == {
        "engines": "controller",
        "engine-1": "engine-1",
        "reward-0": "rewards",
        "reward-1": "rewards",
    }


def test_a_file_can_be_read_while_it_grows_and_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = opened(path)
    for number in range(3):
        trace.add([span(f"work {number}", 51.0 + number, 52.0 + number)])
        assert len(slices(tolerant(path.read_bytes()))) == number + 1
    # Not closed: as after a kill.
    with opened(path, now=900.0, unix=1_010.0) as again:
        again.add([span("more", 901.0, 902.0)])
    events = json.loads(path.read_text())
    check_format(events)
    # The second part began 10 s after the first on the wall clock, whatever the monotonic clock of its machine says.
    assert slices(events)[-1] == ("more", 11e6, 1e6)
    assert [name for name, _, _ in slices(events)] == ["work 0", "work 1", "work 2", "more"]


def test_rows_of_a_resumed_part_continue_those_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    order = ["controller", "trainer-0", "engine-0", "engine-1", "reward-0"]
    for now, names in ((50.0, order), (60.0, order[::-1])):
        with opened(path, now=now, unix=950.0 + now) as trace:
            for name in names:
                trace.add([span("x", now, now + 1, name)])
    rows: dict[str, set[int]] = {}
    for event in json.loads(path.read_text()):
        if event["name"] == "process_name":
            rows.setdefault(event["args"]["name"], set()).add(event["pid"])
    assert {len(pids) for pids in rows.values()} == {1}
    assert len({pid for pids in rows.values() for pid in pids}) == 5


def test_a_wall_clock_that_was_set_back_lays_no_part_over_another(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with opened(path, now=50.0, unix=1_000.0) as trace:
        trace.add([span("first", 50.0, 80.0)])
    with opened(path, now=5.0, unix=400.0) as trace:
        trace.add([span("second", 6.0, 7.0)])
    assert slices(json.loads(path.read_text())) == [("first", 0.0, 30e6), ("second", 31e6, 1e6)]


WHOLE = 5


@pytest.fixture(scope="module", name="bytes_of_a_run")
def _bytes_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with opened(path) as trace:
        trace.add([span(f"work {number}", 51.0 + number, 52.0 + number) for number in range(WHOLE)])
    return path.read_bytes()


@pytest.mark.parametrize("left", [0, 1, 2, 40, *range(-200, -1, 7), -4, -3, -2, -1])
def test_a_file_cut_anywhere_is_continued_with_every_whole_event(
    tmp_path: Path, bytes_of_a_run: bytes, left: int
) -> None:
    path = tmp_path / "trace.json"
    cut = bytes_of_a_run[:left]
    path.write_bytes(cut)
    whole = sum(f"work {number}".encode() in cut for number in range(WHOLE))
    with opened(path, unix=1_100.0) as trace:
        trace.add([span("more", 60.0, 61.0)])
    events = json.loads(path.read_text())
    check_format(events)
    names = [name for name, _, _ in slices(events)]
    assert names[-1] == "more"
    assert len(names) - 1 in (whole, whole - 1)  # the one that was cut through is gone
    assert names[:-1] == [f"work {number}" for number in range(len(names) - 1)]


def test_zeros_after_a_crash_of_the_machine_are_cut_off(tmp_path: Path, bytes_of_a_run: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(bytes_of_a_run.removesuffix(b"\n]\n") + b",\n" + bytes(5_000))
    with opened(path, unix=1_100.0) as trace:
        trace.add([span("more", 60.0, 61.0)])
    assert len(slices(json.loads(path.read_text()))) == WHOLE + 1


def test_the_file_is_bounded_and_both_parts_of_it_open(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace.json", 4_000
    with opened(path, limit_bytes=limit) as trace:
        for number in range(200):
            trace.add([span(f"work {number}", 50.0 + number, 51.0 + number)])
            assert path.stat().st_size <= limit + 1_000
    old, new = (json.loads((tmp_path / name).read_text()) for name in ("older.json", "trace.json"))
    for events in (old, new):
        check_format(events)
        assert events[0]["args"] == {"unix_s": 1_000.0}
        assert {event["name"] for event in events} >= {"process_name", "thread_name"}
    assert slices(new)[-1] == ("work 199", 199e6, 1e6)
    assert slices(old)[-1][1] + 1e6 == slices(new)[0][1]


def test_a_full_disk_silences_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    trace = opened(path)
    trace.add([span("before", 51.0, 52.0)])
    with Path("/dev/full").open("ab") as full:
        trace._file = full  # pyright: ignore[reportPrivateUsage] - a disk cannot be filled in a test
        trace.add([span("lost", 52.0, 53.0)])
        trace.add([span("lost too", 53.0, 54.0)])
    trace.close()
    assert "is not continued" in caplog.text
    assert [name for name, _, _ in slices(tolerant(path.read_bytes()))] == ["before"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from(["controller", "engine-0"])), max_size=25
    )
)
def test_spans_that_run_out_of_each_other_get_rows_of_their_own(given: list[tuple[int, int, str]]) -> None:
    spans = sorted((span("x", s, s + d, process) for s, d, process in given), key=lambda s: s.end_s)
    events = Rows().events(spans, zero_s=0.0)
    assert len(slices(events)) == len(spans)
    check_format(events)


def test_what_a_process_tells_belongs_to_the_span_of_the_task_that_asked() -> None:
    heard: list[Span] = []
    timeline = Timeline(heard=heard.extend)

    async def ask(step: int, name: str, process: str) -> None:
        with timeline.span("engines", name, step=step):

            async def call() -> None:
                await asyncio.sleep(0)
                timeline.worked(process, [WorkSpan("decode", 1.0, 2.0)])

            async with asyncio.TaskGroup() as group:  # as an engine pool does
                group.create_task(call())

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(4, "generate", "engine-0"))
            group.create_task(ask(7, "evaluate", "engine-1"))

    asyncio.run(main())
    told = {s.process: (s.name, s.category, s.step) for s in heard if s.process != "controller"}
    assert told == {"engine-0": ("decode", "generate", 4), "engine-1": ("decode", "evaluate", 7)}
    timeline.worked("engine-0", [WorkSpan("start", 1.0, 2.0), WorkSpan("broken", float("nan"), 2.0)])
    assert [(s.name, s.category, s.step) for s in heard][-1] == ("start", "start", None)
    assert {s.process for s in timeline.window(0).spans} <= {"controller"}  # records are made of one view only
