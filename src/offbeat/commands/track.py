"""`offbeat track RUN`: sends to the run's trackers what they have not had yet, from metrics.jsonl."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from offbeat.commands.run_config import run_config
from offbeat.errors import ConfigError, RunError
from offbeat.metrics.writer import RunFolder, read_metrics
from offbeat.trackers import require_trackers, tracking

SEND_S = 600.0


def track(path: Path, *, say: Callable[[str], None]) -> None:
    """Steps that a tracker has are not sent again. Raises `ConfigError`, and `RunError` when something is missing."""
    folder = RunFolder.open(path)
    with folder.locked():
        config = run_config(folder)
        if not config.trackers:
            raise ConfigError(f"{path}: the run has no trackers; add [[trackers]] to its config before it is started.")
        require_trackers(config)
        records = read_metrics(folder)
        problems: list[str] = []

        async def send() -> None:
            tracked = tracking(
                config,
                folder.path,
                next_step=records[-1]["step"] + 1 if records else 0,
                history=records,
                warn=problems.append,
                finish_s=SEND_S,
            )
            async with tracked:
                pass

        asyncio.run(send())
    if problems:
        raise RunError("\n".join(problems))
    say(f"{len(records)} records are with {', '.join(section.kind for section in config.trackers)}")
