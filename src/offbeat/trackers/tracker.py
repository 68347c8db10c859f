"""The seam to trackers: what a run tells them, in this order and from one thread each.

    start(run) → Opened      opens the run there, or goes on with it
    log(step, metrics)       once a step, steps rising
    samples(step, rows)      after the log of that step; a table may be left out when the tracker is slow
    finish(outcome)          the last call, also after an error

A tracker may block and may raise: it has a thread of its own, the run does not wait for it, and an error is told once
as a warning. After an error of `start` or `log` the same call is made again when the next step is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

Metrics: TypeAlias = Mapping[str, float]
Row: TypeAlias = Mapping[str, Any]

COLUMNS = ("step", "prompt_id", "prompt", "completion", "reward", "parts", "versions")
"""Of a row of the sample table, as in samples.jsonl."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run at its start."""

    name: str
    project: str
    tags: tuple[str, ...]
    folder: Path
    """The run folder."""
    config: Mapping[str, Any]
    """The resolved configuration, as in config.json."""
    next_step: int
    """The first step that is done now: 0 for a new run. A resumed run does steps again that it had done before."""
    delivered: int
    """Steps before this one were logged to this tracker, by earlier parts of the run."""
    state: Mapping[str, Any]
    """What `start` returned as `state` in the earlier part; empty when this tracker has not seen the run."""


@dataclass(frozen=True)
class Opened:
    """What `start` answers."""

    next_step: int
    """The first step that the tracker wants: `run.delivered`, or fewer when it can replace what it has. Steps before
    `run.next_step` are sent from metrics.jsonl."""
    replaces: bool = False
    """True: what it had of `next_step` and later is gone."""
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON, to be kept in trackers.json for a resume: an id, never a key or a password."""


@dataclass(frozen=True)
class Outcome:
    """How the run, or this part of it, ended."""

    status: Literal["done", "interrupted", "failed"]
    error: str | None = None
    """The sentence of a run that failed."""


class Tracker(Protocol):
    def start(self, run: TrackedRun) -> Opened: ...

    def log(self, step: int, metrics: Metrics) -> None:
        """The numbers of one object of metrics.jsonl, under the same names; all are finite.

        The evaluation after the last step comes as a step of its own with `eval/…` only. When more steps follow after
        a resume, that step is logged again, without what was logged before unless the tracker `replaces`.
        """
        ...

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Some samples of a step. Their text is a model's: it may hold anything."""
        ...

    def finish(self, outcome: Outcome) -> None: ...


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"trainer.lr": 1e-6, "data.0.source": …}`: the leaves of a configuration by their dotted paths."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        inner = dict(enumerate(value)) if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict) and inner:
            leaves |= flat({str(key): one for key, one in inner.items()}, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def cells(rows: Sequence[Row]) -> list[list[str | int | float]]:
    """A table's data, a list a row in the order of `COLUMNS`: text and numbers only, one type a column."""
    return [[_cell(row[column]) for column in COLUMNS] for row in rows]


def _cell(value: Any) -> str | int | float:
    return value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False)
