"""The config that a run was started with, for the commands that take a run."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.config import Config, parse_config
from offbeat.errors import ConfigError
from offbeat.metrics.writer import CONFIG, RunFolder


def run_config(run: RunFolder, overrides: Sequence[str] = ()) -> Config:
    """With overrides, whose relative paths count as in the run's own file: from its folder.

    A run that was made before that folder was kept takes the current one. Raises `ConfigError` with every problem.
    """
    values, folder = run.read_config(), run.read_origin()
    try:
        config = parse_config(values, folder=folder)
    except ConfigError as error:
        raise ConfigError(
            *error.problems,
            f"{run.path / CONFIG} does not fit this version of offbeat: use the one that wrote it, or undo what was "
            "edited in it.",
        ) from error
    return parse_config(values, overrides, folder=folder) if overrides else config
