"""What shows only over many steps: a fall, a collapse, a growth, a part that rises alone, an engine that lags. Pure.

Each function looks at the records up to now (oldest first, the last 200 at most) and returns what it found, or None.
Thresholds are such that a healthy run with the noise of its batch size stays silent: a difference must be large *and*
beyond several of its standard errors. `tests/unit/test_metrics_trends.py` holds both sides, with noise of many seeds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Record: TypeAlias = Mapping[str, Any]

NEAR_ZERO = 0.1
"""At a mean reward up to this, nearly all samples fail."""
FALL_WINDOW = 5
"""The reward has fallen when its mean over so many steps is less than half of the best earlier such mean …"""
FALL_BEFORE = 10
"""… of at least this many steps, …"""
FALL_ERRORS = 4.0
"""… and the difference is more than this many of its standard errors."""

ENTROPY_SHARE = 0.05
"""The entropy has collapsed when its mean over `FALL_WINDOW` steps is below this share of the best earlier one …"""
ENTROPY_NATS = 0.05
"""… and below this, …"""
ENTROPY_STALL = 30
"""… the mean reward of the last so many steps is not above that of as many before by more than its standard error, …"""
ENTROPY_STD = 0.7
"""… and `reward_std` is still above this share of its best mean: samples that nearly all succeed have little entropy
because the task is learnt."""

GAP_PROBES = 3
"""The gap has grown when each of the last so many parity probes is above all of the first so many, …"""
GAP_RATIO = 3.0
"""… their mean is this many times larger, …"""
GAP_FLOOR = 1e-5
"""… and above this: below, growth is that of the last bits of float32."""

CONSTANT_STEPS = 5
"""A reward function is constant when all its values of at least so many steps, and of all steps so far, are equal."""

PART_STEPS = 10
"""A part's change is that of its means over the first and the last so many steps, …"""
PART_BETWEEN = 30
"""… with at least so many between."""
PART_RISE = 0.2
"""One part has risen by more than this, and by more than `FALL_ERRORS` standard errors, …"""
PART_FLAT = 0.1
"""… while another has not risen beyond its standard error, nor changed by more than this, two of them included, …"""
PART_LOW = 0.5
"""… and has room to rise: it is not above this. Negative parts are penalties, which may well stay where they are."""

SLOW_STEPS = 8
"""An engine is slow when in each of so many steps it took longer for a token than all others, …"""
SLOW_RATIO = 1.5
"""… and on (geometric) average this many times as long as the median of the others."""


def fall(history: Sequence[Record]) -> tuple[float, float] | None:
    """(best earlier mean reward, mean now) if the reward has fallen by more than half and by more than noise."""
    records = having(history, "reward_mean")
    before, last = records[:-FALL_WINDOW], records[-FALL_WINDOW:]
    if len(before) < FALL_BEFORE:
        return None
    best, now = best_mean(before, "reward_mean", FALL_WINDOW), mean(last, "reward_mean")
    if best is None or best <= NEAR_ZERO or now >= 0.5 * best:
        return None
    error = reward_noise(before) * math.sqrt(2.0 / FALL_WINDOW)
    return (best, now) if best - now > FALL_ERRORS * error else None


def entropy_collapse(history: Sequence[Record]) -> tuple[float, float] | None:
    """(best earlier mean entropy, mean now) if it has collapsed and the run gains nothing by it."""
    records = having(history, "entropy", "reward_mean", "reward_std")
    before, last = records[:-FALL_WINDOW], records[-FALL_WINDOW:]
    if len(before) < FALL_BEFORE or len(records) < 2 * ENTROPY_STALL:
        return None
    best, now = best_mean(before, "entropy", FALL_WINDOW), mean(last, "entropy")
    best_std = best_mean(records, "reward_std", FALL_WINDOW)
    if best is None or best_std is None or now >= min(ENTROPY_SHARE * best, ENTROPY_NATS):
        return None
    newer, older = records[-ENTROPY_STALL:], records[-2 * ENTROPY_STALL : -ENTROPY_STALL]
    error = reward_noise([*older, *newer]) * math.sqrt(2.0 / ENTROPY_STALL)
    rises = mean(newer, "reward_mean") - mean(older, "reward_mean") > error
    learnt = mean(last, "reward_std") < ENTROPY_STD * best_std
    return None if rises or learnt else (best, now)


def gap_growth(history: Sequence[Record]) -> tuple[float, float] | None:
    """(mean of the first probes, mean of the last) of `logprob_gap_mean`, if it has grown."""
    gaps = [record["logprob_gap_mean"] for record in having(history, "logprob_gap_mean")]
    first, last = gaps[:GAP_PROBES], gaps[-GAP_PROBES:]
    if len(gaps) < 2 * GAP_PROBES or min(last) <= max(first):
        return None
    before, now = statistics.fmean(first), statistics.fmean(last)
    return (before, now) if now > GAP_FLOOR and now > GAP_RATIO * before else None


def constant_parts(history: Sequence[Record]) -> dict[str, float]:
    """Reward function → the one value that it has ever returned. Empty where `history` is not the whole run.

    A function that fails on every sample is no constant: its errors are told.
    """
    if not history or history[0].get("step") != 0:
        return {}
    found: dict[str, float] = {}
    for name in part_names(history):
        own = having(history, f"reward/{name}", f"reward_std/{name}")
        first = own[0][f"reward/{name}"] if own else 0.0
        constant = all(r[f"reward_std/{name}"] <= 1e-9 and abs(r[f"reward/{name}"] - first) <= 1e-9 for r in own)
        failing = all((record.get("reward_errors") or 0) >= max(1.0, samples(record)) for record in own)
        if len(own) >= CONSTANT_STEPS and constant and not failing:
            found[name] = first
    return found


@dataclass(frozen=True)
class Change:
    """Of a reward function's mean, from the first steps to the last."""

    name: str
    before: float
    now: float
    error: float
    """Standard error of the difference."""

    @property
    def rise(self) -> float:
        return self.now - self.before


def part_alone(history: Sequence[Record]) -> tuple[Change, Change] | None:
    """(the reward function that rose, the one that stayed low) where one gains and another does not."""
    changes = [change for name in part_names(history) if (change := _change(history, name)) is not None]
    rose = [c for c in changes if c.rise > PART_RISE and c.rise > FALL_ERRORS * c.error]
    flat = [c for c in changes if c.rise <= c.error and abs(c.rise) + 2 * c.error <= PART_FLAT]
    flat = [c for c in flat if 0.0 <= c.now <= PART_LOW]
    # Of a function that never varies `constant_parts` tells.
    flat = [c for c in flat if any(record.get(f"reward_std/{c.name}") for record in history)]
    if not rose or not flat:
        return None
    return max(rose, key=lambda c: c.rise), min(flat, key=lambda c: c.now)


def _change(history: Sequence[Record], name: str) -> Change | None:
    key = f"reward/{name}"
    own = having(history, key)
    if len(own) < 2 * PART_STEPS + PART_BETWEEN:
        return None
    error = noise([record[key] for record in own]) * math.sqrt(2.0 / PART_STEPS)
    return Change(name, mean(own[:PART_STEPS], key), mean(own[-PART_STEPS:], key), error)


def slow_engine(history: Sequence[Record]) -> tuple[str, float] | None:
    """(engine, how many times as long as the others it takes) if one engine holds all others up."""
    ratios: list[tuple[str, float]] = []
    for record in history[-SLOW_STEPS:]:
        prefix = "engine_seconds_per_token/"
        took = {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix) and value}
        if len(took) < 2:
            return None
        slowest = max(took, key=lambda name: took[name])
        others = statistics.median(value for name, value in took.items() if name != slowest)
        ratios.append((slowest, took[slowest] / others))
    if len(ratios) < SLOW_STEPS or len({name for name, _ in ratios}) > 1:
        return None
    ratio = statistics.geometric_mean(value for _, value in ratios)
    return (ratios[0][0], ratio) if ratio > SLOW_RATIO else None


# --- means and their noise ----------------------------------------------------------------------------------------


def having(history: Sequence[Record], *keys: str) -> list[Record]:
    """The records in which all of these were measured."""
    return [record for record in history if all(record.get(key) is not None for key in keys)]


def part_names(history: Sequence[Record]) -> list[str]:
    """Of the reward functions, in order of appearance."""
    keys = (key for record in history for key in record if key.startswith("reward/"))
    return list(dict.fromkeys(key.removeprefix("reward/") for key in keys))


def mean(records: Sequence[Record], key: str) -> float:
    return sum(record[key] for record in records) / len(records)


def best_mean(records: Sequence[Record], key: str, size: int) -> float | None:
    """The largest mean of `size` measured values in a row; None for fewer."""
    values = [record[key] for record in having(records, key)]
    return max((sum(values[i : i + size]) / size for i in range(len(values) - size + 1)), default=None)


def noise(values: Sequence[float]) -> float:
    """Standard deviation about a slow trend, from differences of neighbours: the trend cancels."""
    return math.sqrt(statistics.fmean((b - a) ** 2 / 2 for a, b in itertools.pairwise(values)))


def reward_noise(records: Sequence[Record]) -> float:
    """Standard deviation of a step's mean reward about its trend.

    The larger of two estimates: from neighbouring steps (prompts differ too), and from the spread and number of the
    samples of a step.
    """
    within = [
        record["reward_std"] ** 2 / count for record in having(records, "reward_std") if (count := samples(record)) > 0
    ]
    between = noise([record["reward_mean"] for record in records])
    return max(between, math.sqrt(statistics.fmean(within)) if within else 0.0)


def samples(record: Record) -> float:
    """How many samples the step had; 0 where that cannot be told."""
    length = record.get("response_length_mean") or 0.0
    return (record.get("tokens_generated") or 0.0) / length if length > 0 else 0.0
