"""A whole run from Python: `offbeat.run(config)`; the commands call the same functions.

    prepare ─ start processes ─ (load a checkpoint | supervised warm-up) ─ loop ─ last words

Whatever ends a run, the processes have ended before these functions return. Ctrl-C once: the step at hand is finished
and saved; twice: ended now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.aftermath import aftermath, command, saved
from offbeat.build import Prepared, System, prepare, start
from offbeat.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from offbeat.config import Config, load_config, parse_config, read_toml
from offbeat.data.prompts import DataPosition
from offbeat.errors import ConfigError, RunError
from offbeat.evaluate import EvalResult, evaluate
from offbeat.host import require_host
from offbeat.interrupt import Interrupt
from offbeat.loops import Stages
from offbeat.loops.on_policy import on_policy
from offbeat.loops.one_step import one_step
from offbeat.metrics.display import Display, make_display
from offbeat.metrics.spans import Timeline
from offbeat.metrics.status import Activity, Header, batch_arithmetic
from offbeat.metrics.summary import Summary
from offbeat.metrics.writer import RunFolder, metrics_file, read_metrics, samples_file
from offbeat.recording import RunEvaluations, RunRecorder, RunSaver
from offbeat.stages import RunStages, Sampled
from offbeat.supervision import unless_a_worker_dies

ACTIVITY_S = 0.25


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
    """True when the run was told to stop before its last step."""


def run(
    config: Config | Mapping[str, Any] | Path | str,
    *overrides: str,
    reward: Callable[..., Any] | None = None,
    run_dir: Path | str | None = None,
    quiet: bool = False,
    display: Display | None = None,
) -> RunResult:
    """Train; returns when the run has ended.

    Args:
        config: a `Config`, the plain values of one, or the path of a TOML file.
        overrides: `"trainer.lr=1e-5"`, as on the command line.
        reward: a top-level function of a file, used by every `[[data]]` source in place of its `rewards`.
        run_dir: default `runs/<name>-<time>`.
        quiet: show results and warnings only.
        display: what is shown, in place of the terminal's; `SilentDisplay()` shows nothing.

    Raises:
        ConfigError: before any process was started.
        RunError: the run failed.
    """
    name = Path(config).stem if isinstance(config, str | Path) else "run"
    if os.environ.get("OFFBEAT_PROCESS"):
        raise ConfigError(
            "offbeat.run was called inside a worker of a run: a script that holds a reward function is imported there. "
            'Put the call under `if __name__ == "__main__":`.'
        )
    folder = None if run_dir is None else Path(run_dir)
    shown = display or make_display(quiet=quiet)
    return train(resolve(config, overrides, reward), name=name, run_dir=folder, display=shown)


def resolve(
    config: Config | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    reward: Callable[..., Any] | None = None,
) -> Config:
    """The config that a run would use. Raises `ConfigError`."""
    from offbeat.rewards.functions import function_spec

    if isinstance(config, str | Path):
        values, folder = read_toml(Path(config)), Path(config).resolve().parent
    else:
        values = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
        folder = Path.cwd()
    if reward is not None:
        rewards = {function_spec(reward): 1.0}
        values = {**values, "data": [{**section, "rewards": rewards} for section in values.get("data", [])]}
    return parse_config(values, overrides, folder=folder)


def train(config: Config, *, name: str, run_dir: Path | None, display: Display) -> RunResult:
    """A new run."""
    prepared = prepare(config)
    require_host(config)
    folder = RunFolder.create(name, run_dir=run_dir)
    with folder.locked():
        folder.write_config(prepared.config.model_dump(mode="json"))
        return _run(prepared, folder, display, checkpoint=None)


def resume(path: Path, overrides: Sequence[str], *, display: Display) -> RunResult:
    """Continue a run from its newest complete checkpoint, with the config that it was started with."""
    folder = RunFolder.open(path)
    with folder.locked():
        return _resume(folder, overrides, display)


def _resume(folder: RunFolder, overrides: Sequence[str], display: Display) -> RunResult:
    path = folder.path
    config = _resumed_config(folder, overrides, display)
    checkpoint, skipped = CheckpointStore(folder.checkpoints, keep_last=config.checkpoint.keep_last).latest()
    for sentence in skipped:
        display.warn(sentence)
    if checkpoint is None:
        raise ConfigError(
            f"{path} has no complete checkpoint to continue from; start it anew with `offbeat train`, and set "
            "checkpoint.every_steps to save on the way."
        )
    if checkpoint.step >= config.steps:
        raise ConfigError(
            f"{path} has done all its {config.steps} steps; continue with more: "
            f"{command('resume', path)} steps={config.steps * 2}."
        )
    prepared = prepare(config)
    require_host(config)
    prepared.prompts.check_position(DataPosition(checkpoint.step, checkpoint.state.data))
    return _run(prepared, folder, display, checkpoint=checkpoint)


def _resumed_config(folder: RunFolder, overrides: Sequence[str], display: Display) -> Config:
    """The run's config with overrides; what they change is said, and what makes another run of it is refused."""
    old = parse_config(folder.read_config())
    config = parse_config(folder.read_config(), overrides)
    before, after = old.model_dump(mode="json"), config.model_dump(mode="json")
    changed = [key for key in after if after[key] != before[key]]
    fixed = [key for key in changed if key in ("model", "revision", "init", "seed")]
    if fixed:
        raise ConfigError(
            *(
                f"{key} = {after[key]!r}: the run has {before[key]!r}, and its checkpoints go with that"
                for key in fixed
            ),
            "start a new run with `offbeat train` to change it.",
        )
    if changed:
        display.warn(f"resumed with other settings than before: {', '.join(changed)}")
    return config


def evaluate_only(
    target: Path, overrides: Sequence[str], *, step: int | None, display: Display
) -> tuple[EvalResult, ...]:
    """The [[eval]] sets of a config's model, or of a run's checkpoint. Writes into no run; keeps logs if it fails."""
    checkpoint = None
    if target.is_dir():
        folder = RunFolder.open(target)
        config = parse_config(folder.read_config(), overrides)
        checkpoint = _checkpoint_of(folder, config, step)
    elif step is not None:
        raise ConfigError(f"--step {step} is for the folder of a run, and {target} is none; leave it out.")
    elif not target.exists():
        raise ConfigError(f"{target}: no such file or folder; give a TOML file, or the folder of a run.")
    else:
        config = load_config(target, overrides)
    if not config.eval:
        raise ConfigError(f"{target} has no [[eval]] set; add one with a name and a source.")
    prepared = prepare(config)
    require_host(config)
    logs = RunFolder(Path(tempfile.mkdtemp(prefix="offbeat-eval-")))
    logs.logs.mkdir()
    with aftermath(logs):
        try:
            results = asyncio.run(_evaluate(prepared, logs, checkpoint, display))
        except (asyncio.CancelledError, KeyboardInterrupt):
            shutil.rmtree(logs.path, ignore_errors=True)
            raise KeyboardInterrupt from None
        finally:
            display.close()
    shutil.rmtree(logs.path, ignore_errors=True)
    return results


def _checkpoint_of(folder: RunFolder, config: Config, step: int | None) -> Checkpoint:
    if step is not None:
        try:
            return open_checkpoint(folder.checkpoints / f"step-{step}")
        except RunError as error:
            there = sorted(int(p.name[5:]) for p in folder.checkpoints.glob("step-*") if p.name[5:].isdigit())
            if step not in there:
                raise ConfigError(
                    f"there is no checkpoint of step {step} in {folder.path}; saved are {there}."
                ) from error
            raise ConfigError(f"the checkpoint of step {step} cannot be used: {error}; saved are {there}.") from error
    checkpoint, _ = CheckpointStore(folder.checkpoints, keep_last=config.checkpoint.keep_last).latest()
    if checkpoint is None:
        raise ConfigError(f"{folder.path} has no complete checkpoint to evaluate.")
    return checkpoint


async def _evaluate(
    prepared: Prepared, logs: RunFolder, checkpoint: Checkpoint | None, display: Display
) -> tuple[EvalResult, ...]:
    with Interrupt(asyncio.current_task(), display.warn).installed():
        display.begin(header(prepared))
        display.phase("starting processes")
        async with start(prepared, logs) as system:

            async def main() -> tuple[EvalResult, ...]:
                version = 0
                if checkpoint is not None:
                    await system.trainer.load(str(checkpoint.folder / "trainer-0"))
                    version = checkpoint.state.weights_version
                elif prepared.warmup is not None:
                    display.warn("the supervised warm-up is not run: this evaluates the model as it is given")
                display.phase("first weight sync")
                await system.weights.sync(version)
                results = await evaluate(
                    prepared.eval_sets,
                    system.engine,
                    system.reward,
                    step=version,
                    version=version,
                    run_seed=prepared.config.seed,
                )
                for result in results:
                    display.evaluation(result)
                return tuple(results)

            async with _activity(system, display):
                return await unless_a_worker_dies(main(), system.workers)


# --- a training run -----------------------------------------------------------------------------------------------


def _run(prepared: Prepared, folder: RunFolder, display: Display, checkpoint: Checkpoint | None) -> RunResult:
    """Raises `RunError`, and `KeyboardInterrupt` when it was told to end now."""
    steps = prepared.config.steps
    try:
        with aftermath(folder, steps=steps):
            return asyncio.run(_train(prepared, folder, display, checkpoint))
    except asyncio.CancelledError:
        display.warn(f"ended at once; saved: {saved(folder, steps)}")
        raise KeyboardInterrupt from None
    finally:
        display.close()


async def _train(prepared: Prepared, folder: RunFolder, display: Display, checkpoint: Checkpoint | None) -> RunResult:
    first = checkpoint.step if checkpoint else 0
    started_s = time.monotonic()
    recorded = read_metrics(folder) if first else []
    history = [record for record in recorded if record["step"] < first]
    # A line that is written anew held these points: they are measured again.
    again = any(record["step"] == first and any(key.startswith("eval/") for key in record) for record in recorded)
    interrupt = Interrupt(asyncio.current_task(), display.warn)
    with (
        interrupt.installed(),
        metrics_file(folder, next_step=first) as metrics,
        samples_file(folder, next_step=first) as samples,
    ):
        display.begin(header(prepared), history)
        display.phase("starting processes")
        async with start(prepared, folder) as system:
            timeline = Timeline()
            recorder = RunRecorder(metrics, samples, display, timeline, updates_at={}, history=history)
            stages = _stages(prepared, system, folder, recorder, checkpoint, evaluate_first=again, started_s=started_s)

            async def main() -> None:
                await _bring_to_start(prepared, system, checkpoint, display, recorder)
                folder.write_config(prepared.config.model_dump(mode="json"))
                interrupt.finish = stages.stop
                display.phase("first weight sync")
                timeline.begin()
                match prepared.config.max_staleness:
                    case 0:
                        await on_policy(stages)
                    case 1:
                        await one_step(stages)
                await stages.finish()

            async with _activity(system, display):
                await unless_a_worker_dies(main(), system.workers)
            recorder.finish(stages.version, stages.version)
            return _result(prepared, folder, stages, recorder, display)


def _stages(
    prepared: Prepared,
    system: System,
    folder: RunFolder,
    recorder: RunRecorder,
    checkpoint: Checkpoint | None,
    *,
    evaluate_first: bool,
    started_s: float,
) -> RunStages:
    config = prepared.config
    first, version = (checkpoint.step, checkpoint.state.weights_version) if checkpoint else (0, 0)
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
            also_at=frozenset({version}) if evaluate_first else frozenset(),
        ),
        saver=RunSaver(
            config,
            CheckpointStore(folder.checkpoints, keep_last=config.checkpoint.keep_last),
            system.trainer,
            write_tokenizer=lambda path: prepared.tokenizer.save_pretrained(str(path)),
            data=prepared.prompts.fingerprint(),
            started_s=started_s,
            elapsed_before_s=checkpoint.state.elapsed_s if checkpoint else 0.0,
        ),
        recorder=recorder,
        timeline=recorder.timeline,
        remaining=range(first, config.steps),
        version=version,
    )


async def _bring_to_start(
    prepared: Prepared, system: System, checkpoint: Checkpoint | None, display: Display, recorder: RunRecorder
) -> None:
    """The trainer's weights as they are before the first step: a checkpoint's, or warmed up, or the model's own."""
    if checkpoint is not None:
        display.phase(f"loading {checkpoint.folder.name}")
        await system.trainer.load(str(checkpoint.folder / "trainer-0"))
    elif prepared.warmup is not None and prepared.config.warmup is not None:
        section = prepared.config.warmup
        for step in range(section.steps):
            samples = prepared.warmup.batch(step)
            result = await system.trainer.supervise(samples, section.lr, last=step == section.steps - 1)
            display.phase("warm-up", step + 1, section.steps, f"loss {result.metrics['loss']:.3f}")
    description = await system.trainer.describe()
    expected = checkpoint.state.weights_version if checkpoint else 0
    if description.weights_version != expected:
        raise RunError(f"the trainer is at version {description.weights_version}, the checkpoint at {expected}")
    recorder.updates_at[expected] = description.optimizer_updates


@contextlib.asynccontextmanager
async def _activity(system: System, display: Display) -> AsyncGenerator[None]:
    """Tells the display what goes on, from the workers' heartbeats."""

    async def tell() -> None:
        while True:
            busy = [worker for worker in system.engine_workers if worker.pending_calls]
            trainer = system.trainer_worker
            display.activity(
                Activity(
                    tokens=round(sum(w.progress.counters.get("tokens", 0) for w in busy)) if busy else None,
                    note=f"training: {trainer.progress.note}" if trainer.pending_calls else "",
                )
            )
            await asyncio.sleep(ACTIVITY_S)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _result(
    prepared: Prepared, folder: RunFolder, stages: RunStages, recorder: RunRecorder, display: Display
) -> RunResult:
    config = prepared.config
    interrupted = stages.stopping and stages.version < config.steps
    saver = stages.saver
    assert isinstance(saver, RunSaver)
    outcome = f"interrupted after {stages.version} of {config.steps} steps, saved" if interrupted else "done"
    display.finish(
        Summary(
            outcome=outcome,
            history=recorder.history,
            evaluations=recorder.evaluations,
            model=saver.saved / "trainer-0" / "model" if saver.saved else None,
            elapsed_s=saver.elapsed_before_s + time.monotonic() - saver.started_s,
            folder=folder.path,
            commands=[("continue", command("resume", folder.path))]
            if interrupted
            else [("evaluate", command("eval", folder.path))],
        )
    )
    return RunResult(
        folder=folder.path,
        history=tuple(recorder.history),
        evaluations=tuple(recorder.evaluations),
        checkpoint=saver.saved,
        interrupted=interrupted,
    )


def header(prepared: Prepared) -> Header:
    """What is known before anything starts."""
    config = prepared.config
    arithmetic = batch_arithmetic(
        prompts=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        updates=config.updates_per_step,
        epochs=config.epochs_per_batch,
        max_staleness=config.max_staleness,
    )
    dropped = sum(source.dropped for source in prepared.prompts.sources)
    epoch = prepared.prompts.rows / config.prompts_per_step
    rows = (
        ("model", f"{Path(config.model).name} · {prepared.model.model_type} · init {config.init}"),
        ("engines", f"{config.rollout.replicas} × {config.rollout.engine} · {config.engine_dtype}"),
        ("data", f"{prepared.prompts.rows:,} rows · {dropped} too long · {epoch:.0f} steps per epoch"),
        ("batch", arithmetic),
    )
    return Header(title=Path(config.model).name, rows=rows, steps=config.steps)


_: type[Stages[Sampled]] = RunStages  # the loops' contract, checked by the type checker
