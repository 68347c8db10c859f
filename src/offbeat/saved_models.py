"""The models that runs have saved: which checkpoint is meant, whether it is whole, and where its model lies.

    runs/other                          a run: its newest complete checkpoint
    runs/other/checkpoints/step-40      that checkpoint
        trainer-0/model                 its model, a folder like any other: this path is what a config keeps

A checkpoint's files are compared with its completion record before its model is used for anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from offbeat.checkpoint import Checkpoint, CheckpointStore
from offbeat.config import Config
from offbeat.errors import ConfigError
from offbeat.metrics.writer import RunFolder, is_run_config

MODEL = Path("trainer-0") / "model"
_STEP = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model comes from."""

    run: Path
    step: int

    def __str__(self) -> str:
        here = Path.cwd()
        run = self.run.relative_to(here) if self.run.is_relative_to(here) else self.run
        return f"step {self.step} of {run}"


def model_folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.folder / MODEL


def origin_of(model: str) -> Origin | None:
    """Told from the path alone: `…/checkpoints/step-40/trainer-0/model`. None for any other model."""
    path = Path(model)
    if path.parts[-2:] != MODEL.parts or len(path.parts) < 5:
        return None
    checkpoint = path.parents[1]
    match = _STEP.match(checkpoint.name)
    if match is None or checkpoint.parent.name != "checkpoints":
        return None
    return Origin(checkpoint.parents[1], int(match[1]))


def choose_checkpoint(run: RunFolder, step: int | None = None) -> Checkpoint:
    """The checkpoint of a step, or the newest complete one. Raises `ConfigError` with the reason and what is there."""
    store = CheckpointStore(run.checkpoints)
    if step is not None:
        return store.at(step)
    checkpoint, skipped = store.latest()
    if checkpoint is None:
        reasons = f" ({'; '.join(skipped)})" if skipped else ""
        raise ConfigError(
            f"{run.path} has no complete checkpoint{reasons}: a run is saved at its end, and on the way if "
            "checkpoint.every_steps says so."
        )
    return checkpoint


def resolve_model(config: Config) -> Config:
    """The config with the model folder of a checkpoint in place of a run or a checkpoint that `model` names.

    Every other model stays as it is. Raises `ConfigError` that says why a run or checkpoint cannot be started from.
    """
    path = Path(config.model).expanduser()
    step = _checkpoint_step(path)
    if step is None and not _is_run(path):
        return config
    key = f"model = {config.model!r}"
    if config.init == "random":
        raise ConfigError(f'{key} is a saved state of a run, and init = "random" takes no weights; remove one of them.')
    run = RunFolder((path if step is None else path.parents[1]).resolve())
    try:
        checkpoint = choose_checkpoint(run, step)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return config.model_copy(update={"model": str(model_folder(checkpoint)), "revision": None})


def lineage(config: Config) -> tuple[str, str | None, tuple[Origin, ...]]:
    """The model that training began with, its revision, and the checkpoints of runs in between, newest first.

    A run in between that is not there any more ends the search: its checkpoint counts as the beginning.
    """
    model, revision = config.model, config.revision
    passed: list[Origin] = []
    while (origin := origin_of(model)) is not None and origin not in passed:
        try:
            values = RunFolder(origin.run).read_config()
            model, revision = str(values["model"]), values.get("revision")
        except (ConfigError, KeyError):
            break
        passed.append(origin)
    return model, revision, tuple(passed)


def model_at_hand(config: Config, checkpoint: Checkpoint) -> str | None:
    """For going on from a run's own checkpoint: its model folder, to be loaded in place of the model that the run
    began with, where that was another run's checkpoint and has been removed since (`checkpoint.keep_last`). None: the
    config's own is there."""
    if origin_of(config.model) is None or Path(config.model).is_dir():
        return None
    return str(model_folder(checkpoint))


def _checkpoint_step(path: Path) -> int | None:
    """Other frameworks name folders `checkpoints/step-100`, too: a model that lies there is a model like any other."""
    path = path.absolute()
    match = _STEP.match(path.name)
    if match is None or path.parent.name != "checkpoints" or not path.is_dir():
        return None
    ours = (path / "complete.json").is_file() or (path / MODEL.parts[0]).is_dir()
    return int(match[1]) if ours or not (path / "config.json").is_file() else None


def _is_run(path: Path) -> bool:
    try:
        return is_run_config(RunFolder(path).read_config())
    except ConfigError:
        return False
