"""Weights & Biases, online or offline. A resumed run goes on under the same id.

Its history cannot be replaced, so steps that a resumed run does again keep the values that were logged first. Metrics
are drawn over `step`. The library's own counter has two places for each step, because the evaluation after the last
step may be followed by that step's training once a run is resumed with more steps. What a killed controller logged in
its last second is lost there.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.trackers.tracker import COLUMNS, Metrics, Opened, Outcome, Row, TrackedRun, cells

WHERE_KNOWN = {"finish_timeout": 25.0, "x_transaction_log_flush_interval": 1.0}
"""Settings in seconds: less than a run waits for its trackers, and what a killed controller loses."""


class WeightsAndBiases:
    def __init__(self, *, mode: str | None, url: str | None, folder: str | None, options: Mapping[str, Any]) -> None:
        self._mode = mode
        self._url = url
        self._folder = folder
        self._options = options
        self._id: str | None = None

    def start(self, run: TrackedRun) -> Opened:
        wandb: Any = importlib.import_module("wandb")
        self._table = wandb.Table
        self._id = run.state.get("id") or self._id or uuid.uuid4().hex[:8]
        # Its output would go into the run's display, and it would read what goes to the terminal.
        settings: dict[str, Any] = {"silent": True, "console": "off"} | ({"base_url": self._url} if self._url else {})
        known = getattr(wandb.Settings, "model_fields", ())  # older versions have fewer
        settings |= {name: value for name, value in WHERE_KNOWN.items() if name in known}
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self._id,
            resume="allow",
            tags=list(run.tags) or None,
            dir=self._folder or str(run.folder),
            mode=self._mode,
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(**settings),
            **self._options,
        )
        self._run.define_metric("*", step_metric="step")
        return Opened(run.delivered, state={"id": self._id})

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics}, step=2 * step + ("reward_mean" in metrics))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._run.log(
            {"step": step, "samples": self._table(columns=list(COLUMNS), data=cells(rows))}, step=2 * step + 1
        )

    def finish(self, outcome: Outcome) -> None:
        self._run.summary.update({"outcome": outcome.status, "error": outcome.error})
        self._run.finish(exit_code=int(outcome.status == "failed"))
