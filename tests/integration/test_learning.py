"""Learning that is right, told from learning that only looks like it, on the quickstart's model and data.

The same loop as `one_step`, in this process: sampler, batch, learner. One supervised warm-up serves all variants. The
learning rate is twice the quickstart's, so that 25 steps are enough; held-out accuracy afterwards, of the trainer's
weights, on four seeds:

    warm-up only                                .15  .12  .22  .19
    one step off-policy                         .86  .82  .79  .89
    the same, ratio forced to 1                 .38  .39  .21  .30
    on-policy, ratio forced to 1                .73  .83  .69  .85
    one step off-policy, engine never synced    .40  .48  .36  .51    (its rollouts: .20 .11 .13 .18)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from equivalence_runs import inputs, run, values

from offbeat import build
from offbeat.algorithms.batching import make_batch
from offbeat.config import load_config
from offbeat.data.chat import decode_completions
from offbeat.errors import RunError, WeightSyncError
from offbeat.metrics.samples import sample_objects
from offbeat.prepare import Prepared, prepare
from offbeat.rollout.hf import HfSampler
from offbeat.rpc.process import ProcessSpec
from offbeat.stages import generate_requests
from offbeat.testing.consistency import compare, sigmas
from offbeat.trainer.learner import Learner
from offbeat.trainer.loading import load_model
from offbeat.types import Batch, Prompt, Scored
from offbeat.weights.sync import Report, WeightTransaction

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
STEPS = 25
EVAL_EVERY = 6
OVERRIDES = ("trainer.lr=4e-4", f"steps={STEPS}")


@dataclass
class Learned:
    """What a variant left behind."""

    rewards: list[float] = field(default_factory=list[float])
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """As in samples.jsonl; held-out samples are of the trainer's weights."""
    heldout: float = 0.0


class Task:
    """The quickstart, warmed up. `learn` starts from the same weights each time."""

    def __init__(self) -> None:
        self.prepared: Prepared = prepare(load_config(QUICKSTART, OVERRIDES))
        self.config = self.prepared.config
        self.model = load_model(self.config.model, None, init="random", seed=self.config.seed)
        section, warmup = self.config.warmup, self.prepared.warmup
        assert section is not None
        assert warmup is not None
        learner = self.learner(self.model)
        for step in range(section.steps):
            learner.supervise(warmup.batch(step), section.lr, last=step == section.steps - 1)

    def learner(self, model: Any) -> Learner:
        return Learner(
            model, self.config.trainer, self.config.loss, total_updates=self.config.steps * self.config.updates_per_step
        )

    def sample(self, model: Any, prompts: Sequence[Prompt], samples: int, version: int) -> list[Scored]:
        requests = generate_requests(prompts, samples, self.config.seed)
        rollouts = HfSampler(model, max_rows=1024).generate(requests, self.prepared.sampling, version)
        texts = decode_completions(
            self.prepared.tokenizer, [r.token_ids for r in rollouts], self.prepared.sampling.stop_token_ids
        )
        asked = [prompt for prompt in prompts for _ in range(samples)]
        return [
            Scored(rollout=r, prompt=p, text=text, reward=float(text == p.columns["answer"]), parts={})
            for r, p, text in zip(rollouts, asked, texts, strict=True)
        ]

    def learn(self, *, staleness: int = 1, forced: bool = False, synced: bool = True) -> Learned:
        """`forced`: every ratio is 1. `synced=False`: the engine keeps its first weights and counts versions."""
        trainer = copy.deepcopy(self.model)
        engine = copy.deepcopy(self.model)
        learner, learned = self.learner(trainer), Learned()

        def sync(version: int) -> None:
            if synced:
                engine.load_state_dict(trainer.state_dict())
            if version % EVAL_EVERY == 0 or version == STEPS:
                heldout = self.sample(trainer, self.prepared.eval_data[0].prompts[:256], 2, version)
                learned.heldout = sum(one.reward for one in heldout) / len(heldout)
                learned.lines += sample_objects(version, heldout, evaluation="heldout")

        sync(0)
        drawn: list[list[Scored]] = []
        for step in range(STEPS):
            while len(drawn) <= step + staleness:  # batch 0 at version 0, batch k at version k - staleness
                prompts = self.prepared.prompts.batch(len(drawn))
                drawn.append(self.sample(engine, prompts, self.config.samples_per_prompt, version=step))
            batch = make_batch(
                step,
                drawn[step],
                self.prepared.sampling,
                loss=self.config.loss,
                updates_per_step=self.config.updates_per_step,
                epochs_per_batch=1,
            )
            learned.rewards.append(sum(one.reward for one in drawn[step]) / len(drawn[step]))
            learned.lines += sample_objects(step, drawn[step])
            for minibatch in batch.minibatches:
                one = msgspec.structs.replace(batch, minibatches=(minibatch,))
                learner.update(with_ratio_one(learner, one) if forced else one)
            sync(step + 1)
        return learned


def with_ratio_one(learner: Learner, batch: Batch) -> Batch:
    """The same batch as if it had been sampled by the very weights that it updates."""
    minibatches = [
        msgspec.structs.replace(
            minibatch,
            samples=tuple(
                msgspec.structs.replace(sample, logprobs=logprobs)
                for sample, logprobs in zip(
                    minibatch.samples, learner.logprobs(minibatch.samples, batch.sampling), strict=True
                )
            ),
        )
        for minibatch in batch.minibatches
    ]
    return msgspec.structs.replace(batch, minibatches=tuple(minibatches))


@pytest.fixture(scope="module")
def task() -> Generator[Task]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Task()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def right(task: Task) -> Learned:
    return task.learn()


def test_one_step_off_policy_learns_and_with_the_ratio_forced_to_one_it_does_not(task: Task, right: Learned) -> None:
    assert sum(right.rewards[:2]) / 2 < 0.3
    assert right.heldout > 0.65
    forced = task.learn(forced=True)
    assert forced.heldout < 0.5
    assert right.heldout - forced.heldout > 0.3


def test_on_policy_a_ratio_forced_to_one_does_learn(task: Task) -> None:
    """So it is the missing correction that fails one step off-policy, and nothing else about that variant."""
    assert task.learn(staleness=0, forced=True).heldout > 0.55


def test_an_engine_that_is_never_synced_parts_heldout_accuracy_from_rollout_reward(task: Task, right: Learned) -> None:
    """The trainer's held-out accuracy rises even then, so that alone shows nothing."""
    points = compare(right.lines, "heldout")
    assert [point.version for point in points] == list(range(0, STEPS - 1, EVAL_EVERY))
    assert abs(sigmas(points)) < 4
    never = task.learn(synced=False)
    assert never.heldout > heldout_at_first(never) + 0.1
    assert sum(never.rewards[-10:]) / 10 < 0.3
    assert sigmas(compare(never.lines, "heldout")) > 6


def heldout_at_first(learned: Learned) -> float:
    """Held-out accuracy before the first step."""
    return compare(learned.lines, "heldout")[0].heldout


# --- the same faults in a real run end it -----------------------------------------------------------------------------


def engines_with_loader(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Engine processes whose loader is broken as `faulty_engine` says; all else is as ever."""
    environment = {"PYTHONPATH": str(Path(__file__).parent), "OFFBEAT_TEST_LOADER": fault}

    def spec(**given: Any) -> ProcessSpec:
        right = ProcessSpec(**given)
        if right.module != "offbeat.rollout.worker":
            return right
        return dataclasses.replace(right, module="faulty_engine", env={**right.env, **environment})

    monkeypatch.setattr(build, "ProcessSpec", spec)


FAULTS = {
    "liar@3": ("version 2 failed in phase 'probe'", "its logprobs differ from the trainer's"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_whose_engine_keeps_nothing_of_a_transfer_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """`deaf`: found by the digest of the model's memory. `liar`: shows what came; found by the parity probe."""
    engines_with_loader(monkeypatch, fault)
    with pytest.raises(WeightSyncError) as error:
        run(values(inputs(tmp_path), max_staleness=1), tmp_path / "run")
    for words in FAULTS[fault]:
        assert words in str(error.value)
    assert not (tmp_path / "run" / "checkpoints").exists(), "nothing that looks like a result"


def test_a_run_whose_syncs_report_success_and_move_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens carry the version that the engine counted itself: the first batch that is older than allowed ends it."""
    sync = WeightTransaction.sync

    async def pretend(self: WeightTransaction, version: int) -> Report:
        if version == 0:
            return await sync(self, version)
        return Report(version, bytes_moved=1, seconds=0.1, phases=(), probe_gap_mean=None, probe_gap_max=None)

    monkeypatch.setattr(WeightTransaction, "sync", pretend)
    with pytest.raises(RunError, match="weights version 0, 2 behind version 2"):
        run(values(inputs(tmp_path), max_staleness=1), tmp_path / "run")
