"""What shows only over many steps: a fall, a collapse, a growth, a part that rises alone, an engine that lags. Pure.

Each function looks at the records up to now (oldest first, the last 200 at most) and returns what it found, or None.
What a slow change is compared with may be older than those: `Past` remembers it of the whole run.
Thresholds are such that a healthy run with the noise of its batch size stays silent: a difference must be large *and*
beyond several of its standard errors. `tests/unit/test_metrics_trends.py` holds both sides, with noise of many seeds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Record: TypeAlias = Mapping[str, Any]

NEAR_ZERO = 0.1
"""At a mean reward up to this, nearly all samples fail; unless rewards are penalties, below zero."""
FALL_WINDOW = 5
"""The reward has fallen when its mean over so many steps is less than half of the best earlier such mean …"""
FALL_BEFORE = 10
"""… of at least this many steps, …"""
FALL_ERRORS = 4.0
"""… and the difference is more than this many of its standard errors."""
PENALTY_ERRORS = 8.0
"""Half of a negative reward says nothing. Where the best mean is not above `NEAR_ZERO` and rewards go below zero, the
reward has fallen when more than half of what lies between the best and the lowest earlier mean is lost, and the
difference is more than this many standard errors."""

ENTROPY_SHARE = 0.05
"""The entropy has collapsed when its mean over `FALL_WINDOW` steps is below this share of the best earlier one …"""
ENTROPY_NATS = 0.05
"""… and below this, …"""
ENTROPY_STALL = 30
"""… the mean reward of the last so many steps is not above that of as many before by more than its standard error, …"""
ENTROPY_STD = 0.7
"""… `reward_std` is still above this share of its best mean: samples that nearly all succeed have little entropy
because the task is learnt, …"""
ENTROPY_GAIN = 1.0
"""… and the mean reward is not above that of the steps with the best entropy by more than so many times the best
`reward_std`: the entropy was spent on something."""

ENTROPY_KEYS = ("entropy", "reward_mean", "reward_std")
"""A step counts where all of these were measured."""

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


@dataclass
class Past:
    """What the last records no longer tell of the whole run. Add every record, oldest first."""

    first_gaps: list[float] = field(default_factory=list[float])
    """The first `GAP_PROBES` of `logprob_gap_mean`."""
    last_gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAP_PROBES))
    """The last ones, without those."""
    best_entropy: float | None = None
    """Largest mean of `FALL_WINDOW` steps in a row that ended before the last so many."""
    reward_then: float = 0.0
    """Mean reward of those steps."""
    best_std: float | None = None
    """Largest mean of `reward_std` over `FALL_WINDOW` steps in a row."""
    parts: dict[str, None] = field(default_factory=dict[str, None])
    """Reward functions, in order of appearance."""
    _newest: deque[Record] = field(default_factory=lambda: deque(maxlen=2 * FALL_WINDOW))

    @classmethod
    def of(cls, history: Sequence[Record]) -> Past:
        past = cls()
        for record in history:
            past.add(record)
        return past

    def add(self, record: Record) -> None:
        self.parts.update(dict.fromkeys(part_names([record])))
        gap = record.get("logprob_gap_mean")
        if gap is not None and len(self.first_gaps) < GAP_PROBES:
            self.first_gaps.append(gap)
        elif gap is not None:
            self.last_gaps.append(gap)
        if all(record.get(key) is not None for key in ENTROPY_KEYS):
            self._newest.append(record)
            self._compare()

    def _compare(self) -> None:
        newest = list(self._newest)
        if len(newest) >= FALL_WINDOW:
            std = mean(newest[-FALL_WINDOW:], "reward_std")
            self.best_std = std if self.best_std is None else max(self.best_std, std)
        if len(newest) == 2 * FALL_WINDOW:
            entropy = mean(newest[:FALL_WINDOW], "entropy")
            if self.best_entropy is None or entropy > self.best_entropy:
                self.best_entropy, self.reward_then = entropy, mean(newest[:FALL_WINDOW], "reward_mean")


def fall(history: Sequence[Record]) -> tuple[float, float] | None:
    """(best earlier mean reward, mean now) if the reward has fallen by more than half and by more than noise."""
    rewards = [value for record in history if (value := record.get("reward_mean")) is not None]
    if len(rewards) < FALL_BEFORE + FALL_WINDOW:
        return None
    now = sum(rewards[-FALL_WINDOW:]) / FALL_WINDOW
    if min(rewards) >= 0.0 and now >= 0.5 * max(rewards):  # most steps need no more than this
        return None
    before = having(history, "reward_mean")[:-FALL_WINDOW]
    best, low = best_mean(before, "reward_mean", FALL_WINDOW), best_mean(before, "reward_mean", FALL_WINDOW, -1)
    assert best is not None
    assert low is not None
    if best > NEAR_ZERO:
        fallen, errors = now < 0.5 * best, FALL_ERRORS
    else:
        fallen, errors = low < 0.0 and best - now > 0.5 * (best - low), PENALTY_ERRORS
    if not fallen:
        return None
    error = reward_noise(before) * math.sqrt(2.0 / FALL_WINDOW)
    return (best, now) if best - now > errors * error else None


def entropy_collapse(history: Sequence[Record], past: Past) -> tuple[float, float] | None:
    """(best earlier mean entropy, mean now) if it has collapsed and the run gains nothing by it."""
    best, best_std = past.best_entropy, past.best_std
    if best is None or best_std is None:
        return None
    last = having(history[-FALL_WINDOW:], *ENTROPY_KEYS)
    if len(last) < FALL_WINDOW or (now := mean(last, "entropy")) >= min(ENTROPY_SHARE * best, ENTROPY_NATS):
        return None
    records = having(history[-2 * ENTROPY_STALL :], *ENTROPY_KEYS)
    if len(records) < 2 * ENTROPY_STALL:
        return None
    newer, older = records[-ENTROPY_STALL:], records[-2 * ENTROPY_STALL : -ENTROPY_STALL]
    learnt = mean(last, "reward_std") < ENTROPY_STD * best_std
    gained = mean(newer, "reward_mean") - past.reward_then > ENTROPY_GAIN * best_std
    if learnt or gained:
        return None
    error = reward_noise([*older, *newer]) * math.sqrt(2.0 / ENTROPY_STALL)
    rises = mean(newer, "reward_mean") - mean(older, "reward_mean") > error
    return None if rises else (best, now)


def gap_growth(past: Past) -> tuple[float, float] | None:
    """(mean of the first probes of the run, mean of the last) of `logprob_gap_mean`, if it has grown."""
    first, last = past.first_gaps, past.last_gaps
    if len(last) < GAP_PROBES or min(last) <= max(first):
        return None
    before, now = statistics.fmean(first), statistics.fmean(last)
    return (before, now) if now > GAP_FLOOR and now > GAP_RATIO * before else None


def constant_parts(history: Sequence[Record], past: Past) -> dict[str, tuple[float, int]]:
    """Reward function → (the one value that it has ever returned, in how many steps). Empty where `history` is not
    the whole run.

    A function that fails on every sample is no constant: its errors are told.
    """
    if not history or history[0].get("step") != 0:
        return {}
    found: dict[str, tuple[float, int]] = {}
    varied = {key for key, value in history[-1].items() if key.startswith("reward_std/") and (value or 0.0) > 1e-9}
    for name in past.parts:
        if f"reward_std/{name}" in varied:
            continue
        own = having(history, f"reward/{name}", f"reward_std/{name}")
        first = own[0][f"reward/{name}"] if own else 0.0
        constant = all(r[f"reward_std/{name}"] <= 1e-9 and abs(r[f"reward/{name}"] - first) <= 1e-9 for r in own)
        failing = all(_failed(record, name) >= max(1.0, samples(record)) for record in own)
        if len(own) >= CONSTANT_STEPS and constant and not failing:
            found[name] = (first, len(own))
    return found


def _failed(record: Record, name: str) -> float:
    """Failed calls of a reward function; of an older record, which does not tell them apart, of all together."""
    total = record.get("reward_errors") or 0
    told_apart = any(key.startswith("reward_errors/") for key in record)
    return record.get(f"reward_errors/{name}", 0) if told_apart else total


@dataclass(frozen=True)
class Change:
    """Of a reward function's mean, from the first steps to the last. What costs time is computed when asked for."""

    name: str
    before: float
    now: float
    history: Sequence[Record]

    @property
    def rise(self) -> float:
        return self.now - self.before

    def error(self) -> float:
        """Standard error of the difference; infinite where there are too few steps between."""
        values = list(_values(self.history, self.name))
        enough = len(values) >= 2 * PART_STEPS + PART_BETWEEN
        return noise(values) * math.sqrt(2.0 / PART_STEPS) if enough else math.inf

    def varies(self) -> bool:
        return any(record.get(f"reward_std/{self.name}") for record in self.history)


def part_alone(history: Sequence[Record], past: Past) -> tuple[Change, Change] | None:
    """(the reward function that rose, the one that stayed low) where one gains and another does not."""
    changes = [change for name in past.parts if (change := _change(history, name)) is not None]
    rose = [c for c in changes if c.rise > PART_RISE]
    flat = [c for c in changes if abs(c.rise) <= PART_FLAT and 0.0 <= c.now <= PART_LOW]
    if not rose or not flat:  # most steps need no more than this
        return None
    rose = [c for c in rose if c.rise > FALL_ERRORS * c.error()]
    # Of a function that never varies `constant_parts` tells.
    flat = [c for c in flat if c.rise <= (error := c.error()) and abs(c.rise) + 2 * error <= PART_FLAT and c.varies()]
    return (max(rose, key=lambda c: c.rise), min(flat, key=lambda c: c.now)) if rose and flat else None


def _change(history: Sequence[Record], name: str) -> Change | None:
    first = list(itertools.islice(_values(history, name), PART_STEPS))
    last = list(itertools.islice(_values(reversed(history), name), PART_STEPS))
    return Change(name, statistics.fmean(first), statistics.fmean(last), history) if len(last) == PART_STEPS else None


def _values(history: Iterable[Record], name: str) -> Iterator[float]:
    return (value for record in history if (value := record.get(f"reward/{name}")) is not None)


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
    if len(keys) == 1:
        return [record for record in history if record.get(keys[0]) is not None]
    return [record for record in history if all(record.get(key) is not None for key in keys)]


def part_names(history: Sequence[Record]) -> list[str]:
    """Of the reward functions, in order of appearance."""
    keys = (key for record in history for key in record if key.startswith("reward/"))
    return list(dict.fromkeys(key.removeprefix("reward/") for key in keys))


def mean(records: Sequence[Record], key: str) -> float:
    return sum(record[key] for record in records) / len(records)


def best_mean(records: Sequence[Record], key: str, size: int, sign: int = 1) -> float | None:
    """The largest mean of `size` measured values in a row, the lowest with `sign` -1; None for fewer."""
    values = [record[key] for record in having(records, key)]
    means = [sum(values[i : i + size]) / size for i in range(len(values) - size + 1)]
    return None if not means else max(means) if sign > 0 else min(means)


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
