"""What must fit together across sections, as one sentence for each problem. Pure.

A rule is a function of the values of some top-level keys, which `RULES` names: it can be asked whenever *these* are
right, whatever is wrong with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from offbeat.config.tracker_problems import tracker_problems
from offbeat.types import pass_at

if TYPE_CHECKING:
    from offbeat.config.sections import CheckpointSection, DataSection, EvalSection, WeightsSection

Rule: TypeAlias = Callable[..., list[str]]


def rule_problems(parts: Mapping[str, Any]) -> list[str]:
    """`parts`: valid values by top-level key; rules about other keys are left out."""
    asked = [(keys, rule) for keys, rule in RULES if parts.keys() >= set(keys)]
    return [problem for keys, rule in asked for problem in rule(*(parts[key] for key in keys))]


def _updates(updates_per_step: int, prompts_per_step: int) -> list[str]:
    if updates_per_step > prompts_per_step:
        return [
            f"updates_per_step = {updates_per_step} is more than prompts_per_step = {prompts_per_step}: each update "
            "needs at least one prompt; lower it or raise prompts_per_step."
        ]
    return []


def _data(data: Sequence[DataSection]) -> list[str]:
    problems: list[str] = []
    if not data:
        problems.append("data: no source of prompts; add a [[data]] section with source, prompt and rewards.")
    for name, count in _twice(data):
        problems.append(f"data: {count} sources are named {name!r}; give each [[data]] its own name.")
    for section in data:
        if not section.rewards:
            problems.append(
                f"data.{section.name}.rewards: empty; name at least one function, e.g. "
                'rewards = { "rewards.py:correct" = 1.0 }.'
            )
        if section.system is not None and section.format == "text":
            problems.append(f'data.{section.name}.system: only for format = "chat"; remove it or change the format.')
    return problems


def _eval(sets: Sequence[EvalSection]) -> list[str]:
    problems = [
        f"eval: {count} sets are named {name!r}; give each [[eval]] its own name." for name, count in _twice(sets)
    ]
    for section in sets:
        if section.temperature is not None and 0 < section.temperature < 1e-3:
            problems.append(
                f"eval.{section.name}.temperature = {section.temperature}: must be 0 (greedy), or at least 0.001."
            )
    return problems


def _twice(sections: Sequence[DataSection] | Sequence[EvalSection]) -> list[tuple[str, int]]:
    names = [section.name for section in sections]
    return [(name, names.count(name)) for name in sorted(set(names)) if names.count(name) > 1]


def _keep_every(section: CheckpointSection) -> list[str]:
    if section.keep_every and section.every_steps and section.keep_every % section.every_steps:
        return [
            f"checkpoint.keep_every = {section.keep_every} is no multiple of checkpoint.every_steps = "
            f"{section.every_steps}: most of those steps are never saved; use a multiple."
        ]
    return []


def _best_is_measured(section: CheckpointSection, sets: Sequence[EvalSection]) -> list[str]:
    if section.best is None:
        return []
    name, _, metric = section.best.partition("/")
    samples = {one.name: one.samples_per_prompt for one in sets}
    if name not in samples:
        there = f"the sets are {', '.join(samples)}" if samples else "there is no [[eval]] set; add one"
        return [f"checkpoint.best = {section.best!r}: no [[eval]] set is named {name!r}; {there}."]
    known = eval_metrics(samples[name])
    if metric and metric not in known:
        return [f"checkpoint.best = {section.best!r}: {name} has {', '.join(known)}; name one of them."]
    return []


def _best_is_saved(section: CheckpointSection, sets: Sequence[EvalSection], steps: int) -> list[str]:
    name = (section.best or "").partition("/")[0]
    every = {one.name: one.every_steps for one in sets}.get(name)
    if every is None or (section.every_steps and every and math.lcm(section.every_steps, every) < steps):
        return []
    return [
        f"checkpoint.best = {section.best!r}: no step before the last is both saved (checkpoint.every_steps = "
        f"{section.every_steps}) and evaluated (eval.{name}.every_steps = {every}); make one a multiple of the "
        "other, and less than steps."
    ]


def eval_metrics(samples: int) -> list[str]:
    """The values that a set has with so many samples a prompt: `avg@8`, `pass@1`, `pass@2`, …, `pass@8`."""
    return [f"avg@{samples}", *(f"pass@{k}" for k in pass_at(samples))]


def _host(section: WeightsSection) -> list[str]:
    if section.host.strip("[]") in {"0.0.0.0", "::", "*", ""}:
        return [
            f"weights.host = {section.host!r} is a wildcard, which nobody can connect to; give an address of this "
            "host, e.g. 127.0.0.1 or ::1."
        ]
    return []


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("updates_per_step", "prompts_per_step"), _updates),
    (("data",), _data),
    (("eval",), _eval),
    (("checkpoint",), _keep_every),
    (("checkpoint", "eval"), _best_is_measured),
    (("checkpoint", "eval", "steps"), _best_is_saved),
    (("weights",), _host),
    (("trackers",), tracker_problems),
)
"""Top-level keys, and the rule that takes their values in this order."""
