"""The words of a display: one run's state, and the lines made of it. Knows no terminal: tests read it as text.

`RunStatus` remembers what later lines are compared with: rewards so far, the first evaluation of each set, the newest
parity gap, which alarms were given.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from offbeat.metrics import figures
from offbeat.metrics.alarms import Watch
from offbeat.metrics.evaluation import EvalResult

Record: TypeAlias = Mapping[str, Any]

SPARK = 12
"""Columns of the reward's history, at most."""
PACE = 10
"""Steps at the end from which the time to go is told."""
EVEN = 0.1
"""Sides whose times differ by less than this share of the longer one are called even."""


@dataclass(frozen=True)
class Header:
    """What is known before anything starts."""

    title: str
    rows: tuple[tuple[str, str], ...]
    """(label, text), e.g. (`model`, `Qwen3 · 1.7B parameters`), (`batch`, `batch_arithmetic(…)`)."""
    steps: int
    """Of the whole run."""


@dataclass(frozen=True)
class Activity:
    """What goes on right now, from the workers' heartbeats. None: not now."""

    tokens: int | None = None
    """Generated so far of the batch in the making."""
    samples: int | None = None
    """Finished so far of that batch, of all engines."""
    note: str = ""
    """What else, e.g. `training: update, micro-batch 3 of 8`."""


def batch_arithmetic(*, prompts: int, samples_per_prompt: int, updates: int, epochs: int, max_staleness: int) -> str:
    """`64 prompts × 8 = 512 samples → 1 update → 1 version; lag 1`."""
    total = updates * epochs
    passes = f" ({epochs} passes × {updates})" if epochs > 1 else ""
    word = "update" if total == 1 else "updates"
    return (
        f"{prompts} prompts × {samples_per_prompt} = {prompts * samples_per_prompt:,} samples → {total} {word}{passes} "
        f"→ 1 version; lag {max_staleness}"
    )


@dataclass
class RunStatus:
    """What has been seen of a run. Not thread-safe: one thread adds and asks."""

    steps: int
    rewards: list[float | None] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    """`<set>/avg@k` → its first value."""
    gap: tuple[int, float] | None = None
    """(step, largest |logprob difference|) of the newest parity probe."""
    watch: Watch = field(default_factory=Watch)

    @property
    def recent(self) -> Sequence[Record]:
        """The newest records, oldest first."""
        return self.watch.recent

    def restore(self, history: Sequence[Record]) -> None:
        """The records of the part of the run that a resume continues; its alarms are not given again."""
        for record in history:
            self.add(record)
            for key, value in record.items():
                prefix, _, name = key.partition("/")
                if prefix == "eval" and "avg@" in name and not name.endswith("_error") and value is not None:
                    self.first.setdefault(name, value)

    def add(self, record: Record) -> list[str]:
        """Takes a step's record; returns the alarms that it gives rise to, each kind once in a run."""
        if "reward_mean" not in record:
            return []
        self.rewards.append(record["reward_mean"])
        if record.get("logprob_gap_max") is not None:
            self.gap = (record["step"], record["logprob_gap_max"])
        return [alarm.text for alarm in self.watch.add(record)]

    def eta_s(self) -> float | None:
        """Seconds to go, from the median of the last steps; the first step of a run has no overlap and is left out."""
        last = list(self.recent)[-PACE:]
        times = [record["time_step_s"] for record in last if record.get("time_step_s") is not None]
        times = times[1:] if len(times) > 1 and len(self.rewards) <= PACE else times
        if not times:
            return None
        return statistics.median(times) * max(0, self.steps - self.done)

    @property
    def done(self) -> int:
        """Steps trained."""
        return self.recent[-1]["step"] + 1 if self.recent else 0

    def difference(self, result: EvalResult) -> float | None:
        """From the set's first point; None for the first itself."""
        key = f"{result.name}/avg@{result.samples_per_prompt}"
        if key in self.first:
            return result.avg - self.first[key]
        self.first[key] = result.avg
        return None


def reward_words(record: Record, rewards: Sequence[float | None] = (), width: int | None = None) -> str:
    """`reward .49 ▂▃▄▅ · spread 61 % · truncated 2 % · length 231 · lag 1`.

    The history of rewards takes what `width` columns leave free, and is left out where that is too little to see.
    """
    reward, *rest = _reward_parts(record)
    free = 0 if width is None else width - len(" · ".join((reward, *rest))) - 1
    spark = figures.sparkline(rewards, min(free, SPARK)) if free >= 4 else ""
    return " · ".join((f"{reward} {spark}".rstrip(), *rest))


def milestone_words(record: Record) -> str:
    """`reward .49 · spread 61 % · truncated 2 % · length 231 · 9.3s`."""
    return " · ".join((*_reward_parts(record)[:-1], figures.seconds(record.get("time_step_s"))))


def _reward_parts(record: Record) -> tuple[str, ...]:
    no_spread = record.get("groups_without_spread_fraction")
    spread = None if no_spread is None else 1.0 - no_spread
    return (
        f"reward {figures.decimal(record.get('reward_mean'))}",
        f"spread {figures.percent(spread)}",
        f"truncated {figures.percent(record.get('truncated_fraction'))}",
        f"length {figures.count(record.get('response_length_mean'))}",
        f"lag {lag(record)}",
    )


def lag(record: Record) -> str:
    """`1`, or `0–2` when the samples of a step differ."""
    low, high = record.get("staleness_min"), record.get("staleness_max")
    if low is None or high is None:
        return figures.MISSING
    return str(high) if low == high else f"{low}–{high}"


def time_words(record: Record) -> str:
    """`generate 9.1s │ train 7.4s │ sync .2s   slower side: engines`."""
    times = [f"{name} {figures.seconds(record.get(f'time_{name}_s'))}" for name in ("generate", "train", "sync")]
    side = slower_side(record)
    return " │ ".join(times) + (f"   {side}" if side else "")


def slower_side(record: Record) -> str:
    """Which side a faster machine would help; empty when it was not measured."""
    sampling = (record.get("time_generate_s") or 0.0, record.get("time_reward_s") or 0.0)
    train_s = record.get("time_train_s") or 0.0
    if sum(sampling) <= 0.0 or train_s <= 0.0:
        return ""
    if abs(sum(sampling) - train_s) < EVEN * max(sum(sampling), train_s):
        return "sides even"
    if train_s > sum(sampling):
        return "slower side: trainer"
    return "slower side: " + ("rewards" if sampling[1] > sampling[0] else "engines")


def gap_words(record: Record, gap: tuple[int, float] | None) -> str:
    """`gap .0021 · parity ok at step 20 · entropy 1.21 · grad norm .83`. A probe beyond its tolerance ends the run."""
    words: list[str] = []
    if gap is not None:
        words += [f"gap {figures.decimal(gap[1], 4)}", f"parity ok at step {gap[0]}"]
    for name, key in (("entropy", "entropy"), ("grad norm", "grad_norm")):
        if figures.is_number(record.get(key)):
            words.append(f"{name} {figures.decimal(record[key])}")
    return " · ".join(words)


def evaluation_words(result: EvalResult, difference: float | None) -> str:
    """`held-out avg@4 .487 ±.021 (+.085) · pass@4 .71 ±.02 · version 25`."""
    change = "" if difference is None else f" ({figures.signed(difference)})"
    words = [
        f"{result.name} avg@{result.samples_per_prompt} {figures.with_error(result.avg, result.avg_error)}{change}"
    ]
    most = max(result.pass_at)
    if most > 1:
        words.append(f"pass@{most} {figures.with_error(*result.pass_at[most])}")
    words.append(f"version {result.version}")
    if result.truncated_fraction > 0:
        words.append(f"truncated {figures.percent(result.truncated_fraction)}")
    if result.reward_errors:
        words.append(f"reward errors {result.reward_errors}")
    return " · ".join(words)


def activity_words(activity: Activity) -> str:
    """`generating 12,345 tokens · training: update, micro-batch 3 of 8`; empty where nothing goes on."""
    words: list[str] = []
    if activity.tokens is not None:
        words.append(f"generating {figures.count(activity.tokens)} tokens" if activity.tokens else "generating")
    # A worker that has nothing to tell yet leaves a name and a colon.
    if note := activity.note.strip().rstrip(":"):
        words.append(note)
    return " · ".join(words)


def sampled_words(activity: Activity, total: int | None) -> str:
    """`130/512 samples`, of so many asked for; empty where nothing is sampled."""
    if activity.samples is None or total is None:
        return ""
    return f"{of(min(activity.samples, total), total)} samples"


def of(done: int, total: int | None) -> str:
    """`3/8`, or `3` when nobody knows how many there are."""
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"
