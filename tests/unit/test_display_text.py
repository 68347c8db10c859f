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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (5_240_832, "5.0 MiB"),
        (1023.6 * 2**10, "1.0 MiB"),
        (450 * 2**20, "450 MiB"),
        (26.44 * 2**30, "26.4 GiB"),
        (5000 * 2**30, "5,000 GiB"),
    ],
)
def test_sizes_have_a_unit_that_fits(value: float, text: str) -> None:
    assert figures.size(value) == text


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


def test_a_time_of_absurd_size_is_not_spelled_out() -> None:
    assert figures.duration(1e24) == "> 1 year"
    assert figures.duration(365 * 86400.0) == "365 d"


@pytest.mark.parametrize("width", [10, 20, 69, 200])
def test_wrapped_text_keeps_every_word_within_the_width(width: int) -> None:
    text = "held-out avg@4 .487 ±.021 (+.085) · pass@4 .710 ±.020 · version 25 · truncated <1 %"
    lines = figures.wrapped(text, width)
    assert max(len(line) for line in lines) <= width
    assert " ".join(lines).replace("·", "").split() == text.replace("·", "").split()


def test_text_is_broken_between_its_parts_where_they_fit() -> None:
    assert figures.wrapped("version 24 · truncated <1 %", 20) == ["version 24 ·", "truncated <1 %"]
    assert figures.wrapped("one\ntwo", 20) == ["one", "two"]
    assert figures.wrapped("x" * 25, 20) == ["x" * 20, "x" * 5]
    assert figures.wrapped("", 20) == [""]


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
    both = Activity(tokens=12345, note="training: update, micro-batch 3 of 8")
    assert activity_words(both) == "generating 12,345 tokens · training: update, micro-batch 3 of 8"
    assert activity_words(Activity(tokens=0)) == "generating"
    assert activity_words(Activity(note="training: ")) == "training"


def told(history: list[dict[str, Any]]) -> dict[str, str]:
    return {alarm.kind: alarm.text for alarm in alarms(history)}


def test_a_healthy_run_gives_no_alarm() -> None:
    assert alarms([]) == []
    assert alarms([record(step) for step in range(5)]) == []


def test_a_single_bad_batch_is_no_reason_to_speak_but_three_are() -> None:
    bad = {"groups_without_spread_fraction": 0.74, "truncated_fraction": 0.12}
    assert told([record(0, **bad), record(1, **bad)]) == {}
    found = told([record(step, **bad) for step in range(3)])
    assert found["no-spread"].startswith(
        "step 2: 74 % of groups are without spread, all rewards equal, and teach nothing (mean of the last 3 "
        "steps). Use easier data if most of them fail, harder data if most are solved"
    )
    assert found["truncated"].startswith(
        "step 2: 12 % of samples were cut off at max_new_tokens (mean of the last 3 steps). Raise sampling.max"
    )


def test_shares_at_the_limit_are_no_alarm() -> None:
    limit = {"groups_without_spread_fraction": 0.7, "truncated_fraction": 0.1}
    assert told([record(step, **limit) for step in range(3)]) == {}


def test_advice_on_groups_without_spread_depends_on_why() -> None:
    def advice(rewards: list[float], solved: float) -> str:
        shares = {"groups_without_spread_fraction": 0.8, "solved_groups_fraction": solved}
        return told([record(i, reward_mean=r, **shares) for i, r in enumerate(rewards)])["no-spread"]

    assert "Most of them are solved: use harder data" in advice([0.9, 0.9, 0.9], 0.7)
    assert "Most of them fail: use easier data" in advice([0.19, 0.19, 0.19], 0.1)  # a fifth solved, most fail
    assert "Most of them fail: use easier data" in advice([0.02, 0.02, 0.02], 0.0)
    assert "unlike before" in advice([0.9] * 3 + [0.01] * 3, 0.0)


def rewards_of(values: list[float], **other: Any) -> list[dict[str, Any]]:
    return [record(step, reward_mean=value, **other) for step, value in enumerate(values)]


def test_a_reward_that_collapses_is_told_whatever_the_spread() -> None:
    risen = [0.3 + 0.05 * step for step in range(12)]
    found = told(rewards_of([*risen, 0.1, 0.0, 0.0, 0.0, 0.0]))
    assert found["reward-fell"] == (
        "step 16: the reward has fallen by more than half, from .75 (best mean of 5 steps) to .02 (mean of the last 5 "
        "steps). Stop, and lower trainer.lr."
    )
    collapsed = rewards_of([0.9] * 12 + [0.0] * 5, groups_without_spread_fraction=1.0)
    assert set(told(collapsed)) == {"reward-fell"}  # not "use easier data" as well


@pytest.mark.parametrize(
    "rewards",
    [
        [0.0, 0.02, 0.0],
        [0.08] * 20 + [0.0] * 5,
        [0.9] * 9 + [0.0] * 5,
        [0.8] * 12 + [0.5] * 5,
        [0.2, 0.9, 0.1, 0.8] * 4 + [0.1, 0.2, 0.1, 0.2, 0.3],
        [0.5] * 12 + [0.0],
    ],
    ids=["three steps", "near zero", "too few before", "less than half", "noise", "a single step"],
)
def test_what_is_no_fall_of_the_reward(rewards: list[float]) -> None:
    assert "reward-fell" not in told(rewards_of(rewards))


def test_whether_a_fall_is_noise_depends_on_how_many_samples_a_step_has() -> None:
    fall = [0.4] * 12 + [0.15] * 5
    length = 231.2
    few = rewards_of(fall, reward_std=0.5, tokens_generated=4 * length, response_length_mean=length)
    many = rewards_of(fall, reward_std=0.5, tokens_generated=256 * length, response_length_mean=length)
    assert "reward-fell" not in told(few)
    assert "reward-fell" in told(many)


def test_a_lasting_disagreement_of_engines_and_trainer_is_told_a_single_one_is_not() -> None:
    def kl(*values: float | None) -> dict[str, str]:
        return told([record(step, kl_engine_trainer=value) for step, value in enumerate(values)])

    assert kl(0.6, 0.9, 0.75)["disagreement"].startswith(
        "step 2: engines and trainer disagree about the samples' probabilities: kl_engine_trainer is .75 (mean of the "
        "last 3 steps)."
    )
    assert kl(0.1, 0.1, 30.0) == kl(0.5, 0.5, 0.5) == kl(9.0, 9.0) == kl(9.0, None, 9.0) == {}


def test_skipped_updates_and_reward_errors_speak_at_once_and_say_why() -> None:
    found = told([record(7, skipped_updates=2, reward_errors=3)])
    assert found["non-finite"].startswith("step 7: 2 updates were skipped because the gradient was not finite")
    assert found["reward-errors"].startswith("step 7: 3 reward calls failed and counted as 0.")
    first = "correct: ValueError: cannot read '1493'\n\x1b[2J (reward.py:3)"
    found = told([record(7, reward_errors=3, reward_error_first=first)])
    assert found["reward-errors"].startswith(
        "step 7: 3 reward calls failed and counted as 0; the first: correct: ValueError: cannot read '1493' ?[2J "
        "(reward.py:3). The texts are under 'errors' in samples.jsonl"
    )
    nothing = told([record(7, skipped_updates=1, groups_without_spread_fraction=1.0)])
    assert set(nothing) == {"nothing-to-train"}
    assert "because in all groups of that update all rewards were equal: nothing" in nothing["nothing-to-train"]
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
    history[10] |= {"time_evaluate_s": 8.0}
    summary = Summary(
        outcome="done",
        history=history,
        evaluations=[result(0, 0.2), result(10, 0.4), result(25, 0.6)],
        elapsed_s=288.0,
        folder=tmp_path,
        commands=(("evaluate", f"offbeat eval {tmp_path}"),),
        model=tmp_path / "model",
    )
    assert summary_lines(summary) == [
        "done · 25 steps in 4 min · evaluations 8 s · start, warm-up and end 30 s",
        "reward     .100 → .900   means of the first and last 10 steps",
        "eval       gsm8k avg@4 .200 ±.020 (version 0) → .600 ±.020 (version 25)",
        "time       of the steps: train 74 % · wait for samples 20 % · sync 2 % · other 4 %",
        "skipped    updates 1 (see skipped_updates in metrics.jsonl)",
        "errors     reward calls 2 (see errors in samples.jsonl)",
        f"files      {tmp_path}",
        "           metrics.jsonl · samples.jsonl · checkpoints/ · logs/ · config.json",
        f"model      {tmp_path / 'model'}",
        f"evaluate   offbeat eval {tmp_path}",
    ]


def test_the_summary_of_a_resumed_run_spans_the_evaluations_of_the_whole_run(tmp_path: Any) -> None:
    history = [
        record(0, reward_mean=0.1, **result(0, 0.2).to_metrics()),
        record(1, reward_mean=0.2),
        record(2, reward_mean=0.3, **result(2, 0.4).to_metrics()),
        record(3, reward_mean=0.4),
    ]

    def evaluations(*points: EvalResult) -> list[str]:
        lines = summary_lines(Summary("done", history, points, 50.0, tmp_path))
        return [line for line in lines if line.startswith("eval")]

    first = "eval       gsm8k avg@4 .200 ±.020 (version 0) → "
    assert evaluations(result(4, 0.6)) == [f"{first}.600 ±.020 (version 4)"]
    assert evaluations(result(2, 0.4), result(4, 0.6)) == [f"{first}.600 ±.020 (version 4)"]
    assert evaluations() == [f"{first}.400 ±.020 (version 2)"]


def test_a_run_that_was_stopped_before_its_first_step_has_a_summary_too(tmp_path: Any) -> None:
    lines = summary_lines(Summary("interrupted", [], [], 3.0, tmp_path))
    assert lines[0] == "interrupted · 0 steps · start, warm-up and end 3 s"
    one = summary_lines(Summary("interrupted", [record()], [result(0, 0.5)], 10.2, tmp_path))
    assert one[0] == "interrupted · 1 step in 10 s"
    assert "reward     .490 (one step)" in one
    assert "eval       gsm8k avg@4 .500 ±.020 (version 0)" in one
