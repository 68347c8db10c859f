"""What the displays say, as text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from offbeat.metrics import figures
from offbeat.metrics.alarms import alarms
from offbeat.metrics.evaluation import EvalResult
from offbeat.metrics.status import (
    Activity,
    RunStatus,
    activity_words,
    batch_arithmetic,
    evaluation_words,
    milestone_words,
    reward_words,
    slower_side,
    time_words,
)
from offbeat.metrics.summary import Summary, summary_lines


def record(step: int = 0, **other: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step,
        "reward_mean": 0.49,
        "groups_without_spread_fraction": 0.39,
        "truncated_fraction": 0.02,
        "response_length_mean": 231.2,
        "staleness_min": 1,
        "staleness_max": 1,
        "time_step_s": 10.0,
        "time_generate_s": 9.1,
        "time_train_s": 7.4,
        "time_sync_s": 0.2,
        "time_wait_s": 2.0,
        "time_reward_s": 0.1,
        "skipped_updates": 0,
        "reward_errors": 0,
    }
    return values | other


def result(step: int, avg: float, error: float | None = 0.02) -> EvalResult:
    return EvalResult(
        name="gsm8k",
        version=step,
        step=step,
        prompts=10,
        samples_per_prompt=4,
        avg=avg,
        avg_error=error,
        pass_at={1: (avg, error), 4: (0.75, error)},
        truncated_fraction=0.0,
        response_length_mean=5.0,
        parts={},
        reward_errors=0,
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.49, ".49"), (-0.3, "-.30"), (1.25, "1.25"), (0.0, ".00"), (2e-6, "2e-06"), (None, "–"), (math.nan, "–")],
)
def test_decimals(value: float | None, text: str) -> None:
    assert figures.decimal(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, ".2s"), (9.1, "9.1s"), (99.96, "100s"), (231.4, "231s"), (0.012, ".012s"), (0.0, "0s"), (None, "–")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert figures.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (45, "45 s"),
        (89.4, "89 s"),
        (3060, "51 min"),
        (3599, "1 h"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
        (172_800, "2 d"),
        (math.inf, "–"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert figures.duration(value) == text


def test_a_small_share_is_not_shown_as_none() -> None:
    assert [figures.percent(share) for share in (0.0, 0.001, 0.614, 1.0, None)] == ["0 %", "<1 %", "61 %", "100 %", "–"]


def test_a_sparkline_goes_from_the_lowest_to_the_highest_and_survives_gaps() -> None:
    assert figures.sparkline([0.0, 0.5, 1.0], 12) == "▁▅█"
    assert figures.sparkline([0.0, None, math.nan, 1.0], 12) == "▁█"
    assert figures.sparkline([1.0, 1.0], 12) == "▄▄"
    assert figures.sparkline([1.0], 12) == figures.sparkline([1.0, 2.0], 0) == ""
    assert len(figures.sparkline(list(range(1000)), 12)) == 12


def test_text_for_a_terminal_has_no_control_characters_and_nothing_the_encoding_lacks() -> None:
    assert figures.printable("a\x1b[31mb\x07\x85c\r", "utf-8") == "a?[31mb? c "
    assert figures.printable("3 × 8 → ±.02 · ▁█ 中", "ascii") == "3 x 8 -> +-.02 |  # ?"
    assert figures.printable("×中", "utf-8") == "×中"
    assert figures.printable("×", "latin-1") == "×"


def test_the_lines_of_a_step_read_as_people_expect() -> None:
    assert reward_words(record()) == "reward .49 · spread 61 % · truncated 2 % · length 231 · lag 1"
    assert time_words(record()) == "generate 9.1s │ train 7.4s │ sync .2s   slower side: engines"
    assert milestone_words(record()) == "reward .49 · spread 61 % · truncated 2 % · length 231 · 10.0s"


def test_the_rewards_so_far_take_the_room_that_is_left() -> None:
    rewards = [0.1 * i for i in range(100)]
    for width in (60, 65, 69, 80, 120):
        words = reward_words(record(), rewards, width)
        assert len(words) <= width or words == reward_words(record())
    assert "▁" not in reward_words(record(), rewards, 64)
    assert "▁▂▄▅▇" in reward_words(record(), rewards, 68)


def test_a_line_can_be_made_of_a_record_without_values() -> None:
    assert reward_words({"step": 0}) == "reward – · spread – · truncated – · length – · lag –"
    assert time_words({"step": 0}) == "generate – │ train – │ sync –"


@pytest.mark.parametrize(
    ("generate", "reward", "train", "words"),
    [
        (9.0, 0.1, 7.0, "slower side: engines"),
        (5.0, 0.1, 7.0, "slower side: trainer"),
        (3.0, 6.0, 7.0, "slower side: rewards"),
        (7.0, 0.0, 7.2, "sides even"),
        (0.0, 0.0, 7.2, ""),
    ],
)
def test_the_slower_side_is_named(generate: float, reward: float, train: float, words: str) -> None:
    assert slower_side(record(time_generate_s=generate, time_reward_s=reward, time_train_s=train)) == words


def test_lag_is_a_range_where_samples_differ() -> None:
    assert "lag 0–2" in reward_words(record(staleness_min=0, staleness_max=2))


def test_the_batch_arithmetic_is_spelled_out() -> None:
    assert (
        batch_arithmetic(prompts=64, samples_per_prompt=8, updates=1, epochs=1, max_staleness=1)
        == "64 prompts × 8 = 512 samples → 1 update → 1 version; lag 1"
    )
    assert (
        batch_arithmetic(prompts=64, samples_per_prompt=32, updates=2, epochs=3, max_staleness=0)
        == "64 prompts × 32 = 2,048 samples → 6 updates (3 passes × 2) → 1 version; lag 0"
    )


def test_an_evaluation_says_how_far_it_is_from_the_first() -> None:
    status = RunStatus(steps=50)
    first, later = result(0, 0.402), result(25, 0.487)
    assert evaluation_words(first, status.difference(first)) == "gsm8k avg@4 .402 ±.020 · pass@4 .750 ±.020 · version 0"
    assert (
        evaluation_words(later, status.difference(later))
        == "gsm8k avg@4 .487 ±.020 (+.085) · pass@4 .750 ±.020 · version 25"
    )
    assert "±" not in evaluation_words(result(0, 0.5, None), None)


def test_an_equal_evaluation_has_a_difference_of_zero() -> None:
    status = RunStatus(steps=50)
    same = result(0, 0.5)
    assert [status.difference(same), status.difference(same)] == [None, 0.0]


def test_a_resumed_run_compares_with_the_first_evaluation_of_all() -> None:
    status = RunStatus(steps=50)
    status.restore([record(0, **result(0, 0.4).to_metrics()), record(1), record(2, **result(2, 0.5).to_metrics())])
    assert status.difference(result(25, 0.6)) == pytest.approx(0.2)
    assert status.done == 3


def test_the_time_to_go_is_the_median_step_without_the_first() -> None:
    status = RunStatus(steps=10)
    assert status.eta_s() is None
    for step, took in enumerate([100.0, 10.0, 12.0, 11.0]):
        status.add(record(step, time_step_s=took))
    assert status.eta_s() == pytest.approx(11.0 * 6)


def test_what_goes_on_now_is_said_in_words() -> None:
    assert activity_words(Activity()) == ""
    assert (
        activity_words(
            Activity(tokens=12345, samples=31, samples_total=256, micro_batches=3, micro_batches_total=8, note="x")
        )
        == "generating 12,345 tokens, 31/256 samples · training micro-batch 3/8 · x"
    )
    assert activity_words(Activity(micro_batches=3)) == "training micro-batch 3"


def told(history: list[dict[str, Any]]) -> dict[str, str]:
    return {alarm.kind: alarm.text for alarm in alarms(history)}


def test_a_healthy_run_gives_no_alarm() -> None:
    assert alarms([]) == []
    assert alarms([record(step) for step in range(5)]) == []


def test_a_single_bad_batch_is_no_reason_to_speak_but_three_are() -> None:
    bad = {"groups_without_spread_fraction": 0.74, "truncated_fraction": 0.12}
    assert told([record(0, **bad), record(1, **bad)]) == {}
    found = told([record(step, **bad) for step in range(3)])
    assert found["no-spread"].startswith("step 2: 74 % of groups have no spread. They teach nothing: use harder data")
    assert found["truncated"].startswith("step 2: 12 % of samples were cut off at max_new_tokens. Raise sampling.max")


def test_shares_at_the_limit_are_no_alarm() -> None:
    limit = {"groups_without_spread_fraction": 0.7, "truncated_fraction": 0.1}
    assert told([record(step, **limit) for step in range(3)]) == {}


def test_advice_on_groups_without_spread_depends_on_why() -> None:
    def advice(rewards: list[float]) -> str:
        history = [record(i, reward_mean=r, groups_without_spread_fraction=0.9) for i, r in enumerate(rewards)]
        return told(history)["no-spread"]

    assert "harder data" in advice([0.9, 0.9, 0.9])
    assert "easier data" in advice([0.02, 0.02, 0.02])
    assert "lower trainer.lr" in advice([0.9, 0.9, 0.01, 0.01, 0.01])


def test_skipped_updates_and_reward_errors_speak_at_once_and_say_why() -> None:
    found = told([record(7, skipped_updates=2, reward_errors=3)])
    assert found["non-finite"].startswith("step 7: 2 updates were skipped because the gradient was not finite")
    assert found["reward-errors"].startswith("step 7: 3 reward calls failed and counted as 0.")
    nothing = told([record(7, skipped_updates=1, groups_without_spread_fraction=1.0)])
    assert set(nothing) == {"nothing-to-train"}
    both = told([record(7, skipped_updates=3, empty_updates=1.0, nonfinite_updates=2.0)])
    assert both["non-finite"].startswith("step 7: 2 updates")
    assert both["nothing-to-train"].startswith("step 7: 1 update was")


def test_each_alarm_is_given_once_also_over_a_resume() -> None:
    status = RunStatus(steps=50)
    assert len(status.add(record(0, reward_errors=1))) == 1
    assert status.add(record(1, reward_errors=1)) == []
    resumed = RunStatus(steps=50)
    resumed.restore([record(0, reward_errors=1)])
    assert resumed.add(record(1, reward_errors=1)) == []
    assert len(resumed.add(record(2, skipped_updates=1))) == 1


def test_the_summary_says_what_came_out_where_time_went_and_what_next(tmp_path: Any) -> None:
    rewards = [0.1] * 10 + [0.5] * 5 + [0.9] * 10
    history = [record(i, reward_mean=r) for i, r in enumerate(rewards)]
    history[3] |= {"skipped_updates": 1, "reward_errors": 2}
    evaluation_only = {"step": 25, "eval/gsm8k/avg@4": 0.6}
    summary = Summary(
        outcome="done",
        history=[*history, evaluation_only],
        evaluations=[result(0, 0.2), result(10, 0.4), result(25, 0.6)],
        elapsed_s=250.0,
        folder=tmp_path,
        commands=(("continue", f"offbeat resume {tmp_path}"),),
    )
    assert summary_lines(summary) == [
        "done · 25 steps in 4 min",
        "reward     .100 → .900   means of the first and last 10 steps",
        "eval       gsm8k avg@4 .200 ±.020 (version 0) → .600 ±.020 (version 25)",
        "time       train 74 % · wait for samples 20 % · sync 2 % · other 4 %",
        "skipped    updates 1 (see skipped_updates in metrics.jsonl)",
        "errors     reward calls 2 (see errors in samples.jsonl)",
        f"files      {tmp_path}",
        "           metrics.jsonl · samples.jsonl · logs/ · config.json",
        f"continue   offbeat resume {tmp_path}",
    ]


def test_a_run_that_was_stopped_before_its_first_step_has_a_summary_too(tmp_path: Any) -> None:
    lines = summary_lines(Summary("interrupted", [], [], 3.0, tmp_path))
    assert lines[0] == "interrupted · 0 steps in 3 s"
    one = summary_lines(Summary("interrupted", [record()], [result(0, 0.5)], 3.0, tmp_path))
    assert "reward     .490 (one step)" in one
    assert "eval       gsm8k avg@4 .500 ±.020 (version 0)" in one
