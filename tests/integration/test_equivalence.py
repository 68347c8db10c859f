"""A run of many processes learns what one page of plain Python learns; and a run is a function of its config.

The reference samples anew with its own weights of the version that the engines should have had. Equal tokens then show
that prompts, seeds, rewards and versions are right; equal weights, that everything after them is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence_runs import (
    PROMPTS,
    SAMPLES,
    STEPS,
    STOPS,
    TRAINER,
    Observed,
    Sampler,
    heldout,
    inputs,
    load,
    run,
    settings_of,
    values,
    weights_of,
)
from learning_reward import liked
from torch import Tensor

from offbeat.commands import train
from offbeat.commands.audit import examine
from offbeat.metrics.display import SilentDisplay
from offbeat.metrics.writer import RunFolder
from offbeat.testing.consistency import compare, sigmas
from offbeat.testing.oracle import OracleSample
from offbeat.testing.reference import (
    ReferenceSettings,
    Weighed,
    reference_logprobs,
    reference_loss,
    reference_run,
)

pytestmark = pytest.mark.integration

WEIGHTS_TOLERANCE = 1e-6
"""Absolute, of weights up to 1.03: a few float32 roundings of the largest. Seen: 3.5e-7."""
MISTAKE = 1e-3
"""What a mistake moves some weight by, at least. Seen: 5e-3 and more."""
LOGPROBS_TOLERANCE = 5e-5
"""Of one token. Seen: 7e-6, after four steps."""

CASES: Mapping[str, Mapping[str, Any]] = {
    "on-policy": {"eval": "every step", "checkpoint": {"every_steps": 1, "keep_last": STEPS}},
    "on-policy, Dr. GRPO, two updates": {"recipe": "dr_grpo", "updates_per_step": 2},
    "one step off-policy, two updates": {
        "max_staleness": 1,
        "updates_per_step": 2,
        "loss": {"aggregation": "sequence_mean"},
    },
}


class Runs:
    """Every case is run once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = inputs(folder)
        self.model = load(folder / "model")
        self._done: dict[str, Observed] = {}

    def config(self, case: str) -> dict[str, Any]:
        changes = dict(CASES[case])
        if "eval" in changes:
            changes["eval"] = [heldout(self.folder)]
        return values(self.folder, **changes)

    def observed(self, case: str) -> Observed:
        if case not in self._done:
            self._done[case] = run(self.config(case), self.folder / f"run-{len(self._done)}")
        return self._done[case]

    def settings(self, case: str) -> ReferenceSettings:
        return settings_of(self.config(case))

    def sampler(self, case: str) -> Sampler:
        return Sampler(self.folder, seed=self.config(case)["seed"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("equivalence"))


class StopAfter(SilentDisplay):
    """Presses Ctrl-C when it is shown a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, record: Mapping[str, Any]) -> None:
        if record["step"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> Observed:
    """One step off-policy, of another seed than the cases, and interrupted after its second step."""
    return run(values(runs.folder, max_staleness=1, seed=4), runs.folder / "stopped", display=StopAfter(1))


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_weights_of_the_reference_after_five_steps(runs: Runs, case: str) -> None:
    """B147: with all its processes."""
    observed, sampler = runs.observed(case), runs.sampler(case)
    wanted = reference_run(runs.model, sampler, runs.settings(case))
    for step in range(STEPS):
        rollouts, scored = observed.rollouts(step), observed.trained[step].scored
        assert [r.token_ids.tolist() for r in rollouts] == [s.tokens for s in sampler.sampled[step]], f"step {step}"
        assert [one.reward for one in scored] == [s.reward for s in sampler.sampled[step]]
        for rollout, sample in zip(rollouts, sampler.sampled[step], strict=True):
            assert np.abs(rollout.logprobs - np.asarray(sample.behaviour)).max() < LOGPROBS_TOLERANCE
    assert largest_difference(observed.weights(), wanted) < WEIGHTS_TOLERANCE
    assert largest_difference(runs.model.state_dict(), wanted) > 10 * MISTAKE


def test_the_runs_reach_what_they_are_to_show(runs: Runs) -> None:
    """Groups without spread, both clips, the dual clip, the gradient's clip, and samples of all lengths."""
    records = [record for case in CASES for record in runs.observed(case).result.history]
    assert any(0 < record["groups_without_spread_fraction"] < 1 for record in records)
    late = runs.observed("one step off-policy, two updates").result.history
    for key in ("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual"):
        assert any(record[key] > 0 for record in late), key
    norms = [record["grad_norm"] for record in records]
    assert min(norms) < TRAINER["max_grad_norm"] < max(norms)
    lengths = {len(r.token_ids) for step in range(STEPS) for r in runs.observed("on-policy").rollouts(step)}
    assert lengths == set(range(1, 9))


# --- the comparison notices what is wrong ---------------------------------------------------------------------------


def with_changed_update(change: Callable[[Any, Weighed, ReferenceSettings], Weighed]) -> Any:
    def loss(model: Any, update: Weighed, settings: ReferenceSettings) -> Tensor:
        return reference_loss(model, change(model, update, settings), settings)

    return loss


def against_current(model: Any, update: Weighed, settings: ReferenceSettings) -> Weighed:
    with torch.no_grad():
        current = reference_logprobs(model, update, settings)
    return [
        (dataclasses.replace(one, behaviour=logprobs.tolist()), advantage)
        for (one, advantage), logprobs in zip(update, current, strict=True)
    ]


def each_sample(change: Callable[[OracleSample], OracleSample]) -> Any:
    return with_changed_update(lambda model, update, settings: [(change(one), a) for one, a in update])


def without_stop(one: OracleSample) -> OracleSample:
    end = -1 if one.tokens[-1] in STOPS and len(one.tokens) > 1 else None
    return dataclasses.replace(one, tokens=one.tokens[:end], behaviour=one.behaviour[:end])


def per_micro_batch(model: Any, update: Weighed, settings: ReferenceSettings) -> Tensor:
    """Each micro-batch with a denominator of its own, and the mean of them."""
    parts = [update[start : start + 5] for start in range(0, len(update), 5)]
    return torch.stack([reference_loss(model, part, settings) for part in parts]).mean()


def other_baselines(model: Any, update: Weighed, settings: ReferenceSettings) -> Weighed:
    advantages = [advantage for _, advantage in update]
    return [(one, advantage) for (one, _), advantage in zip(update, advantages[1:] + advantages[:1], strict=True)]


def scaled(model: Any, update: Weighed, settings: ReferenceSettings) -> Tensor:
    """As advantages come out that are divided by a standard deviation over n, not n - 1."""
    return math.sqrt(SAMPLES / (SAMPLES - 1)) * reference_loss(model, update, settings)


MISTAKES: Mapping[str, Any] = {
    "a loss of another scale": scaled,
    "ratio against the current logprobs": with_changed_update(against_current),
    "a denominator for each micro-batch": per_micro_batch,
    "advantages of the neighbour": with_changed_update(other_baselines),
    "the stop token is not trained": each_sample(without_stop),
    "engine logprobs at another temperature": each_sample(
        lambda one: dataclasses.replace(one, behaviour=[0.8 * value for value in one.behaviour])
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_loss_is_far_outside_the_tolerance(runs: Runs, mistake: str) -> None:
    case = "one step off-policy, two updates"
    wrong = reference_run(runs.model, runs.sampler(case), runs.settings(case), MISTAKES[mistake])
    assert largest_difference(runs.observed(case).weights(), wrong) > MISTAKE


@pytest.mark.parametrize(
    ("case", "delay"),
    [
        ("on-policy", 1),
        ("one step off-policy, two updates", 0),
        ("one step off-policy, two updates", 2),
    ],
)
def test_an_engine_a_version_behind_or_ahead_is_noticed_by_tokens_and_weights(
    runs: Runs, case: str, delay: int
) -> None:
    settings, sampler, observed = runs.settings(case), runs.sampler(case), runs.observed(case)
    wrong = reference_run(runs.model, sampler, dataclasses.replace(settings, delay=delay))
    ours = [[r.token_ids.tolist() for r in observed.rollouts(step)] for step in range(STEPS)]
    assert ours != [[sample.tokens for sample in samples] for samples in sampler.sampled]
    assert largest_difference(observed.weights(), wrong) > MISTAKE


# --- the same config, the same run -----------------------------------------------------------------------------------


def lasting(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All that is no measurement of time."""
    return [{k: v for k, v in record.items() if not k.startswith("time_") and k != "overlap"} for record in records]


def lines(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_another_seed_samples_otherwise(runs: Runs, stopped: Observed) -> None:
    """The first batch is drawn from the same weights in every run here, so seeds alone decide about it."""

    def first(observed: Observed) -> list[list[int]]:
        return [rollout.token_ids.tolist() for rollout in observed.rollouts(0)]

    assert first(runs.observed("one step off-policy, two updates")) == first(runs.observed("on-policy"))
    assert first(stopped) != first(runs.observed("on-policy"))
    assert lasting(stopped.result.history)[0] != lasting(runs.observed("on-policy").result.history)[0]


@pytest.mark.parametrize("case", CASES)
def test_staleness_is_zero_at_the_start_and_as_promised_afterwards(runs: Runs, case: str) -> None:
    bound = runs.config(case)["max_staleness"]
    history = runs.observed(case).result.history
    assert [(r["staleness_min"], r["staleness_max"]) for r in history] == [(0, 0)] + [(bound, bound)] * (STEPS - 1)
    updates = runs.config(case).get("updates_per_step", 1)
    assert [r["updates_behind_max"] for r in history] == [updates - 1] + [updates * (1 + bound) - 1] * (STEPS - 1)


# --- held-out points ---


def test_every_heldout_point_is_what_the_trainers_weights_of_its_version_can_do(runs: Runs) -> None:
    """B068: the checkpoint of each step, sampled here with the same seeds, gives the very same completions."""
    observed = runs.observed("on-policy")
    written = [line for line in lines(observed.result.folder, "samples.jsonl") if line["eval"] == "heldout"]
    assert {line["step"] for line in written} == set(range(STEPS + 1))
    sampler = runs.sampler("on-policy")
    for version in range(STEPS + 1):
        saved = observed.result.folder / "checkpoints" / f"step-{version}" / "trainer-0" / "model"
        completions = sampler.heldout(load(saved) if version else runs.model)
        point = [line for line in written if line["step"] == version]
        assert [line["completion"] for line in point] == completions
        assert {version for line in point for version, _ in line["versions"]} == {version}
        mean = observed.result.evaluations[version].avg
        assert mean == pytest.approx(sum(map(liked, completions)) / len(completions))


def test_heldout_and_rollout_rewards_of_a_version_agree_within_noise(runs: Runs) -> None:
    """Both are of random rows of one kind here."""
    points = compare(lines(runs.observed("on-policy").result.folder, "samples.jsonl"), "heldout")
    assert [point.version for point in points] == list(range(STEPS))
    assert abs(sigmas(points)) < 4


# --- resume ----------------------------------------------------------------------------------------------------------


def test_an_on_policy_run_continued_from_a_checkpoint_equals_the_run_that_was_not_broken_off(runs: Runs) -> None:
    """B017, B088: as after a crash in step 4: later lines and checkpoints are there and must not stay."""
    whole = runs.observed("on-policy")
    broken = runs.folder / "broken"
    shutil.copytree(whole.result.folder, broken)
    for step in range(3, STEPS + 1):
        shutil.rmtree(broken / "checkpoints" / f"step-{step}")
    result = train.resume(broken, (), display=SilentDisplay())
    assert not result.interrupted
    assert len(result.history) == STEPS
    assert lasting(lines(broken)) == lasting(lines(whole.result.folder))
    assert lines(broken, "samples.jsonl") == lines(whole.result.folder, "samples.jsonl")
    found = examine(RunFolder.open(broken))
    assert (found.problems, found.account.unended) == ([], {})
    assert (found.account.resumes, found.account.done_again) == ([2], STEPS - 2)
    assert result.checkpoint is not None
    assert largest_difference(weights_of(result.checkpoint), whole.weights()) == 0.0
    # The optimizer's moments as well.
    for name in ("trainer-rank-0.safetensors", "trainer-rank-0.json"):
        files = [folder / "trainer-0" / name for folder in (result.checkpoint, whole.result.checkpoint) if folder]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_an_interrupted_one_step_run_goes_on_at_lag_zero_and_no_sample_is_lost_or_twice(stopped: Observed) -> None:
    """B174, B051: the batch that was in flight comes again, through the real trainer and engine."""
    assert stopped.result.interrupted
    done = len(stopped.result.history)
    assert done in (2, 3), "the step at hand is finished, and no further one"
    assert stopped.result.checkpoint is not None
    assert stopped.result.checkpoint.name == f"step-{done}"

    result = train.resume(stopped.result.folder, (), display=SilentDisplay())
    assert [record["step"] for record in result.history] == list(range(STEPS))
    lags = [record["staleness_max"] for record in result.history]
    assert lags == [0] + [1] * (done - 1) + [0] + [1] * (STEPS - done - 1)
    account = examine(RunFolder.open(result.folder)).account
    assert (account.problems, account.unended, account.lost, account.resumes) == ([], {}, 0, [done])
    assert account.issued == STEPS * PROMPTS * SAMPLES
    found = [(line["step"], line["prompt_id"], line["sample_index"]) for line in lines(result.folder, "samples.jsonl")]
    assert found == [
        (step, f"rows/{row}", index)
        for step in range(STEPS)
        for row in range(step * PROMPTS, (step + 1) * PROMPTS)
        for index in range(SAMPLES)
    ]
