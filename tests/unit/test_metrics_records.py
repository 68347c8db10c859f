"""The record of a step, against values worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from sample_values import scored

from offbeat.metrics.evaluation import summarize
from offbeat.metrics.parts import part_means
from offbeat.metrics.records import (
    REQUIRED,
    evaluation_record,
    finite,
    has_spread,
    sample_statistics,
    solved_fraction,
    step_record,
    times,
)
from offbeat.metrics.spans import Span, Window
from offbeat.rpc.messages import UpdateResult, WorkSpan
from offbeat.types import Batch, MiniBatch, Sampling, Scored, TrainSample

# The list that DESIGN promises to whoever reads metrics.jsonl.
PROMISED = """step, weights_version, reward_mean, reward_std, response_length_mean, truncated_fraction,
groups_without_spread_fraction, reward_errors, staleness_min, staleness_max, updates_behind_max, loss, lr,
grad_norm, entropy, kl_reference, kl_engine_trainer, clip_fraction_low, clip_fraction_high, logprob_gap_mean,
logprob_gap_max, ratio_mean, ratio_max, ess, tokens_generated, tokens_trained, time_step_s, time_generate_s,
time_wait_s, time_reward_s, time_train_s, time_sync_s, sync_bytes, overlap"""


@dataclass(frozen=True)
class Report:
    version: int = 4
    bytes_moved: int = 1_000
    seconds: float = 0.5
    probe_gap_mean: float | None = 1e-5
    probe_gap_max: float | None = 3e-5
    phases: tuple[WorkSpan, ...] = (
        WorkSpan("rendezvous", 12.5, 12.625),
        WorkSpan("transfer", 12.625, 12.875),
        WorkSpan("verify", 12.875, 13.0),
    )


def samples() -> list[Scored]:
    return [
        scored("data/0", 0, reward=1.0, tokens=2, parts={"right": 1.0}),
        scored("data/0", 1, reward=0.0, tokens=5, parts={"right": 0.0}, finish_reason="length"),
        scored("data/1", 0, reward=0.5, tokens=3, parts={"right": 0.5}, errors=("ValueError: x",)),
        scored("data/1", 1, reward=0.5, tokens=6, parts={"right": 0.5}),
    ]


def batch(masks: list[list[int]]) -> Batch:
    rows = tuple(
        TrainSample(
            prompt_token_ids=np.zeros(1, np.int32),
            token_ids=np.zeros(len(mask), np.int32),
            logprobs=np.zeros(len(mask), np.float32),
            advantages=np.zeros(len(mask), np.float32),
            loss_mask=np.array(mask, np.uint8),
        )
        for mask in masks
    )
    return Batch(step=4, minibatches=(MiniBatch(samples=rows, denominator=1.0),), sampling=Sampling(max_new_tokens=8))


def update(**metrics: float) -> UpdateResult:
    return UpdateResult(metrics=metrics, weights_version=5, optimizer_updates=9, skipped=(0,), busy_s=1.0)


WINDOW = Window(
    10.0,
    20.0,
    (
        Span("engines", "generate", 6.0, 12.0, 4),
        Span("rewards", "reward", 12.0, 12.5, 4),
        Span("controller", "sync", 12.5, 13.0, 4),
        Span("engines", "evaluate", 13.0, 15.0, 4),
        Span("engines", "generate", 15.0, 18.5, 5),
        Span("trainer", "train", 15.0, 20.0, 4),
    ),
)


def test_a_record_has_every_promised_key_and_the_values_worked_out_by_hand() -> None:
    record = step_record(
        step=4,
        version=4,
        scored=samples(),
        batch=batch([[1, 1, 0], [1]]),
        update=update(loss=0.25, lr=1e-6, ess=0.9, ratio_max=1.5, outside_nucleus_fraction=0.01),
        window=WINDOW,
        sync=Report(),
        staleness=(1, 1),
        updates_behind_max=1,
    )
    assert set(PROMISED.replace("\n", " ").replace(" ", "").split(",")) <= set(REQUIRED) <= set(record)
    expected = {
        "step": 4,
        "weights_version": 4,
        "reward_mean": 0.5,
        "reward_std": math.sqrt(0.125),
        "response_length_mean": 4.0,
        "truncated_fraction": 0.25,
        "groups_without_spread_fraction": 0.5,
        "reward/right": 0.5,
        "reward_errors": 1,
        "staleness_min": 1,
        "staleness_max": 1,
        "updates_behind_max": 1,
        "loss": 0.25,
        "lr": 1e-6,
        "ess": 0.9,
        "ratio_max": 1.5,
        "kl_reference": None,
        "entropy": None,
        "logprob_gap_mean": 1e-5,
        "logprob_gap_max": 3e-5,
        "tokens_generated": 16,
        "tokens_trained": 3,
        "time_step_s": 8.0,  # 10 s, less 2 s of evaluation
        "time_generate_s": 6.0,  # those of step 4, though they began before the window
        "time_wait_s": 2.5,  # 10..12 for generation, 12..12.5 for the rewards
        "time_reward_s": 0.5,
        "time_train_s": 5.0,
        "time_sync_s": 0.5,
        "time_sync_rendezvous_s": 0.125,
        "time_sync_transfer_s": 0.25,
        "time_sync_verify_s": 0.125,
        "time_sync_probe_s": None,  # this sync had none
        "time_evaluate_s": 2.0,
        "sync_bytes": 1_000,
        "overlap": 0.7,  # both 15..18.5 = 3.5 s; trainer 5 s; engines 2 + 3.5 s
        "skipped_updates": 1,
        "outside_nucleus_fraction": 0.01,
        "nonfinite": [],
    }
    assert {key: record[key] for key in expected} == {
        key: pytest.approx(value) if isinstance(value, float) else value for key, value in expected.items()
    }


def test_the_trainer_waits_only_while_it_does_not_train_and_its_own_samples_are_in_the_making() -> None:
    def waited(*spans: Span) -> float:
        return times(4, Window(10.0, 20.0, spans))["time_wait_s"]

    # Training of the step before ran into this window until 13: the samples were needed from then on.
    before = Span("trainer", "train", 8.0, 13.0, 3)
    assert waited(before, Span("engines", "generate", 8.0, 15.0, 4), Span("trainer", "train", 15.0, 20.0, 4)) == 2.0
    # Those of the next step keep nobody waiting.
    assert waited(Span("engines", "generate", 10.0, 20.0, 5), Span("trainer", "train", 10.0, 16.0, 4)) == 0.0
    assert waited(Span("engines", "generate", 2.0, 9.0, 4), Span("trainer", "train", 10.0, 16.0, 4)) == 0.0


def test_lengths_are_sampled_tokens_never_the_padded_width_B132() -> None:
    unequal = [scored(sample_index=i, tokens=tokens) for i, tokens in enumerate((1, 2, 9))]
    found = sample_statistics(unequal)
    assert found["response_length_mean"] == 4.0
    assert found["tokens_generated"] == 12


def test_clip_shares_of_the_trainer_keep_their_sides_B133() -> None:
    record = step_record(
        step=0,
        version=0,
        scored=samples(),
        batch=batch([[1]]),
        update=update(clip_fraction_low=0.125, clip_fraction_high=0.5),
        window=WINDOW,
        sync=None,
        staleness=None,
        updates_behind_max=None,
    )
    assert (record["clip_fraction_low"], record["clip_fraction_high"]) == (0.125, 0.5)
    assert (record["sync_bytes"], record["logprob_gap_max"], record["staleness_max"]) == (0, None, None)


def test_numbers_that_json_cannot_hold_are_null_and_named_B046() -> None:
    record = step_record(
        step=0,
        version=0,
        scored=[scored(reward=math.nan), scored(sample_index=1, reward=1.0)],
        batch=batch([[1]]),
        update=update(loss=math.inf, grad_norm=math.nan, lr=1e-6, tokens_trained=math.nan),
        window=WINDOW,
        sync=None,
        staleness=(0, 0),
        updates_behind_max=0,
    )
    assert record["loss"] is record["grad_norm"] is record["reward_mean"] is None
    assert record["nonfinite"] == ["grad_norm", "loss", "reward_mean", "reward_std"]
    assert record["tokens_trained"] == 1
    json.dumps(record, allow_nan=False)


def test_the_trainers_own_count_of_tokens_wins_and_its_keys_never_replace_ours() -> None:
    record = step_record(
        step=0,
        version=0,
        scored=samples(),
        batch=batch([[1, 1]]),
        update=update(tokens_trained=7.0, reward_mean=99.0, updates=2.0),
        window=WINDOW,
        sync=None,
        staleness=(0, 0),
        updates_behind_max=0,
    )
    assert (record["tokens_trained"], record["reward_mean"], record["updates"]) == (7, 0.5, 2.0)


def test_groups_are_told_by_prompt_and_epoch_not_by_neighbourhood() -> None:
    # a@0: 0, 1 (spread) and a@1: 1, 1 and b@0: 0, 0, in an order that mixes them.
    mixed = [
        scored("a", 0, reward=0.0, epoch=0),
        scored("b", 0, reward=0.0),
        scored("a", 0, reward=1.0, epoch=1),
        scored("a", 1, reward=1.0, epoch=0),
        scored("b", 1, reward=0.0),
        scored("a", 1, reward=1.0, epoch=1),
    ]
    found = sample_statistics(mixed)
    assert found["groups_without_spread_fraction"] == pytest.approx(2 / 3)
    assert found["solved_groups_fraction"] == pytest.approx(1 / 3)


def test_a_solved_group_is_without_spread_and_in_the_upper_half_of_the_rewards() -> None:
    assert solved_fraction([]) is None
    assert solved_fraction([[0, 0], [0, 0], [0, 1], [1, 1]]) == 0.25
    assert solved_fraction([[-1, -1], [0, 0]]) == 0.5  # penalties
    assert (solved_fraction([[1, 1], [1, 1]]), solved_fraction([[0, 0]]), solved_fraction([[-1, -1]])) == (1, 0, 0)


def test_no_spread_means_the_same_as_in_the_advantages() -> None:
    from offbeat.algorithms.advantages import SPREAD_TOLERANCE
    from offbeat.metrics import records

    assert records.SPREAD_TOLERANCE == SPREAD_TOLERANCE
    assert not has_spread([0.1 + 0.2, 0.3])
    assert has_spread([0.3, 0.3001])
    assert not has_spread([0.7])


def test_an_empty_step_has_null_statistics() -> None:
    found = sample_statistics([])
    assert found["reward_mean"] is found["reward_std"] is found["truncated_fraction"] is None
    assert found["tokens_generated"] == 0


def test_a_part_is_averaged_over_the_samples_that_have_it() -> None:
    both = [
        scored(parts={"right": 1.0, "boxed": 1.0}),
        scored(sample_index=1, parts={"right": 0.0}),
    ]
    assert part_means(both) == {"right": 0.5, "boxed": 1.0}


def test_evaluations_are_part_of_the_step_that_follows_them_and_the_last_ones_have_a_line() -> None:
    result = summarize("test", [scored(reward=1.0, versions=[4])], step=4, version=4)
    record = step_record(
        step=4,
        version=4,
        scored=samples(),
        batch=batch([[1]]),
        update=update(),
        window=WINDOW,
        sync=None,
        staleness=(0, 0),
        updates_behind_max=0,
        evaluations=[result],
    )
    assert record["eval/test/avg@1"] == 1.0
    assert record["eval/test/weights_version"] == 4
    assert evaluation_record(4, 4, [result], WINDOW) == {
        "step": 4,
        "weights_version": 4,
        "time_evaluate_s": 2.0,
        **result.to_metrics(),
        "nonfinite": [],
    }


def test_whole_numbers_and_texts_are_left_alone() -> None:
    assert finite({"a": 1, "b": "x", "c": -math.inf}) == {"a": 1, "b": "x", "c": None, "nonfinite": ["c"]}
