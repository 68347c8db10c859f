"""What a run leaves behind while it goes: metrics, samples, checkpoints, evaluation points.

These are the listeners of `RunStages`: they write and show, and never change what is trained.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat import staleness
from offbeat.checkpoint import Checkpoint, CheckpointStore, Retention, State
from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.evaluate import EvalResult, EvalSet, evaluate
from offbeat.journal import Journal
from offbeat.metrics import best
from offbeat.metrics.display import Display
from offbeat.metrics.records import evaluation_record, step_record
from offbeat.metrics.samples import sample_objects
from offbeat.metrics.spans import Timeline
from offbeat.metrics.writer import JsonLines
from offbeat.ports import Engine, Reward, SyncReport, Trainer
from offbeat.stages import Trained
from offbeat.trackers import Trackers
from offbeat.types import Batch, Scored
from offbeat.weights.parity import Baseline


@dataclass
class RunRecorder:
    """One line of metrics.jsonl a step, one of samples.jsonl a sample."""

    metrics: JsonLines
    samples: JsonLines
    display: Display
    timeline: Timeline
    updates_at: dict[int, int]
    """Weights version → optimizer updates done when it was published."""
    history: list[dict[str, Any]]
    trackers: Trackers
    evaluations: list[EvalResult] = field(default_factory=list[EvalResult])
    _sync: SyncReport | None = None
    _pending: list[EvalResult] = field(default_factory=list[EvalResult])

    def synced(self, report: SyncReport) -> None:
        self._sync = report

    def evaluated(self, result: EvalResult) -> None:
        self.evaluations.append(result)
        self._pending.append(result)
        self.display.evaluation(result)

    def scored(self, eval_set: EvalSet, scored: list[Scored], version: int) -> None:
        self.samples.write_all(sample_objects(version, scored, evaluation=eval_set.name))

    def trained(self, trained: Trained) -> None:
        updates = trained.update.optimizer_updates
        record = step_record(
            step=trained.step,
            version=trained.version,
            scored=trained.scored,
            batch=trained.batch,
            update=trained.update,
            window=self.timeline.window(trained.step),
            sync=self._sync,
            staleness=staleness.staleness_range(trained.scored, trained.version),
            updates_behind_max=staleness.updates_behind_max(trained.scored, self.updates_at, updates),
            evaluations=self._pending,
        )
        self.updates_at[trained.update.weights_version] = updates
        self._sync, self._pending = None, []
        samples = sample_objects(trained.step, trained.scored, _advantages(trained))
        self._record(record, samples)
        self.history.append(record)
        self.display.step(record)

    def sync(self) -> None:
        """Returns when every line so far is safe on the disk."""
        self.metrics.sync()
        self.samples.sync()

    def finish(self, step: int, version: int) -> None:
        """The evaluation after the last step has a line of its own: no step's record could hold it."""
        if self._pending:
            self._record(evaluation_record(step, version, self._pending, self.timeline.window(step)), [])
            self._pending = []

    def _record(self, record: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        self.metrics.write(record)
        self.samples.write_all(samples)
        self.trackers.recorded(record, samples)
        for text in self.trackers.words():
            self.display.warn(text)


def _advantages(trained: Trained) -> list[float | None]:
    """Each sample's advantage, None for those of groups without spread. Arrays are shared, so identity tells."""
    known = {id(sample.token_ids): _first(sample.advantages) for sample in _one_pass(trained.batch)}
    return [known.get(id(scored.rollout.token_ids)) for scored in trained.scored]


def _one_pass(batch: Batch) -> list[Any]:
    return [sample for minibatch in batch.minibatches for sample in minibatch.samples]


def _first(values: Any) -> float | None:
    return float(values[0]) if len(values) else None


@dataclass
class RunEvaluations:
    """Decides which sets are due at a version, and runs them."""

    config: Config
    sets: Sequence[EvalSet]
    engine: Engine
    reward: Reward
    recorder: RunRecorder
    also: Mapping[int, Collection[str]] = field(default_factory=dict[int, "Collection[str]"])
    """Version → sets that are due there, whatever their `every_steps` says."""

    def due(self, version: int) -> bool:
        return bool(self._due(version))

    def _due(self, version: int) -> list[EvalSet]:
        every = {section.name: section.every_steps for section in self.config.eval}
        ends, also = version in (0, self.config.steps), self.also.get(version, ())
        return [s for s in self.sets if ends or s.name in also or (every[s.name] and version % every[s.name] == 0)]

    async def run(self, version: int) -> None:
        results = await evaluate(
            self._due(version),
            self.engine,
            self.reward,
            step=version,
            version=version,
            run_seed=self.config.seed,
            begins=lambda eval_set: self.recorder.display.phase(f"evaluating {eval_set}", total=eval_set.samples),
            seen=lambda eval_set, scored: self.recorder.scored(eval_set, scored, version),
        )
        for result in results:
            self.recorder.evaluated(result)


@dataclass
class RunSaver:
    """Saves at the end of a step: the trainer writes its part, the controller completes."""

    config: Config
    store: CheckpointStore
    trainer: Trainer
    write_tokenizer: Callable[[Path], object]
    """Puts the tokenizer beside the saved model, so that the folder is one that transformers can use."""
    journal: Journal
    history: Sequence[Mapping[str, Any]]
    """The records so far: which checkpoint is the best."""
    data: str
    inputs: Mapping[str, str]
    started_s: float
    elapsed_before_s: float = 0.0
    saved: Path | None = None
    sync_lines: Callable[[], None] = lambda: None
    """Makes metrics and samples safe on the disk: a resume takes for granted those of all steps before a checkpoint."""
    parity: Callable[[], Baseline | None] = lambda: None
    """What parity probes are held against now."""
    warn: Callable[[str], None] = lambda text: None
    slow_s: float = 30.0
    """A save that takes longer is told of, so that nobody takes the run for dead."""

    def due(self, next_step: int) -> bool:
        every = self.config.checkpoint.every_steps
        return next_step == self.config.steps or (every > 0 and next_step % every == 0)

    async def save(self, next_step: int, version: int) -> None:
        """The checkpoint is there when this returns.

        Raises:
            RunError: nothing of it is left, and earlier ones are untouched.
            OSError: it is there, and the journal could not be written.
        """
        writing: Path | None = None
        telling = asyncio.get_running_loop().call_later(
            self.slow_s,
            self.warn,
            f"the checkpoint of step {next_step} is still being saved after {self.slow_s:g} s: the run waits for the "
            f"disk of {self.store.folder}",
        )
        try:
            writing = await asyncio.to_thread(self.store.begin, next_step)
            self.saved = (await self._write(writing, next_step, version)).folder
        except Exception as error:  # whatever it is, half a checkpoint is no use
            if writing is not None:  # a full disk is freed again
                await asyncio.to_thread(shutil.rmtree, writing, ignore_errors=True)
            if isinstance(error, OSError):
                raise RunError(f"checkpoint of step {next_step} cannot be saved: {error}") from error
            raise
        finally:
            telling.cancel()
        self.journal.saved(next_step)
        try:
            await asyncio.to_thread(self._prune)
        except OSError as error:
            self.warn(
                f"an old checkpoint cannot be removed: {error}. It takes room on the disk, and does no harm else."
            )

    async def _write(self, writing: Path, next_step: int, version: int) -> Checkpoint:
        rank = writing / "trainer-0"
        rank.mkdir()
        await self.trainer.save(str(rank))
        await asyncio.to_thread(self.write_tokenizer, rank / "model")
        await asyncio.to_thread(self.sync_lines)
        state = State(
            next_step=next_step,
            weights_version=version,
            seed=self.config.seed,
            data=self.data,
            elapsed_s=self.elapsed_before_s + time.monotonic() - self.started_s,
            journal=self.journal.mark(),
            inputs=dict(self.inputs),
            parity=self.parity(),
        )
        return await asyncio.to_thread(self.store.commit, writing, state)

    def _prune(self) -> None:
        section = self.config.checkpoint
        values = {} if section.best is None else best.scores(self.history, section.best)
        self.store.prune(Retention(section.keep_last, section.keep_every), values)
