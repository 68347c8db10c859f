"""trackers.json: what each tracker of a run has been given, so that a resumed run neither repeats nor skips a step.

{"wandb": {"next_step": 12, "evaluated": null, "state": {"id": "x7b2…"}}}
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRACKERS = "trackers.json"


@dataclass(frozen=True)
class Progress:
    """Of one tracker."""

    next_step: int = 0
    """The first step that has not been logged."""
    evaluated: int | None = None
    """The evaluation after the last step is logged at this step, its training is not."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The tracker's own."""

    def after(self, record: Mapping[str, Any]) -> Progress:
        """When this object of metrics.jsonl has been logged."""
        step = record["step"]
        if is_training(record):
            return Progress(step + 1, None, self.state)
        return Progress(step, step, self.state)


def is_training(record: Mapping[str, Any]) -> bool:
    """False for the evaluation after the last step, which is an object of its own."""
    return "reward_mean" in record


class ProgressFile:
    """Written by the threads of several trackers; whole at any time."""

    def __init__(self, run: Path) -> None:
        self._path = run / TRACKERS
        self._lock = threading.Lock()
        self._known: dict[str, Progress] = {}
        if self._path.is_file():
            read = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = {key: Progress(**values) for key, values in read.items()}

    def read(self, key: str) -> Progress:
        return self._known.get(key, Progress())

    def write(self, key: str, progress: Progress) -> None:
        with self._lock:
            self._known[key] = progress
            aside = self._path.with_name(TRACKERS + ".writing")
            text = json.dumps({key: asdict(value) for key, value in self._known.items()}, indent=2)
            aside.write_text(text + "\n", encoding="utf-8")
            os.replace(aside, self._path)
