"""Laps of a call on a clock that the tests turn."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.rpc import codec
from offbeat.rpc.messages import GenerateResult, WorkSpan
from offbeat.rpc.work import MAX_SPANS, WorkLog


def test_laps_of_one_name_in_a_row_are_one_span() -> None:
    now = iter([0.0, 1.0, 2.0, 5.0, 6.0])
    work = WorkLog(lambda: next(now))
    for name in ("prefill", "decode", "decode", "prefill"):
        work.lap(name)
    assert work.spans() == (
        WorkSpan("prefill", 0.0, 1.0),
        WorkSpan("decode", 1.0, 5.0),
        WorkSpan("prefill", 5.0, 6.0),
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 8)), max_size=400))
def test_spans_are_bounded_in_number_and_cover_all_time_without_overlap(laps: list[tuple[str, int]]) -> None:
    now = 0.0
    work = WorkLog(lambda: now)
    for name, seconds in laps:
        now += seconds
        work.lap(name)
    spans = work.spans()
    assert len(spans) <= MAX_SPANS
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(spans))
    assert sum(span.end_s - span.start_s for span in spans) == now


def test_beyond_the_bound_a_pair_has_the_name_of_the_longer() -> None:
    now = 0.0
    work = WorkLog(lambda: now)
    for turn in range(MAX_SPANS + 1):
        now += 1.0 if turn % 2 else 0.1
        work.lap("decode" if turn % 2 else "prefill")
    assert {span.name for span in work.spans()[:-1]} == {"decode"}


def test_a_result_of_a_worker_that_does_not_tell_is_read_as_before() -> None:
    frames = codec.encode("reply", {"rollouts": [], "busy_s": 1.0}, id=1)
    assert codec.decode(frames).body(GenerateResult) == GenerateResult(rollouts=(), busy_s=1.0)
    told = GenerateResult(rollouts=(), busy_s=1.0, spans=(WorkSpan("decode", 1.0, 2.0),))
    assert codec.decode(codec.encode("reply", told, id=1)).body(GenerateResult) == told
