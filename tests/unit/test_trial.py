"""`offbeat try`: what a few samples tell, and the sentences that follow."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from recorded_values import recorded

from offbeat.commands.trial import first_prompts, report
from offbeat.metrics.recorded import RecordedSample
from offbeat.metrics.trial import Trial, measure, trial_lines, verdicts
from offbeat.types import Prompt


def group(prompt: int, rewards: list[float], **changes: Any) -> list[RecordedSample]:
    return [
        recorded(f"data/{prompt}", n, **{"reward": r, "parts": {"right": r}, "completion": f"text {n}", **changes})
        for n, r in enumerate(rewards)
    ]


def trial(samples: list[RecordedSample], **functions: float) -> Trial:
    weights = {"data": functions or {"right": 1.0}}
    return measure(samples, weights, max_new_tokens=100, time_generate_s=2.0, time_reward_s=0.1)


def said(samples: list[RecordedSample], **functions: float) -> list[str]:
    return verdicts(trial(samples, **functions), max_error_fraction=0.2)


HEALTHY = [*group(0, [0.0, 1.0]), *group(1, [1.0, 0.0]), *group(2, [0.0, 1.0]), *group(3, [1.0, 1.0])]


def test_errors_of_means_are_clustered_by_prompt() -> None:
    found = trial(HEALTHY)
    assert found.reward_mean == pytest.approx(5 / 8)
    # Means of the prompts: .5 .5 .5 1; their standard deviation over the root of 4.
    assert found.reward_error == pytest.approx(0.25 / math.sqrt(4))
    assert found.parts[0].error == found.reward_error
    assert found.groups_with_spread_fraction == 0.75


def test_a_prompt_that_is_sampled_in_two_epochs_is_one_prompt() -> None:
    """More prompts were asked for than the data has rows: the second round adds no prompt to the error."""
    again = [msgspec.structs.replace(sample, epoch=1) for sample in HEALTHY]
    once, twice = trial(HEALTHY), trial([*HEALTHY, *again])
    assert (twice.prompts, twice.samples) == (4, 16)
    assert (twice.reward_mean, twice.reward_error) == (once.reward_mean, once.reward_error)
    assert twice.parts[0].error == once.parts[0].error
    assert twice.groups_with_spread_fraction == 0.75  # a group is what one prompt gave at one time


def test_samples_with_spread_have_nothing_in_their_way() -> None:
    assert said(HEALTHY) == []
    assert any("Nothing stands in the way" in text for _, text in report(trial(HEALTHY), [], HEALTHY))


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([*group(0, [0.0, 0.0]), *group(1, [0.0, 0.0])], "All rewards are 0: nothing can be learned"),
        ([*group(0, [1.0, 1.0]), *group(1, [1.0, 1.0])], "All rewards are 1: nothing can be learned"),
        ([*(s for i in range(4) for s in group(i, [1.0, 1.0])), *group(9, [0.0, 1.0])], "are solved: use harder data"),
        ([*(s for i in range(4) for s in group(i, [0.0, 0.0])), *group(9, [0.0, 1.0])], "fail: use easier data"),
        # The same rewards, all below 0: what counts is where in their range a group is.
        ([*(s for i in range(4) for s in group(i, [-1.0, -1.0])), *group(9, [-2.0, -1.0])], "are solved"),
        (group(0, [0.0, 1.0], finish_reason="length"), "100 % of samples are cut off at 100 new tokens"),
        (group(0, [0.0, 1.0], completion=" "), "100 % of completions are empty"),
        (group(0, [0.0, 1.0], completion="same"), "all completions are the same text"),
    ],
)
def test_what_stands_in_the_way_is_said(samples: list[RecordedSample], words: str) -> None:
    assert any(words in sentence for sentence in said(samples)), said(samples)


def test_failures_and_no_opinion_are_told_apart_by_function() -> None:
    samples = [
        recorded("data/0", 0, reward=1.0, parts={"right": 1.0, "form": 0.0}, errors=("form: ValueError: no box",)),
        recorded("data/0", 1, reward=0.0, parts={"form": 0.0}),
        recorded("data/1", 0, reward=0.5, parts={"right": 0.0, "form": 1.0}),
        recorded("data/1", 1, reward=0.0, parts={"right": 0.0, "form": 1.0}),
    ]
    found = trial(samples, right=1.0, form=0.5)
    right, form = found.parts
    assert (right.samples, right.abstained, right.failed, right.mean) == (4, 1, 0, 0.5)
    assert (form.samples, form.abstained, form.failed, form.first_error) == (4, 0, 1, "ValueError: no box")
    sentences = said(samples, right=1.0, form=0.5)
    assert any(s.startswith("form failed on 1 of 4 samples") and "no box" in s for s in sentences)
    assert any(s.startswith("right has no value (None) for 25 % of its samples") for s in sentences)
    assert not any("would stop" in s for s in sentences)  # 1 of 8 calls
    assert any(
        "A run would stop at its first step: 12 % of reward calls fail" in s
        for s in verdicts(found, max_error_fraction=0.1)
    )
    lines = trial_lines(found)
    assert "           right .500 ±.500 × 1 · 4 samples · 0 to 1 · None 1 (25 %)" in lines
    assert "           form .500 ±.500 × 0.5 · 4 samples · 0 to 1 · failed 1 (25 %)" in lines


def test_a_function_that_is_the_same_everywhere_is_named() -> None:
    samples = [recorded("data/0", n, reward=float(n), parts={"right": float(n), "form": 1.0}) for n in range(2)]
    assert any(s.startswith("form is 1 for every sample") for s in said(samples, right=1.0, form=0.1))


def test_worst_and_best_samples_are_shown_once() -> None:
    lines = [text for _, text in report(trial(HEALTHY), [], HEALTHY)]
    heads = [line for line in lines if line.startswith("── ")]
    assert [line.rpartition(" ")[2] for line in heads] == ["0", "0", "0", "1", "1", "1"]
    assert len({line.split(" ")[1] for line in heads[:3]}) == 3  # of different prompts
    few = group(0, [0.0, 1.0])
    assert sum(text.startswith("── ") for _, text in report(trial(few), [], few)) == 2


def test_prompts_are_the_first_that_a_run_would_see() -> None:
    import numpy as np

    def batch(step: int) -> list[Prompt]:
        ids = np.zeros(1, np.int32)
        return [
            Prompt(id=f"data/{step}{n}", epoch=0, source="data", token_ids=ids, text="", columns={}) for n in range(2)
        ]

    assert [prompt.id for prompt in first_prompts(batch, 3)] == ["data/00", "data/01", "data/10"]
