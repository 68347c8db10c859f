"""trackers.json: what each tracker of a run has been given, so that a resumed run neither repeats nor skips a step.

{"wandb": {"next_step": 12, "evaluated": null, "state": {"id": "x7b2…"}, "replaces": false, "line": 1},
 "outcome": {"status": "failed", "error": "engine-0: killed by SIGKILL"}}
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from offbeat.durable import replace_file
from offbeat.trackers.tracker import Outcome

TRACKERS = "trackers.json"
OUTCOME = "outcome"
"""Of the run, beside its trackers."""


@dataclass(frozen=True)
class Progress:
    """Of one tracker."""

    next_step: int = 0
    """The first step that has not been logged."""
    evaluated: int | None = None
    """The evaluation after the last step is logged at this step, its training is not."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The tracker's own."""
    replaces: bool = False
    """What it has of a step is gone when that step is logged again."""
    line: int = 1
    """Which of the tracker's runs this is: one more each time when the run goes back to an earlier checkpoint."""

    def wants(self, record: Mapping[str, Any]) -> bool:
        """This object of metrics.jsonl has not been logged: what a resumed run does again may have been."""
        return record["step"] >= self.next_step and (is_training(record) or record["step"] != self.evaluated)

    def after(self, record: Mapping[str, Any]) -> Progress:
        """When this object of metrics.jsonl has been logged."""
        step = record["step"]
        if is_training(record):
            return replace(self, next_step=step + 1, evaluated=None)
        return replace(self, next_step=step, evaluated=step)


def is_training(record: Mapping[str, Any]) -> bool:
    """False for the evaluation after the last step, which is an object of its own."""
    return "reward_mean" in record


class ProgressFile:
    """Written by the threads of several trackers; whole at any time, also when the machine stops.

    `problem`: of a file that is there and cannot be read, a sentence; it counts as empty then. Writing raises
    `OSError`, and what is known holds nevertheless.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / TRACKERS
        self._lock = threading.Lock()
        self._known: dict[str, Progress] = {}
        self._outcome: Outcome | None = None
        self.problem: str | None = None
        try:
            read = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Any])
            self._outcome = msgspec.convert(read.pop(OUTCOME, None), Outcome | None)
            self._known = msgspec.convert(read, dict[str, Progress])
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            self.problem = (
                f"{self._path} cannot be read ({error}): trackers begin anew and get every step from metrics.jsonl"
            )

    @property
    def outcome(self) -> Outcome | None:
        """How the run's last part ended; None: it goes on, or was killed."""
        return self._outcome

    def ended(self, outcome: Outcome | None) -> None:
        with self._lock:
            self._outcome = outcome
            self._write()

    def read(self, key: str) -> Progress:
        return self._known.get(key, Progress())

    def begin_another_line(self, key: str, next_step: int) -> int | None:
        """The run goes on from `next_step`, and what it did after that is given up. A tracker that has some of it and
        cannot replace it gets a run of its own for what comes now, which begins with nothing; returns its number."""
        before = self.read(key)
        has = before.next_step > next_step or (before.evaluated is not None and before.evaluated > next_step)
        if not has or before.replaces:
            return None
        self.write(key, Progress(line=before.line + 1))
        return before.line + 1

    def write(self, key: str, progress: Progress) -> None:
        with self._lock:
            self._known[key] = progress
            self._write()

    def _write(self) -> None:
        values: dict[str, Any] = {key: asdict(value) for key, value in self._known.items()}
        if self._outcome is not None:
            values[OUTCOME] = asdict(self._outcome)
        replace_file(self._path, [json.dumps(values, indent=2).encode() + b"\n"])
