"""Spans on a clock that the tests turn, and the overlap that follows from them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.metrics.overlap import intersection, length, overlap, seconds_of, union
from offbeat.metrics.spans import Side, Span, Timeline, Window


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def generate(start_s: float, end_s: float, step: int = 0) -> Span:
    return Span("engines", "generate", start_s, end_s, step)


def train(start_s: float, end_s: float, step: int = 0) -> Span:
    return Span("trainer", "train", start_s, end_s, step)


def test_a_side_that_is_hidden_wholly_gives_one() -> None:
    assert overlap([generate(0, 10), train(2, 5)], 0, 10) == 1.0
    assert overlap([generate(2, 5), train(0, 10)], 0, 10) == 1.0


def test_taking_turns_gives_zero() -> None:
    assert overlap([generate(0, 5), train(5, 9)], 0, 9) == 0.0


def test_half_of_the_shorter_side_hidden_gives_a_half() -> None:
    # Engines 0-6, trainer 4-8: both work 2 s, the shorter side 4 s.
    assert overlap([generate(0, 6), train(4, 8)], 0, 8) == pytest.approx(0.5)


def test_only_what_lies_in_the_window_counts() -> None:
    # In 4..8 the engines work 2 s, the trainer 4 s, both 2 s; outside, the engines worked alone.
    assert overlap([generate(0, 6), train(4, 8)], 4, 8) == pytest.approx(1.0)
    assert overlap([generate(0, 6), train(4, 8)], 6, 8) == 0.0


@pytest.mark.parametrize(
    "spans",
    [[], [generate(0, 5)], [train(0, 5)], [generate(0, 5), train(3, 3)], [generate(3, 3), train(3, 3)]],
    ids=["nothing", "no trainer", "no engine", "a trainer span of zero length", "both of zero length"],
)
def test_a_side_that_did_nothing_gives_zero(spans: list[Span]) -> None:
    assert overlap(spans, 0, 5) == 0.0


def test_a_window_of_zero_length_gives_zero() -> None:
    assert overlap([generate(0, 5), train(0, 5)], 3, 3) == 0.0


def test_two_engines_at_once_count_once_and_other_work_does_not_count() -> None:
    spans = [generate(0, 4), generate(1, 5), train(4, 8), Span("controller", "sync", 4, 8), Span("engines", "x", 4, 8)]
    # Engines 0-5 (5 s), trainer 4-8 (4 s), both 1 s.
    assert overlap(spans, 0, 8) == pytest.approx(0.25)


intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair) / 4, max(pair) / 4)), max_size=8
)


@settings(deadline=None)
@given(intervals, intervals, st.integers(0, 40), st.integers(0, 40))
def test_overlap_equals_counting_quarter_seconds(
    engines: list[tuple[float, float]], trainer: list[tuple[float, float]], a: int, b: int
) -> None:
    start, end = min(a, b), max(a, b)

    def cells(found: list[tuple[float, float]]) -> set[int]:
        return {cell for low, high in found for cell in range(round(4 * low), round(4 * high)) if start <= cell < end}

    left, right = cells(engines), cells(trainer)
    shorter = min(len(left), len(right))
    expected = len(left & right) / shorter if shorter else 0.0
    spans = [generate(*interval) for interval in engines] + [train(*interval) for interval in trainer]
    found = overlap(spans, start / 4, end / 4)
    assert found == pytest.approx(expected)
    assert 0.0 <= found <= 1.0
    assert overlap(spans[::-1], start / 4, end / 4) == found


@settings(deadline=None)
@given(intervals, intervals)
def test_union_and_intersection_obey_inclusion_and_exclusion(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> None:
    assert length(left + right) + length(intersection(left, right)) == pytest.approx(length(left) + length(right))
    merged = union(left)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


def test_a_window_has_what_still_runs_and_what_ended_before_for_its_step() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.span("engines", "generate", step=0):
        clock.now = 5.0
    running = timeline.span("engines", "generate", step=1)
    running.__enter__()
    with timeline.span("trainer", "train", step=0):
        clock.now = 8.0
    first = timeline.window(step=0)
    assert (first.start_s, first.end_s) == (0.0, 8.0)
    assert [(s.name, s.start_s, s.end_s) for s in first.spans] == [
        ("generate", 0.0, 5.0),
        ("generate", 5.0, 8.0),
        ("train", 5.0, 8.0),
    ]
    assert overlap(first.spans, first.start_s, first.end_s) == pytest.approx(1.0)
    clock.now = 9.0
    running.__exit__(None, None, None)
    with timeline.span("trainer", "train", step=1):
        clock.now = 12.0
    second = timeline.window(step=1)
    assert (second.start_s, second.end_s) == (8.0, 12.0)
    assert seconds_of(second, "generate", step=1) == pytest.approx(4.0)  # 5..9: all of it, also before the window
    assert seconds_of(second, "generate") == pytest.approx(1.0)  # 8..9: inside the window


def test_samples_made_two_windows_ago_are_still_known_to_their_step() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.span("engines", "generate", step=2):
        clock.now = 3.0
    for step in (0, 1):
        clock.now += 1.0
        timeline.window(step)
    assert seconds_of(timeline.window(step=2), "generate", step=2) == pytest.approx(3.0)
    assert timeline.window(step=3).spans == ()


def test_a_timeline_forgets_what_is_over() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    sides: list[tuple[Side, str]] = [("engines", "generate"), ("trainer", "train"), ("controller", "sync")]
    for step in range(50):
        for side, name in sides:
            with timeline.span(side, name, step=step):
                clock.now += 1.0
        window = timeline.window(step)
        assert len(window.spans) == 3
        assert timeline.held == 0


def test_a_span_that_fails_is_recorded_and_its_twin_of_the_same_instant_stays_open() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    twin = timeline.span("engines", "generate", step=0)
    twin.__enter__()

    def fail_after_a_second() -> None:
        with timeline.span("engines", "generate", step=0):
            clock.now = 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_a_second()
    clock.now = 4.0
    assert [span.seconds for span in timeline.window(step=0).spans] == [1.0, 4.0]
    twin.__exit__(None, None, None)


def test_the_first_window_can_begin_after_start_up() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    clock.now = 100.0
    timeline.begin()
    clock.now = 103.0
    assert timeline.window(step=0) == Window(100.0, 103.0, ())
