"""trackio: on this machine (`TRACKIO_DIR` says where), on a server, or in a Hugging Face Space.

A run is known by its name. trackio only adds, so steps that a resumed run does again keep the values that were logged
first. It writes in the background twice a second: what a killed controller logged in that time is lost there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.trackers.tracker import COLUMNS, Metrics, Opened, Outcome, Row, TrackedRun, cells


class Trackio:
    def __init__(self, *, url: str | None, options: Mapping[str, Any]) -> None:
        quiet = {"auto_log_gpu": False, "auto_log_cpu": False}  # else on, where psutil happens to be installed
        self._options = {**quiet, **({"server_url": url} if url else {}), **options}
        self._step = 0

    def start(self, run: TrackedRun) -> Opened:
        trackio: Any = importlib.import_module("trackio")
        self._table = trackio.Table
        name: str = run.state.get("name", run.name)
        self._run = trackio.init(
            project=run.project,
            name=name,
            config=dict(run.config),
            resume="allow" if run.state else "never",
            embed=False,
            **self._options,
        )
        self._step = run.delivered
        return Opened(run.delivered, state={"name": name})

    def log(self, step: int, metrics: Metrics) -> None:
        self._step = step
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._run.log({"samples": self._table(columns=list(COLUMNS), data=cells(rows))}, step=step)

    def finish(self, outcome: Outcome) -> None:
        self._run.log({"outcome": outcome.status, "error": outcome.error}, step=self._step)
        self._run.finish()
