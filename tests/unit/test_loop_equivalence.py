"""The loops with a real model, against a few lines that do one thing after the other: the same weights to the last bit.

Nothing is concurrent in the plain version: step k samples from the weights that it is to be sampled from, and trains.
"""

from __future__ import annotations

import asyncio
import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.batching import make_batch
from offbeat.config import Config, LossSection, TrainerSection, parse_config
from offbeat.journal import Journal
from offbeat.loops.on_policy import on_policy
from offbeat.loops.one_step import one_step
from offbeat.metrics.spans import Timeline
from offbeat.rollout.hf import HfSampler
from offbeat.rpc.messages import UpdateResult
from offbeat.stages import RunStages, generate_requests
from offbeat.testing.fakes import FakeEngine, FakePrompts, FakeReward, FakeSyncReport, FakeTrainer, World
from offbeat.testing.tiny_model import tiny_qwen3
from offbeat.trainer.learner import Learner
from offbeat.trainer.loading import load_model
from offbeat.types import Batch, GenerateRequest, Rollout, Sampling, Scored

pytestmark = pytest.mark.slow

STEPS = 20
SAMPLING = Sampling(max_new_tokens=4, stop_token_ids=(1, 5, 6))
PROMPTS = FakePrompts(rows=24, prompts_per_step=3)


def liked(rollout: Rollout) -> float:
    return float(sum(token % 3 == 0 for token in rollout.token_ids.tolist()))


def config(max_staleness: int) -> Config:
    return parse_config(
        {
            "model": "m",
            "steps": STEPS,
            "prompts_per_step": 3,
            "samples_per_prompt": 4,
            "max_staleness": max_staleness,
            "updates_per_step": 2,
            "data": [{"source": "rows.jsonl", "rewards": {"fake:fake": 1.0}}],
        }
    )


def learner_of(folder: Path) -> Learner:
    model = load_model(str(folder), None, init="pretrained", seed=0)
    section = TrainerSection(dtype="float32", lr=1e-2, warmup_steps=3, schedule="cosine", micro_batch_tokens=40)
    return Learner(model, section, LossSection(), total_updates=2 * STEPS)


@dataclass
class Sampler(FakeEngine):
    """Real samples, a pause before and after."""

    model: Any = None

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        await asyncio.sleep(0.001)
        rollouts = HfSampler(self.model).generate(requests, sampling, version=self.version)
        await asyncio.sleep(0.001)
        return rollouts


@dataclass
class Trains(FakeTrainer):
    learner: Any = None

    async def update(self, batch: Batch) -> UpdateResult:
        await asyncio.sleep(0.0005)
        return self.learner.update(batch)


@dataclass
class Copies:
    """The trainer's weights into the engine's own model."""

    engine: Sampler
    learner: Learner

    async def sync(self, version: int) -> FakeSyncReport:
        await asyncio.sleep(0.0005)
        self.engine.model.load_state_dict(self.learner.model.state_dict())
        self.engine.version = version
        return FakeSyncReport(version)


class Quiet:
    """Records and evaluates nothing."""

    def synced(self, report: Any) -> None: ...

    def trained(self, trained: Any) -> None: ...

    def due(self, version: int) -> bool:
        return False

    async def run(self, version: int) -> None: ...


class Unsaved:
    def due(self, next_step: int) -> bool:
        return False

    async def save(self, next_step: int, version: int) -> None: ...


def by_the_loop(folder: Path, loop: Callable[[Any], Any], max_staleness: int) -> dict[str, Tensor]:
    world, learner, quiet = World(), learner_of(folder), Quiet()
    engine = Sampler(world, model=copy.deepcopy(learner.model))
    stages = RunStages(
        config=config(max_staleness),
        sampling=SAMPLING,
        prompts=PROMPTS,
        engine=engine,
        reward=FakeReward(value=liked, score_s=0.0005),
        trainer=Trains(world, learner=learner),
        weights=Copies(engine, learner),
        evaluations=quiet,
        saver=Unsaved(),
        recorder=quiet,
        journal=Journal(io.BytesIO()),
        timeline=Timeline(),
        remaining=range(STEPS),
        version=0,
    )
    asyncio.run(loop(stages))
    assert stages.version == STEPS
    return learner.model.state_dict()


def one_after_the_other(folder: Path, delay: int) -> dict[str, Tensor]:
    """Step k is sampled from the weights of version k - delay."""
    learner, run = learner_of(folder), config(delay)
    versions = [copy.deepcopy(learner.model)]
    for step in range(STEPS):
        sampled_at = max(step - delay, 0)
        prompts = PROMPTS.batch(step)
        requests = generate_requests(prompts, run.samples_per_prompt, run.seed)
        rollouts = HfSampler(versions[sampled_at]).generate(requests, SAMPLING, version=sampled_at)
        scored = [
            Scored(rollout=r, prompt=prompts[i // run.samples_per_prompt], text="", reward=liked(r), parts={})
            for i, r in enumerate(rollouts)
        ]
        batch = make_batch(step, scored, SAMPLING, loss=run.loss, updates_per_step=2, epochs_per_batch=1)
        learner.update(batch)
        versions.append(copy.deepcopy(learner.model))
    return learner.model.state_dict()


@pytest.mark.parametrize(("loop", "staleness"), [(on_policy, 0), (one_step, 1)])
def test_a_loop_gives_the_very_weights_of_the_plain_program_after_20_steps(
    tmp_path: Path, loop: Any, staleness: int
) -> None:
    """B147: and another lag gives others, so equality says something."""
    folder = tiny_qwen3(tmp_path / "model", vocab=40, layers=1)
    found = by_the_loop(folder, loop, staleness)
    wanted, other = one_after_the_other(folder, staleness), one_after_the_other(folder, 1 - staleness)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(found[name], other[name]) for name in other)
