"""`offbeat track RUN`: sends to the run's trackers what they have not had yet, from metrics.jsonl.

A tracker that has everything is not opened. The others are told how the run ended, which trackers.json has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from offbeat.commands.run_config import run_config
from offbeat.errors import ConfigError, RunError
from offbeat.metrics.writer import RunFolder, read_metrics
from offbeat.trackers import Trackers, require_trackers
from offbeat.trackers.state import ProgressFile

SEND_S = 600.0


def track(path: Path, *, say: Callable[[str], None]) -> None:
    """Steps that a tracker has are not sent again. Raises `ConfigError`, and `RunError` when something is missing."""
    folder = RunFolder.open(path)
    with folder.locked():
        config = run_config(folder)
        if not config.trackers:
            raise ConfigError(f"{path}: the run has no trackers; add [[trackers]] to its config before it is started.")
        records = read_metrics(folder)
        file = ProgressFile(folder.path)
        missing = {s.kind for s in config.trackers if any(file.read(s.kind).wants(record) for record in records)}
        require_trackers(config, only=missing)
        problems: list[str] = []
        if missing:
            next_step = records[-1]["step"] + 1
            trackers = Trackers(config, folder.path, next_step=next_step, history=records, only=missing)
            problems = asyncio.run(trackers.finish(file.outcome or trackers.status, SEND_S))
    if file.problem is not None:
        say(file.problem)
    if problems := [problem for problem in problems if problem != file.problem]:
        raise RunError("\n".join(problems))
    say(f"{len(records)} records are with {', '.join(section.kind for section in config.trackers)}")
