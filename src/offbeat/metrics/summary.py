"""What a run says at its end: reward from start to end, held-out before and after, where the time went, what next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.metrics import figures
from offbeat.metrics.evaluation import EvalResult

ENDS = 10
"""Steps at each end over which the reward is averaged."""


@dataclass(frozen=True)
class Summary:
    """All that the last words are made of."""

    outcome: str
    """`done`, `interrupted, step 41 saved`, …"""
    history: Sequence[Mapping[str, Any]]
    """Records of all steps of the run, those before a resume included."""
    evaluations: Sequence[EvalResult]
    """Of this run, in order of time; the first and the last of each set are shown."""
    elapsed_s: float
    folder: Path
    commands: Sequence[tuple[str, str]] = ()
    """What one may do next: (`continue`, `offbeat resume runs/…`), …"""


def summary_lines(summary: Summary) -> list[str]:
    """The lines, without any colour. None is wider than what the caller's own texts need."""
    steps = [record for record in summary.history if record.get("reward_mean") is not None]
    lines = [f"{summary.outcome} · {len(steps)} steps in {figures.duration(summary.elapsed_s)}"]
    if steps:
        lines += [_reward_line(steps)]
    lines += [_evaluation_line(first, last) for first, last in _ends_of_sets(summary.evaluations)]
    if steps:
        lines += [_time_line(steps), *_trouble_lines(steps)]
    lines += [f"files      {summary.folder}", "           metrics.jsonl · samples.jsonl · logs/ · config.json"]
    lines += [f"{name:<10} {command}" for name, command in summary.commands]
    return lines


def _reward_line(steps: Sequence[Mapping[str, Any]]) -> str:
    rewards = [record["reward_mean"] for record in steps]
    size = max(1, min(ENDS, len(rewards) // 2))
    first, last = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
    if len(rewards) == 1:
        return f"reward     {figures.decimal(first, 3)} (one step)"
    means = "first and last step" if size == 1 else f"means of the first and last {size} steps"
    return f"reward     {figures.decimal(first, 3)} → {figures.decimal(last, 3)}   {means}"


def _ends_of_sets(evaluations: Sequence[EvalResult]) -> list[tuple[EvalResult, EvalResult]]:
    first: dict[str, EvalResult] = {}
    last: dict[str, EvalResult] = {}
    for result in evaluations:
        first.setdefault(result.name, result)
        last[result.name] = result
    return [(first[name], last[name]) for name in first]


def _evaluation_line(first: EvalResult, last: EvalResult) -> str:
    name = f"eval       {last.name} avg@{last.samples_per_prompt} "
    after = f"{figures.with_error(last.avg, last.avg_error)} (version {last.version})"
    if first is last:
        return name + after
    return f"{name}{figures.with_error(first.avg, first.avg_error)} (version {first.version}) → {after}"


def _time_line(steps: Sequence[Mapping[str, Any]]) -> str:
    """The trainer's day: its seconds add up to the wall clock, generation is hidden in them or waited for."""
    total = _sum(steps, "time_step_s")
    if total <= 0:
        return "time       –"
    parts = {"train": "time_train_s", "wait for samples": "time_wait_s", "sync": "time_sync_s"}
    shares = {name: _sum(steps, key) / total for name, key in parts.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    split = " · ".join(f"{name} {figures.percent(share)}" for name, share in shares.items())
    return f"time       {split}"


def _trouble_lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    if skipped := _sum(steps, "skipped_updates"):
        lines.append(f"skipped    updates {figures.count(skipped)} (see skipped_updates in metrics.jsonl)")
    if errors := _sum(steps, "reward_errors"):
        lines.append(f"errors     reward calls {figures.count(errors)} (see errors in samples.jsonl)")
    return lines


def _sum(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(record.get(key) or 0 for record in steps)
