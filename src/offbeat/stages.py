"""The stages of a step, over the seams: what a loop orders, a page away from how any of it is done.

    sample(k)   prompts(k) → engine.generate → reward.score → advantages → Sampled
    train(k)    Sampled → staleness check → trainer.update → record, save
    sync()      trainer → every engine, verified
    evaluate()  the sets that are due at the engines' version

Stages own what the order depends on: which version the trainer is at, which version the engines hold, which steps are
left. They know no loop, no process and no backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from offbeat import staleness
from offbeat.algorithms.batching import make_batch
from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.metrics.spans import Timeline
from offbeat.ports import Engine, Prompts, Reward, SyncReport, Trainer, WeightSync
from offbeat.rpc.messages import UpdateResult
from offbeat.types import Batch, GenerateRequest, Prompt, Rollout, Sampling, Scored, sample_seed


@dataclass(frozen=True)
class Sampled:
    """One step's scored samples, and the batch made of them: all that depends on no trainer."""

    step: int
    scored: tuple[Scored, ...]
    batch: Batch


@dataclass(frozen=True)
class Trained:
    """All that is known of a finished step: what a recorder turns into one line of metrics."""

    step: int
    version: int
    """The weights version that was updated: the step's samples are compared with it."""
    scored: tuple[Scored, ...]
    batch: Batch
    update: UpdateResult


class Recorder(Protocol):
    """Hears of everything that happens; changes nothing."""

    def synced(self, report: SyncReport) -> None: ...

    def trained(self, trained: Trained) -> None: ...


class SampleJournal(Protocol):
    """Hears what becomes of every sample; `offbeat.journal.Journal` writes it down."""

    def issued(self, step: int, requests: Sequence[GenerateRequest]) -> None: ...

    def generated(self, step: int, rollouts: Sequence[Rollout]) -> None: ...

    def rewarded(self, step: int, scored: Sequence[Scored]) -> None: ...

    def trained(self, step: int, scored: Sequence[Scored], batch: Batch, update: UpdateResult) -> None: ...


class Evaluations(Protocol):
    def due(self, version: int) -> bool: ...

    async def run(self, version: int) -> None: ...


class Saver(Protocol):
    def due(self, next_step: int) -> bool: ...

    async def save(self, next_step: int, version: int) -> None: ...


@dataclass
class RunStages:
    """The stages of one run; see `offbeat.loops.Stages` for the contract of each method."""

    config: Config
    sampling: Sampling
    prompts: Prompts
    engine: Engine
    reward: Reward
    trainer: Trainer
    weights: WeightSync
    evaluations: Evaluations
    saver: Saver
    recorder: Recorder
    journal: SampleJournal
    timeline: Timeline
    remaining: range
    """The steps to do."""
    version: int
    """Of the trainer's weights: training steps done."""
    engine_version: int = -1
    stopping: bool = False
    saved_version: int = -1
    """The newest version that is saved."""
    evaluated_version: int = -1
    """The newest version at which what was due has been evaluated."""
    current: int = field(default=-1)

    def steps(self) -> Iterator[int]:
        for step in self.remaining:
            if self.stopping:
                return
            self.current = step
            yield step

    def has(self, step: int) -> bool:
        return step in self.remaining and not self.stopping

    def stop(self) -> None:
        """Finish the step at hand, save it, and do no more."""
        self.stopping = True

    @property
    def done(self) -> bool:
        """All steps are trained, and the last weights are evaluated if they are to be."""
        evaluated = self.version == self.evaluated_version or not self.evaluations.due(self.version)
        return self.version >= self.config.steps and evaluated

    async def sync(self) -> None:
        if self.version == self.engine_version:
            return
        with self.timeline.span("controller", "sync", step=self.version):
            report = await self.weights.sync(self.version)
            self.timeline.worked("controller", report.phases)
        if report.version != self.version:
            raise RunError(f"the sync of version {self.version} committed version {report.version}")
        self.engine_version = report.version
        self.recorder.synced(report)

    async def evaluate(self) -> None:
        version = self.engine_version
        if self.stopping or version == self.evaluated_version or not self.evaluations.due(version):
            return
        with self.timeline.span("engines", "evaluate", step=version):
            await self.evaluations.run(version)
        self.evaluated_version = version

    async def sample(self, step: int) -> Sampled:
        prompts = self.prompts.batch(step)
        requests = generate_requests(prompts, self.config.samples_per_prompt, self.config.seed)
        self.journal.issued(step, requests)
        with self.timeline.span("engines", "generate", step=step):
            rollouts = await self.engine.generate(requests, self.sampling)
        self.journal.generated(step, rollouts)
        by_rollout = [prompt for prompt in prompts for _ in range(self.config.samples_per_prompt)]
        with self.timeline.span("rewards", "reward", step=step):
            scored = await self.reward.score(rollouts, by_rollout)
        self.journal.rewarded(step, scored)
        with self.timeline.span("rewards", "advantages", step=step, category="train"):
            batch = make_batch(
                step,
                scored,
                self.sampling,
                loss=self.config.loss,
                updates_per_step=self.config.updates_per_step,
                epochs_per_batch=self.config.epochs_per_batch,
            )
        return Sampled(step, tuple(scored), batch)

    async def train(self, step: int, sampled: Sampled) -> None:
        if sampled.step != step:
            raise RunError(f"step {step} was given the samples of step {sampled.step}")
        staleness.check(sampled.scored, self.version, self.config.max_staleness)
        with self.timeline.span("trainer", "train", step=step):
            update = await self.trainer.update(sampled.batch)
        if update.weights_version != self.version + 1:
            raise RunError(
                f"after step {step} the trainer is at version {update.weights_version}, expected {self.version + 1}"
            )
        trained = Trained(step, self.version, sampled.scored, sampled.batch, update)
        self.version = update.weights_version
        self.journal.trained(step, sampled.scored, sampled.batch, update)
        self.recorder.trained(trained)
        if self.saver.due(step + 1) or self.stopping:
            await self._save()

    async def finish(self) -> None:
        """After the loop. Told to stop between two steps (a sync, an evaluation), the last one is not saved yet."""
        if self.stopping and self.saved_version != self.version:
            await self._save()

    async def _save(self) -> None:
        # One version a step: the next step to do has the number of the version.
        with self.timeline.span("trainer", "save", step=self.version - 1):
            await self.saver.save(self.version, self.version)
        self.saved_version = self.version


def generate_requests(prompts: Sequence[Prompt], samples: int, run_seed: int) -> list[GenerateRequest]:
    """One request a prompt, with the seed of each sample."""
    return [
        GenerateRequest(
            prompt_id=prompt.id,
            epoch=prompt.epoch,
            token_ids=prompt.token_ids,
            seeds=tuple(sample_seed(run_seed, prompt.id, index, prompt.epoch) for index in range(samples)),
        )
        for prompt in prompts
    ]
