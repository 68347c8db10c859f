"""Says in words when a run is unhealthy, and what to do. Pure: records in, sentences out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from offbeat.metrics.figures import decimal, percent

Record: TypeAlias = Mapping[str, Any]

WINDOW = 3
"""A share must be too high on average over this many steps: a single small batch is no reason to speak."""
NO_SPREAD_LIMIT = 0.7
TRUNCATED_LIMIT = 0.1
KL_LIMIT = 0.5
"""Of `kl_engine_trainer`, in each of the last `WINDOW` steps: a single step's estimate has a heavy tail."""
NEAR_ZERO = 0.1
"""At a mean reward up to this, nearly all samples fail."""
FALL_WINDOW = 5
"""The reward has fallen when its mean over so many steps is less than half of the best earlier such mean …"""
FALL_BEFORE = 10
"""… of at least this many steps, …"""
FALL_ERRORS = 4.0
"""… and the difference is more than this many of its standard errors."""
HISTORY = 200
"""Records that alarms look at, at most."""


@dataclass(frozen=True)
class Alarm:
    kind: str
    """One alarm of a kind is shown once in a run."""
    text: str


def alarms(history: Sequence[Record]) -> list[Alarm]:
    """What is wrong as of the newest record. `history` needs the last `HISTORY` records only, oldest first."""
    if not history:
        return []
    checks: tuple[Callable[[Sequence[Record]], Iterable[Alarm]], ...] = (
        _skipped,
        _reward_errors,
        _reward_fell,
        _no_spread,
        _truncated,
        _disagreement,
    )
    return [alarm for check in checks for alarm in check(history)]


def _skipped(history: Sequence[Record]) -> Iterable[Alarm]:
    record = history[-1]
    skipped = int(record.get("skipped_updates") or 0)
    # A trainer that does not tell the two kinds apart: with no group to learn from, an update had nothing to train.
    nothing = skipped if record.get("groups_without_spread_fraction") == 1.0 else 0
    empty = int(record.get("empty_updates", nothing) or 0)
    nonfinite = int(record.get("nonfinite_updates", skipped - empty) or 0)
    if nonfinite > 0:
        yield Alarm(
            "non-finite",
            f"step {record['step']}: {_were_skipped(nonfinite)} because the gradient was not finite; the weights stay "
            'as they were. If it goes on: lower trainer.lr, or set trainer.dtype = "float32".',
        )
    if empty > 0:
        yield Alarm(
            "nothing-to-train",
            f"step {record['step']}: {_were_skipped(empty)} because in all groups of {_that(empty)} all rewards were "
            "equal: nothing can be learned from that. Use easier or harder data, or more samples_per_prompt.",
        )


def _were_skipped(updates: int) -> str:
    return "1 update was skipped" if updates == 1 else f"{updates} updates were skipped"


def _that(updates: int) -> str:
    return "that update" if updates == 1 else "those updates"


def _reward_errors(history: Sequence[Record]) -> Iterable[Alarm]:
    record = history[-1]
    errors = record.get("reward_errors") or 0
    if errors:
        calls = "1 reward call" if errors == 1 else f"{errors} reward calls"
        yield Alarm(
            "reward-errors",
            f"step {record['step']}: {calls} failed and counted as 0. The texts are under `errors` in samples.jsonl; "
            "mend the function, or raise rewards.timeout_s if it is too slow.",
        )


def _reward_fell(history: Sequence[Record]) -> Iterable[Alarm]:
    fall = _fall(history)
    if fall is not None:
        best, now = fall
        yield Alarm(
            "reward-fell",
            f"step {history[-1]['step']}: the reward has fallen by more than half, from {decimal(best)} (best mean of "
            f"{FALL_WINDOW} steps) to {decimal(now)} ({_mean_of(FALL_WINDOW)}). Stop, and lower trainer.lr.",
        )


def _fall(history: Sequence[Record]) -> tuple[float, float] | None:
    """(best earlier mean, mean now) if the reward has fallen by more than half and by more than noise."""
    records = [record for record in history if record.get("reward_mean") is not None]
    before, last = records[:-FALL_WINDOW], records[-FALL_WINDOW:]
    if len(before) < FALL_BEFORE:
        return None
    best = _best_mean(before, FALL_WINDOW)
    now = sum(record["reward_mean"] for record in last) / FALL_WINDOW
    if best is None or best <= NEAR_ZERO or now >= 0.5 * best:
        return None
    # A difference of two means of `FALL_WINDOW` steps each.
    error = _step_noise(before) * math.sqrt(2.0 / FALL_WINDOW)
    return (best, now) if best - now > FALL_ERRORS * error else None


def _best_mean(records: Sequence[Record], size: int) -> float | None:
    """The largest mean reward of `size` steps in a row; None for fewer steps."""
    rewards = [record["reward_mean"] for record in records if record.get("reward_mean") is not None]
    return max((sum(rewards[i : i + size]) / size for i in range(len(rewards) - size + 1)), default=None)


def _step_noise(records: Sequence[Record]) -> float:
    """Standard deviation of a step's mean reward about its trend.

    The larger of two estimates: from differences of neighbouring steps (prompts differ too, and a trend cancels), and
    from the spread and number of the samples of a step.
    """
    rewards = [record["reward_mean"] for record in records]
    steps = [(b - a) ** 2 / 2 for a, b in itertools.pairwise(rewards)]
    samples = [
        record["reward_std"] ** 2 / count
        for record in records
        if record.get("reward_std") is not None and (count := _samples(record)) > 0
    ]
    return math.sqrt(max(sum(values) / len(values) for values in (steps, samples) if values))


def _samples(record: Record) -> float:
    """How many samples the step had; 0 where that cannot be told."""
    length = record.get("response_length_mean") or 0.0
    return (record.get("tokens_generated") or 0.0) / length if length > 0 else 0.0


def _no_spread(history: Sequence[Record]) -> Iterable[Alarm]:
    share = _recent(history, "groups_without_spread_fraction")
    if share is None or share <= NO_SPREAD_LIMIT or _fall(history) is not None:
        return
    reward = _recent(history, "reward_mean")
    best = _best_mean(history[:-WINDOW], WINDOW)
    if reward is None or reward > NEAR_ZERO:
        advice = "They teach nothing: use harder data, or more samples_per_prompt."
    elif best is None or best <= NEAR_ZERO:
        advice = "Nearly all fail: use easier data, more samples_per_prompt, or a [warmup]."
    else:
        advice = "Nearly all fail, unlike before: use easier data, or lower trainer.lr if it does not recover."
    yield Alarm(
        "no-spread",
        f"step {history[-1]['step']}: {percent(share)} of groups are without spread, all rewards equal "
        f"({_mean_of(WINDOW)}). {advice}",
    )


def _truncated(history: Sequence[Record]) -> Iterable[Alarm]:
    share = _recent(history, "truncated_fraction")
    if share is not None and share > TRUNCATED_LIMIT:
        yield Alarm(
            "truncated",
            f"step {history[-1]['step']}: {percent(share)} of samples were cut off at max_new_tokens "
            f"({_mean_of(WINDOW)}). Raise sampling.max_new_tokens, or check that the model's stop ids are right "
            "(`offbeat check`).",
        )


def _disagreement(history: Sequence[Record]) -> Iterable[Alarm]:
    key = "kl_engine_trainer"
    mean = _recent(history, key)
    if mean is not None and all(record[key] > KL_LIMIT for record in history[-WINDOW:]):
        yield Alarm(
            "disagreement",
            f"step {history[-1]['step']}: engines and trainer disagree about the samples' probabilities: {key} is "
            f"{decimal(mean)} ({_mean_of(WINDOW)}). One step changes the model too much: lower trainer.lr. If "
            'logprob_gap_max is large too, it is rounding: set trainer.dtype = "float32".',
        )


def _mean_of(steps: int) -> str:
    return f"mean of the last {steps} steps"


def _recent(history: Sequence[Record], key: str) -> float | None:
    """Mean over the last `WINDOW` records; None until there are so many."""
    values = [record.get(key) for record in history[-WINDOW:]]
    found = [value for value in values if value is not None]
    # Rounded, so that a share exactly at a limit is not above it by the last bit of a sum.
    return round(sum(found) / len(found), 9) if len(found) == WINDOW else None
