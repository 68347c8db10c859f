"""What a run says at its end: reward from start to end, held-out before and after, where the time went, what next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.metrics import figures
from offbeat.metrics.evaluation import EvalResult

ENDS = 10
"""Steps at each end over which the reward is averaged."""
_AVERAGE = re.compile(r"^eval/(?P<name>[^/]+)/avg@(?P<samples>\d+)$")


@dataclass(frozen=True)
class Summary:
    """All that the last words are made of."""

    outcome: str
    """`done`, `interrupted, step 41 saved`, …"""
    history: Sequence[Mapping[str, Any]]
    """Records of all steps of the run, those before a resume included."""
    evaluations: Sequence[EvalResult]
    """Those since the start or the resume, in order of time. The first and the last of each set in the whole run are
    shown: `history` has the earlier ones."""
    elapsed_s: float
    """Of the whole run."""
    folder: Path
    commands: Sequence[tuple[str, str]] = ()
    """What one may do next: (`continue`, `offbeat resume runs/…`), …"""
    model: Path | None = None
    """The trained model: a folder that transformers can load."""


@dataclass(frozen=True)
class _Point:
    """A value of a held-out set, whether from a record or from a result."""

    samples: int
    version: int
    avg: float
    error: float | None


def summary_lines(summary: Summary) -> list[str]:
    """The lines, without any colour. None is wider than what the caller's own texts need."""
    steps = [record for record in summary.history if record.get("reward_mean") is not None]
    lines = [" · ".join([summary.outcome, *_durations(steps, summary.elapsed_s)])]
    if steps:
        lines += [_reward_line(steps)]
    lines += [_evaluation_line(name, points) for name, points in _points(summary).items()]
    if steps:
        lines += [_time_line(steps), *_trouble_lines(steps)]
    lines += [
        f"files      {summary.folder}",
        "           metrics.jsonl · samples.jsonl · checkpoints/ · logs/ · config.json",
    ]
    if summary.model is not None:
        lines.append(f"model      {summary.model}")
    lines += [f"{name:<10} {command}" for name, command in summary.commands]
    return lines


def _durations(steps: Sequence[Mapping[str, Any]], elapsed_s: float) -> list[str]:
    """The elapsed time in parts that add up: steps, evaluations between them, and all that is before and after."""
    steps_s, evaluate_s = _sum(steps, "time_step_s"), _sum(steps, "time_evaluate_s")
    rest_s = elapsed_s - steps_s - evaluate_s
    word = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
    parts = [f"{word} in {figures.duration(steps_s)}" if steps else word]
    if evaluate_s >= 0.5:
        parts.append(f"evaluations {figures.duration(evaluate_s)}")
    if rest_s >= 0.5:
        parts.append(f"start, warm-up and end {figures.duration(rest_s)}")
    return parts


def _reward_line(steps: Sequence[Mapping[str, Any]]) -> str:
    rewards = [record["reward_mean"] for record in steps]
    size = max(1, min(ENDS, len(rewards) // 2))
    first, last = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
    if len(rewards) == 1:
        return f"reward     {figures.decimal(first, 3)} (one step)"
    means = "first and last step" if size == 1 else f"means of the first and last {size} steps"
    return f"reward     {figures.decimal(first, 3)} → {figures.decimal(last, 3)}   {means}"


def _points(summary: Summary) -> dict[str, list[_Point]]:
    """Set → its points in order of time: those of the records, then those that no record holds (yet)."""
    found: dict[str, list[_Point]] = {}
    for record in summary.history:
        for key, value in record.items():
            match = _AVERAGE.match(key)
            if match and value is not None:
                version = record.get(f"eval/{match['name']}/weights_version", record["step"])
                point = _Point(int(match["samples"]), version, value, record.get(f"{key}_error"))
                found.setdefault(match["name"], []).append(point)
    for result in summary.evaluations:
        points = found.setdefault(result.name, [])
        if all(point.version < result.version for point in points):
            points.append(_Point(result.samples_per_prompt, result.version, result.avg, result.avg_error))
    return found


def _evaluation_line(name: str, points: Sequence[_Point]) -> str:
    last = points[-1]
    # Points with another number of samples (changed by a resume) estimate the same mean, and stay comparable.
    ends = [points[0], last] if len(points) > 1 else [last]
    values = [f"{figures.with_error(point.avg, point.error)} (version {point.version})" for point in ends]
    return f"eval       {name} avg@{last.samples} {' → '.join(values)}"


def _time_line(steps: Sequence[Mapping[str, Any]]) -> str:
    """The trainer's day: its seconds add up to the wall clock, generation is hidden in them or waited for."""
    total = _sum(steps, "time_step_s")
    if total <= 0:
        return "time       –"
    parts = {"train": "time_train_s", "wait for samples": "time_wait_s", "sync": "time_sync_s"}
    shares = {name: _sum(steps, key) / total for name, key in parts.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    split = " · ".join(f"{name} {figures.percent(share)}" for name, share in shares.items())
    return f"time       of the steps: {split}"


def _trouble_lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    if skipped := _sum(steps, "skipped_updates"):
        lines.append(f"skipped    updates {figures.count(skipped)} (see skipped_updates in metrics.jsonl)")
    if errors := _sum(steps, "reward_errors"):
        lines.append(f"errors     reward calls {figures.count(errors)} (see errors in samples.jsonl)")
    return lines


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(record.get(key) or 0 for record in steps)
