"""One part of a training run, from the start of its processes to its last words.

    start processes ─ (load a checkpoint | supervised warm-up) ─ loop ─ result

Whatever ends it, the processes have ended before `train_part` returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.aftermath import command
from offbeat.build import System, start
from offbeat.checkpoint import Checkpoint, CheckpointStore
from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.evaluate import EvalResult
from offbeat.interrupt import Interrupt
from offbeat.line import Line, open_line
from offbeat.loops import Stages
from offbeat.loops.on_policy import on_policy
from offbeat.loops.one_step import one_step
from offbeat.metrics.display import Display
from offbeat.metrics.evaluation import evaluated_at
from offbeat.metrics.spans import Timeline
from offbeat.metrics.summary import Summary
from offbeat.metrics.trace import trace_file
from offbeat.metrics.writer import RunFolder, read_metrics
from offbeat.prepare import Prepared
from offbeat.recording import RunEvaluations, RunRecorder, RunSaver
from offbeat.showing import activity, header
from offbeat.stages import RunStages, Sampled
from offbeat.supervision import unless_a_worker_dies
from offbeat.trackers import Trackers, tracking


@dataclass(frozen=True)
class RunResult:
    """What a run gives back."""

    folder: Path
    history: tuple[Mapping[str, Any], ...]
    """The records of metrics.jsonl, one a step."""
    evaluations: tuple[EvalResult, ...]
    checkpoint: Path | None
    """The newest checkpoint."""
    interrupted: bool
    """True when the run was told to stop before its last step, or before the evaluation after it."""


async def train_part(
    prepared: Prepared, folder: RunFolder, display: Display, checkpoint: Checkpoint | None
) -> RunResult:
    """From step 0, or from a checkpoint, to the last step or the first interrupt."""
    part = _Part.of(prepared, folder, display, checkpoint)
    interrupt = Interrupt(asyncio.current_task(), display.warn)
    with interrupt.installed(), ExitStack() as files, trace_file(folder) as trace:
        timeline = Timeline(heard=trace.add)
        display.begin(header(prepared), part.history)
        display.phase("starting processes")
        async with (
            tracking(
                prepared.config,
                folder.path,
                next_step=part.first,
                history=part.history,
                warn=display.warn,
                another_line=any(step > part.first for step in CheckpointStore(folder.checkpoints).steps()),
            ) as trackers,
            start(prepared, folder, timeline) as system,
        ):

            async def main() -> tuple[RunStages, RunRecorder, RunSaver]:
                updates = await _bring_to_start(prepared, system, checkpoint, display, timeline)
                line = files.enter_context(
                    open_line(folder, checkpoint, display.warn, max_staleness=prepared.config.max_staleness)
                )
                recorder = part.recorder(line, trackers, timeline, updates)
                saver = part.saver(system, line, recorder)
                stages = part.stages(system, line, recorder, saver)
                folder.write_config(prepared.config.model_dump(mode="json"))
                await _loop(stages, interrupt, display)
                return stages, recorder, saver

            async with activity(system, display):
                stages, recorder, saver = await unless_a_worker_dies(main(), system.workers)
            recorder.finish(stages.version, stages.version)
            return part.result(stages, recorder, saver)


async def _loop(stages: RunStages, interrupt: Interrupt, display: Display) -> None:
    interrupt.finish = stages.stop
    display.phase("first weight sync")
    stages.timeline.begin()
    match stages.config.max_staleness:
        case 0:
            await on_policy(stages)
        case 1:
            await one_step(stages)
    await stages.finish()
    interrupt.finish = None  # no step is at hand any more


@dataclass(frozen=True)
class _Part:
    """What a part of a run begins with."""

    prepared: Prepared
    folder: RunFolder
    display: Display
    checkpoint: Checkpoint | None
    history: list[dict[str, Any]]
    """The records of the steps before it."""
    again: frozenset[str]
    """Held-out sets that a line of metrics.jsonl held which is written anew: they are measured again."""
    started_s: float

    @classmethod
    def of(cls, prepared: Prepared, folder: RunFolder, display: Display, checkpoint: Checkpoint | None) -> _Part:
        first = checkpoint.step if checkpoint else 0
        recorded = read_metrics(folder) if first and folder.metrics.is_file() else []
        history = [record for record in recorded if record["step"] < first]
        again = evaluated_at(first, recorded)
        return cls(prepared, folder, display, checkpoint, history, again, started_s=time.monotonic())

    @property
    def first(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    def recorder(self, line: Line, trackers: Trackers, timeline: Timeline, updates_at: dict[int, int]) -> RunRecorder:
        return RunRecorder(line.metrics, line.samples, self.display, timeline, updates_at, self.history, trackers)

    def stages(self, system: System, line: Line, recorder: RunRecorder, saver: RunSaver) -> RunStages:
        prepared, config = self.prepared, self.prepared.config
        version = self.checkpoint.state.weights_version if self.checkpoint else 0
        return RunStages(
            config=config,
            sampling=prepared.sampling,
            prompts=prepared.prompts,
            engine=system.engine,
            reward=system.reward,
            trainer=system.trainer,
            weights=system.weights,
            evaluations=RunEvaluations(
                config,
                prepared.eval_sets,
                system.engine,
                system.reward,
                recorder,
                also={version: self.again},
            ),
            saver=saver,
            recorder=recorder,
            journal=line.journal,
            timeline=recorder.timeline,
            remaining=range(self.first, config.steps),
            version=version,
            saved_version=version if self.checkpoint else -1,
        )

    def saver(self, system: System, line: Line, recorder: RunRecorder) -> RunSaver:
        prepared, checkpoint = self.prepared, self.checkpoint
        return RunSaver(
            prepared.config,
            CheckpointStore(self.folder.checkpoints),
            system.trainer,
            write_tokenizer=lambda path: prepared.tokenizer.save_pretrained(str(path)),
            journal=line.journal,
            history=self.history,
            data=prepared.prompts.fingerprint(),
            inputs=prepared.inputs,
            started_s=self.started_s,
            elapsed_before_s=checkpoint.state.elapsed_s if checkpoint else 0.0,
            saved=checkpoint.folder if checkpoint else None,
            sync_lines=recorder.sync,
            parity=lambda: system.weights.probes.baseline,
            warn=self.display.warn,
        )

    def result(self, stages: RunStages, recorder: RunRecorder, saver: RunSaver) -> RunResult:
        config = self.prepared.config
        interrupted = stages.stopping and not stages.done
        where = (
            f"after {stages.version} of {config.steps} steps"
            if stages.version < config.steps
            else "before the last evaluation"
        )
        self.display.finish(
            Summary(
                outcome=f"interrupted {where}, saved" if interrupted else "done",
                history=self.history,
                evaluations=recorder.evaluations,
                model=saver.saved / "trainer-0" / "model" if saver.saved else None,
                elapsed_s=saver.elapsed_before_s + time.monotonic() - saver.started_s,
                folder=self.folder.path,
                commands=next_commands(config, self.folder.path, interrupted=interrupted),
            )
        )
        return RunResult(
            folder=self.folder.path,
            history=tuple(self.history),
            evaluations=tuple(recorder.evaluations),
            checkpoint=saver.saved,
            interrupted=interrupted,
        )


async def _bring_to_start(
    prepared: Prepared, system: System, checkpoint: Checkpoint | None, display: Display, timeline: Timeline
) -> dict[int, int]:
    """The trainer's weights as they are before the first step: a checkpoint's, or warmed up, or the model's own.

    Returns weights version → optimizer updates, of that one version.
    """
    if checkpoint is not None:
        display.phase(f"loading {checkpoint.folder.name}")
        with timeline.span("trainer", "load", category="start"):
            await system.trainer.load(str(checkpoint.folder / "trainer-0"))
        system.weights.probes.baseline = checkpoint.state.parity
    elif prepared.warmup is not None:
        with timeline.span("trainer", "warmup"):
            await warm_up(prepared, system, display)
    description = await system.trainer.describe()
    expected = checkpoint.state.weights_version if checkpoint else 0
    if description.weights_version != expected:
        raise RunError(f"the trainer is at version {description.weights_version}, the checkpoint at {expected}")
    return {expected: description.optimizer_updates}


async def warm_up(prepared: Prepared, system: System, display: Display) -> None:
    """The supervised steps of `[warmup]`, if the config has any: what every new run begins with."""
    section = prepared.config.warmup
    if prepared.warmup is None or section is None:
        return
    for step in range(section.steps):
        samples = prepared.warmup.batch(step)
        result = await system.trainer.supervise(samples, section.lr, last=step == section.steps - 1)
        display.phase("warm-up", step + 1, section.steps, f"loss {result.metrics['loss']:.3f}")


def next_commands(config: Config, run: Path, *, interrupted: bool) -> list[tuple[str, str]]:
    """What one may do with a run that has ended: only what works. Without [[eval]] there is nothing to evaluate."""
    found = [("look at it", command("report", run))]
    if interrupted:
        return [("continue", command("resume", run)), *found]
    return [("evaluate", command("eval", run)), *found] if config.eval else found


_: type[Stages[Sampled]] = RunStages  # the loops' contract, checked by the type checker
