"""A run with its files, in one process: what would talk to a process is a fake that takes time, all else is real.

Loops, stages, recorder, saver, checkpoints and evaluations are those of a run. `FakeRun.live` is one life of it: from
the newest checkpoint to the end, or until the test cancels it, which leaves the files as a kill would.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.checkpoint import CheckpointStore
from offbeat.config import parse_config
from offbeat.evaluate import EvalResult, EvalSet
from offbeat.journal import Journal
from offbeat.line import open_line
from offbeat.loops.on_policy import on_policy
from offbeat.loops.one_step import one_step
from offbeat.metrics.display import SilentDisplay
from offbeat.metrics.spans import Timeline
from offbeat.metrics.writer import RunFolder
from offbeat.recording import RunEvaluations, RunRecorder, RunSaver
from offbeat.rpc.messages import UpdateResult
from offbeat.stages import RunStages
from offbeat.testing.fakes import FakeEngine, FakePrompts, FakeReward, FakeTrainer, FakeWeightSync, World
from offbeat.trackers import Trackers
from offbeat.types import Batch, GenerateRequest, Prompt, Rollout, Sampling

PROMPTS = 4
SAMPLES = 2
SAMPLING = Sampling(max_new_tokens=4)


@dataclass
class LearningTrainer(FakeTrainer):
    """Its weights are the list of all rows that it was ever trained on, a list for each step."""

    learned: list[list[int]] = field(default_factory=list[list[int]])
    uneven: random.Random = field(default_factory=random.Random)

    async def update(self, batch: Batch) -> UpdateResult:
        self.train_s = self.uneven.uniform(0.1, 2.0)
        result = await super().update(batch)
        self.batches.clear()
        self.learned.append([int(s.prompt_token_ids[0]) for m in batch.minibatches for s in m.samples])
        return result

    async def save(self, folder: str) -> None:
        """Two files, with time for a kill before, between and after them."""
        await asyncio.sleep(0.2)
        (Path(folder) / "weights.json").write_text(json.dumps(self.learned))
        await asyncio.sleep(0.2)
        (Path(folder) / "version.json").write_text(str(self.world.trainer_version))
        await asyncio.sleep(0.2)

    async def load(self, folder: str) -> None:
        self.learned = json.loads((Path(folder) / "weights.json").read_text())
        self.world.trainer_version = int((Path(folder) / "version.json").read_text())


@dataclass
class UnevenEngine(FakeEngine):
    """Each call takes another time; `asked` has the rows of every call as it comes."""

    uneven: random.Random = field(default_factory=random.Random)
    asked: list[list[int]] = field(default_factory=list[list[int]])

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        self.asked.append([int(request.token_ids[0]) for request in requests])
        self.token_s = self.uneven.uniform(0.02, 0.5)
        return await super().generate(requests, sampling)


@dataclass
class CountingPrompts:
    """`FakePrompts` that remembers which batches were read."""

    rows: int
    read: list[int] = field(default_factory=list[int])

    def batch(self, step: int) -> list[Prompt]:
        self.read.append(step)
        return FakePrompts(rows=self.rows, prompts_per_step=PROMPTS).batch(step)


class Life:
    """What one life is made of; the parts are there to be looked at."""

    def __init__(self, run: FakeRun, first: int) -> None:
        uneven = random.Random(run.uneven.random())
        self.first = first
        self.world = World()
        self.engine = run.engine(self.world, uneven=uneven)
        self.trainer = LearningTrainer(self.world, uneven=uneven)
        self.weights = FakeWeightSync(self.world, [self.engine])
        self.prompts = CountingPrompts(run.rows)
        self.timeline = Timeline()
        self.stages: RunStages | None = None
        self.evaluations: list[EvalResult] = []


@dataclass
class FakeRun:
    """`seed` decides how long everything takes; what is sampled and trained must not depend on it."""

    path: Path
    steps: int
    max_staleness: int
    rows: int = 100
    save_every: int = 3
    eval_every: int | None = None
    seed: int = 0
    saver: type[RunSaver] = RunSaver
    engine: type[UnevenEngine] = UnevenEngine
    lives: list[Life] = field(default_factory=list[Life])
    warned: list[str] = field(default_factory=list[str])
    also: Mapping[int, Collection[str]] = field(default_factory=dict[int, "Collection[str]"])

    def __post_init__(self) -> None:
        self.uneven = random.Random(self.seed)
        self.folder = RunFolder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.config = parse_config(
            {
                "model": "fake",
                "steps": self.steps,
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_staleness": self.max_staleness,
                "checkpoint": {"every_steps": self.save_every},
                "data": [{"source": "rows.jsonl", "rewards": {"fake:fake": 1.0}}],
                "eval": [{"name": "held", "source": "h", "every_steps": self.eval_every or 0}],
            }
        )

    async def live(self, step: int | None = None) -> None:
        """One life, from the newest checkpoint or that of `step`."""
        store = CheckpointStore(self.folder.checkpoints)
        checkpoint, skipped = store.latest() if step is None else (store.at(step), [])
        assert skipped == []
        first = checkpoint.step if checkpoint else 0
        life = Life(self, first)
        self.lives.append(life)
        if checkpoint is not None:
            await life.trainer.load(str(checkpoint.folder / "trainer-0"))
        with open_line(self.folder, checkpoint, self.warned.append, max_staleness=self.max_staleness) as line:
            updates = {life.world.trainer_version: life.world.trainer_version}
            recorder = RunRecorder(
                line.metrics,
                line.samples,
                SilentDisplay(),
                life.timeline,
                updates_at=updates,
                history=[],
                trackers=Trackers(self.config, self.folder.path, next_step=first),
            )
            life.evaluations = recorder.evaluations
            life.stages = self._stages(life, recorder, store, line.journal)
            await (on_policy, one_step)[self.max_staleness](life.stages)
            await life.stages.finish()
            recorder.finish(life.stages.version, life.stages.version)

    def _stages(self, life: Life, recorder: RunRecorder, store: CheckpointStore, journal: Journal) -> RunStages:
        # The reward shows the version; two samples of a group differ, so that every group is trained on.
        reward = FakeReward(value=lambda rollout: float(rollout.version_min + rollout.sample_index))
        held = [] if self.eval_every is None else [EvalSet("held", _held_out(), SAMPLING)]
        return RunStages(
            config=self.config,
            sampling=SAMPLING,
            prompts=life.prompts,
            engine=life.engine,
            reward=reward,
            trainer=life.trainer,
            weights=life.weights,
            evaluations=RunEvaluations(self.config, held, life.engine, reward, recorder, also=self.also),
            saver=self.saver(
                self.config,
                store,
                life.trainer,
                write_tokenizer=Path.mkdir,
                journal=journal,
                history=recorder.history,
                data="rows",
                inputs={"rewards.py": "digest"},
                started_s=0.0,
                sync_lines=recorder.sync,
            ),
            recorder=recorder,
            journal=journal,
            timeline=life.timeline,
            remaining=range(life.first, self.steps),
            version=life.world.trainer_version,
        )

    def learned(self) -> list[list[int]]:
        """What the weights of the newest checkpoint were trained on, step by step."""
        checkpoint, _ = CheckpointStore(self.folder.checkpoints).latest()
        assert checkpoint is not None
        return json.loads((checkpoint.folder / "trainer-0" / "weights.json").read_text())

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.samples.read_text().splitlines()]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]


def _held_out() -> tuple[Prompt, ...]:
    return tuple(
        Prompt(id=f"held/{i}", epoch=0, source="held", token_ids=np.array([i], np.int32), text=str(i), columns={})
        for i in range(3)
    )
