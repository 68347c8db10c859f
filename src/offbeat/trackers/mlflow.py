"""MLflow: a server, or a file store. A resumed run goes on under the same run id.

A point of its history cannot be replaced, so steps that a resumed run does again keep the values that were logged
first; which those are is asked of the store. Names may hold letters, digits and `_-. :/`: `avg@4` becomes `avg_4`.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.trackers.tracker import COLUMNS, Metrics, Opened, Outcome, Row, TrackedRun, cells, flat

ALWAYS = "tokens_generated"
"""A metric of every trained step, and of no evaluation."""
STATUS = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PARAMS_A_CALL = 100
PARAM_LIMIT = 500


class MLflow:
    def __init__(self, *, url: str | None, options: Mapping[str, Any]) -> None:
        self._url = url
        self._options = options
        self._id: str | None = None
        self._times: dict[int, int] = {}

    def start(self, run: TrackedRun) -> Opened:
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow").MlflowClient(tracking_uri=self._url)
        if run.state:
            self._id = run.state["run_id"]
            self._client.update_run(self._id, status="RUNNING")
            stored = [point.step + 1 for point in self._client.get_metric_history(self._id, ALWAYS)]
            return Opened(max([run.delivered, *stored]), state=run.state)
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(run.project, **self._options)
        tags = {f"tag.{tag}": "true" for tag in run.tags}
        if self._id is None:  # else the start is tried again
            self._id = self._client.create_run(place, run_name=run.name, tags=tags).info.run_id
        params = [self._entities.Param(key, str(value)[:PARAM_LIMIT]) for key, value in flat(run.config).items()]
        for first in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_A_CALL], synchronous=True)
        return Opened(run.delivered, state={"run_id": self._id})

    def log(self, step: int, metrics: Metrics) -> None:
        # The same time when it is tried again: a point that did arrive is then the same point.
        now = self._times.setdefault(step, time.time_ns() // 1_000_000)
        points = [self._entities.Metric(_name(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, metrics=points, synchronous=True)
        del self._times[step]

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """An artifact a step, in the form of MLflow's tables."""
        self._client.log_dict(
            self._id, {"columns": list(COLUMNS), "data": cells(rows)}, f"samples/step-{step:06d}.json"
        )

    def finish(self, outcome: Outcome) -> None:
        self._client.set_tag(self._id, "outcome", outcome.status)
        if outcome.error is not None:
            self._client.set_tag(self._id, "error", outcome.error[:PARAM_LIMIT])
        self._client.set_terminated(self._id, STATUS[outcome.status])


def _name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", key)[:250]
