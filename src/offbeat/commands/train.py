"""`offbeat train`, `offbeat resume`, and `offbeat.run(config)` from Python.

Ctrl-C once: the step at hand is finished and saved; twice: ended now.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.aftermath import aftermath, command, saved, unevaluated
from offbeat.checkpoint import Checkpoint, CheckpointStore, changed_inputs
from offbeat.commands.run_config import run_config
from offbeat.config import Config, parse_config, read_toml
from offbeat.errors import ConfigError, RunError
from offbeat.host import require_host
from offbeat.line import lost_before
from offbeat.metrics.display import Display, make_display
from offbeat.metrics.writer import RunFolder
from offbeat.prepare import Prepared, prepare
from offbeat.saved_models import model_at_hand
from offbeat.training import RunResult, train_part


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
            'Put the call under: if __name__ == "__main__":'
        )
    return train(
        resolve(config, overrides, reward),
        name=name,
        origin=_origin(config),
        run_dir=None if run_dir is None else Path(run_dir),
        display=display or make_display(quiet=quiet),
    )


def _origin(config: Config | Mapping[str, Any] | Path | str) -> Path:
    """The folder that its relative paths count from."""
    return Path(config).resolve().parent if isinstance(config, str | Path) else Path.cwd()


def resolve(
    config: Config | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    reward: Callable[..., Any] | None = None,
) -> Config:
    """The config that a run would use. Raises `ConfigError`."""
    from offbeat.rewards.functions import function_spec

    if isinstance(config, str | Path):
        values = read_toml(Path(config))
    else:
        values = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
    if reward is not None:
        rewards = {function_spec(reward): 1.0}
        values = {**values, "data": [{**section, "rewards": rewards} for section in values.get("data", [])]}
    return parse_config(values, overrides, folder=_origin(config))


def train(config: Config, *, name: str, origin: Path, run_dir: Path | None, display: Display) -> RunResult:
    """A new run. `origin`: the folder that relative paths of the config were taken from."""
    prepared = prepare(config)
    require_host(config)
    with _told_of_files("begin"):
        folder = RunFolder.create(name, run_dir=run_dir)
        with folder.locked():
            folder.write_origin(origin)
            folder.write_config(prepared.config.model_dump(mode="json"))
            return _run(prepared, folder, display, checkpoint=None)


@contextlib.contextmanager
def _told_of_files(what: str) -> Generator[None]:
    """A full disk, or a folder that cannot be written, before the run's own errors are told of."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the run cannot {what}: {error}") from error


def resume(path: Path, overrides: Sequence[str], *, display: Display, step: int | None = None) -> RunResult:
    """Continue a run from its newest complete checkpoint, or that of `step`, with the config it was started with.

    Checkpoints after `step` are set aside by another name: what is trained now is another line.
    """
    with _told_of_files("be continued"):
        folder = RunFolder.open(path)
        with folder.locked():
            return _resume(folder, overrides, display, step)


def _resume(folder: RunFolder, overrides: Sequence[str], display: Display, step: int | None) -> RunResult:
    path = folder.path
    config = _resumed_config(folder, overrides, display)
    checkpoint = _start_of(CheckpointStore(folder.checkpoints), step, display)
    if checkpoint is None:
        raise ConfigError(
            f"{path} has no complete checkpoint to continue from; start it anew with offbeat train, and set "
            "checkpoint.every_steps to save on the way."
        )
    missing = unevaluated(folder, config.steps, [section.name for section in config.eval])
    if checkpoint.step == config.steps and missing:
        display.warn(
            f"all {config.steps} steps are done; what is missing is the last evaluation of {', '.join(missing)}"
        )
    elif checkpoint.step >= config.steps:
        raise ConfigError(
            f"{path} has done all its {config.steps} steps; continue with more: "
            f"{command('resume', path)} steps={config.steps * 2}."
        )
    prepared = prepare(config, at_hand=model_at_hand(config, checkpoint))
    require_host(config)
    prepared.prompts.check_unchanged(checkpoint.state.data, checkpoint.step)
    if changed := changed_inputs(checkpoint.state, prepared.inputs):
        names = ", ".join(_short(name) for name in changed)
        display.warn(f"changed since step {checkpoint.step}, and used as they are now: {names}")
    for sentence in lost_before(folder, checkpoint):
        display.warn(sentence)
    return _run(prepared, folder, display, checkpoint=checkpoint)


def _short(name: str) -> str:
    """A path in the current folder without it; anything else as it is."""
    return str(Path(name).relative_to(Path.cwd())) if Path(name).is_relative_to(Path.cwd()) else name


def _start_of(store: CheckpointStore, step: int | None, display: Display) -> Checkpoint | None:
    if step is not None:
        return store.at(step)
    checkpoint, skipped = store.latest()
    for sentence in skipped:
        display.warn(sentence)
    return checkpoint


def _resumed_config(folder: RunFolder, overrides: Sequence[str], display: Display) -> Config:
    """The run's config with overrides; what they change is said, and what makes another run of it is refused."""
    old, config = run_config(folder), run_config(folder, overrides)
    before, after = old.model_dump(mode="json"), config.model_dump(mode="json")
    changed = changed_keys(before, after)
    fixed = [key for key in changed if key in ("model", "revision", "init", "seed")]
    if fixed:
        raise ConfigError(
            *(
                f"{key} = {after[key]!r}: the run has {before[key]!r}, and its checkpoints go with that"
                for key in fixed
            ),
            "start a new run with offbeat train to change it.",
        )
    if changed:
        display.warn(f"resumed with other settings than before: {', '.join(changed)}")
    return config


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ; a list of sections is one key."""
    changed: list[str] = []
    for key in after:
        old, new = before.get(key), after[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += [f"{key}.{inner}" for inner in changed_keys(old, new)]
        elif old != new:
            changed.append(key)
    return changed


def _run(prepared: Prepared, folder: RunFolder, display: Display, checkpoint: Checkpoint | None) -> RunResult:
    """Raises `RunError`, and `KeyboardInterrupt` when it was told to end now."""
    steps = prepared.config.steps
    try:
        with aftermath(folder, steps=steps):
            return asyncio.run(train_part(prepared, folder, display, checkpoint))
    except asyncio.CancelledError:
        display.warn(f"ended at once; saved: {saved(folder, steps)}")
        raise KeyboardInterrupt from None
    finally:
        display.close()
