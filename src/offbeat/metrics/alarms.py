"""Says in words when a run is unhealthy, and what to do. Pure: records in, sentences out.

What shows in a step or three is found here; what shows over many steps, with its thresholds, in `trends`.
docs/metrics.md lists all alarms, docs/does-not-learn.md says what to do about each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from offbeat.metrics import trends
from offbeat.metrics.figures import decimal, percent, printable
from offbeat.metrics.trends import FALL_WINDOW, NEAR_ZERO

Record: TypeAlias = Mapping[str, Any]

WINDOW = 3
"""A share must be too high on average over this many steps: a single small batch is no reason to speak."""
NO_SPREAD_LIMIT = 0.7
TRUNCATED_LIMIT = 0.1
KL_LIMIT = 0.5
"""Of `kl_engine_trainer`, in each of the last `WINDOW` steps: a single step's estimate has a heavy tail."""
HISTORY = 200
"""Records that alarms look at, at most."""


@dataclass(frozen=True)
class Alarm:
    kind: str
    """One alarm of a kind is shown once in a run."""
    text: str


class Watch:
    """The alarms of a run as it goes on. Not thread-safe."""

    def __init__(self) -> None:
        self.recent: deque[Record] = deque(maxlen=HISTORY)
        self.told: set[str] = set()
        self._past = trends.Past()

    def add(self, record: Record) -> list[Alarm]:
        """Takes a step's record, oldest first; returns the alarms of which the run has not had the kind yet."""
        self.recent.append(record)
        self._past.add(record)
        new = [alarm for alarm in alarms(list(self.recent), self._past, self.told) if alarm.kind not in self.told]
        self.told.update(alarm.kind for alarm in new)
        return new


def alarms(history: Sequence[Record], past: trends.Past | None = None, told: Collection[str] = ()) -> list[Alarm]:
    """What is wrong as of the newest record. `history` needs the last `HISTORY` records only, oldest first.

    `past`: of the whole run, which may be longer; default: of `history`. Of kinds that were `told` nothing is computed
    that costs more than asking.
    """
    if not history:
        return []
    past = past or trends.Past.of(history)
    found = [alarm for check in _CHECKS for alarm in check(history)]
    for kind, trend in _TRENDS.items():
        if kind not in told:
            found += trend(history, past)
    return found


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
        first = record.get("reward_error_first")
        cause = f"; the first: {printable(' '.join(first.split()), None)}" if isinstance(first, str) else ""
        yield Alarm(
            "reward-errors",
            f"step {record['step']}: {calls} failed and counted as 0{cause}. The texts are under 'errors' in "
            "samples.jsonl; mend the function, or raise rewards.timeout_s if it is too slow.",
        )


def _reward_fell(history: Sequence[Record], past: trends.Past) -> Iterable[Alarm]:
    fall = trends.fall(history)
    if fall is not None:
        best, now = fall
        by = " by more than half" if best > NEAR_ZERO else ""
        yield Alarm(
            "reward-fell",
            f"step {history[-1]['step']}: the reward has fallen{by}, from {decimal(best)} (best mean of "
            f"{FALL_WINDOW} steps) to {decimal(now)} ({_mean_of(FALL_WINDOW)}). Stop, and lower trainer.lr.",
        )


def _no_spread(history: Sequence[Record]) -> Iterable[Alarm]:
    share = _recent(history, "groups_without_spread_fraction")
    if share is None or share <= NO_SPREAD_LIMIT or trends.fall(history) is not None:
        return
    reward = _recent(history, "reward_mean")
    best = trends.best_mean(history[:-WINDOW], "reward_mean", WINDOW)
    if best is not None and reward is not None and reward <= NEAR_ZERO < best:
        advice = "Nearly all fail, unlike before: use easier data, or lower trainer.lr if it does not recover."
    else:
        advice = spread_advice(share, _recent(history, "solved_groups_fraction"))
    yield Alarm(
        "no-spread",
        f"step {history[-1]['step']}: {percent(share)} of groups are without spread, all rewards equal, and teach "
        f"nothing ({_mean_of(WINDOW)}). {advice}",
    )


def spread_advice(without: float, solved: float | None) -> str:
    """What to do about so many groups without spread, of which `solved` are good; both are shares of all groups.

    None: not known, as in records of older releases.
    """
    if solved is None:
        return "Use easier data if most of them fail, harder data if most are solved, or more samples_per_prompt."
    if solved > without / 2:
        return "Most of them are solved: use harder data, or more samples_per_prompt."
    return "Most of them fail: use easier data, more samples_per_prompt, or a [warmup]."


def _truncated(history: Sequence[Record]) -> Iterable[Alarm]:
    share = _recent(history, "truncated_fraction")
    if share is not None and share > TRUNCATED_LIMIT:
        yield Alarm(
            "truncated",
            f"step {history[-1]['step']}: {percent(share)} of samples were cut off at max_new_tokens "
            f"({_mean_of(WINDOW)}). Raise sampling.max_new_tokens, or check that the model's stop ids are right "
            "(offbeat check).",
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


def _gap_grew(history: Sequence[Record], past: trends.Past) -> Iterable[Alarm]:
    grown = trends.gap_growth(past)
    if grown is not None:
        first, now = grown
        yield Alarm(
            "gap-grew",
            f"step {history[-1]['step']}: engines and trainer compute the same weights more and more differently: "
            f"logprob_gap_mean rose from {first:.1e} to {now:.1e} (means of {trends.GAP_PROBES} parity probes). It is "
            'rounding, of logits that grow: lower trainer.lr, or set trainer.dtype = "float32".',
        )


def _entropy_collapsed(history: Sequence[Record], past: trends.Past) -> Iterable[Alarm]:
    collapsed = trends.entropy_collapse(history, past)
    if collapsed is not None:
        best, now = collapsed
        yield Alarm(
            "entropy-collapsed",
            f"step {history[-1]['step']}: the entropy has collapsed from {decimal(best)} to {decimal(now, 3)} nats a "
            f"token ({_mean_of(FALL_WINDOW)}), and the reward no longer rises: the model says the same each time, so "
            "nothing new is tried. Start again with a lower trainer.lr or a higher loss.clip_high.",
        )


def _constant_reward(history: Sequence[Record], past: trends.Past) -> Iterable[Alarm]:
    for name, (value, steps) in trends.constant_parts(history, past).items():
        told = printable(name, None)
        all_steps = f"all {steps} steps" if steps == len(history) else f"the {steps} steps in which it was called"
        yield Alarm(
            f"constant-reward/{name}",
            f"step {history[-1]['step']}: reward function {told} has returned {decimal(value)} for every sample of "
            f"{all_steps}: it teaches nothing. Compare completion and answer of some lines of samples.jsonl "
            "with what it looks for; if it is right, the data is too hard or too easy for the model.",
        )


def _one_part_alone(history: Sequence[Record], past: trends.Past) -> Iterable[Alarm]:
    alone = trends.part_alone(history, past)
    if alone is not None:
        rose, flat = alone
        yield Alarm(
            "one-part-alone",
            f"step {history[-1]['step']}: reward/{printable(rose.name, None)} rose from {decimal(rose.before)} to "
            f"{decimal(rose.now)} while reward/{printable(flat.name, None)} stays at {decimal(flat.now)}: the model "
            "learns what is easy. Give the other a larger weight, or pay the easy one only where the other succeeds.",
        )


def _slow_engine(history: Sequence[Record], past: trends.Past) -> Iterable[Alarm]:
    slow = trends.slow_engine(history)
    if slow is not None:
        engine, ratio = slow
        yield Alarm(
            "slow-engine",
            f"step {history[-1]['step']}: {printable(engine, None)} takes {decimal(ratio, 1)} times as long for a "
            f"token as the other engines ({_mean_of(trends.SLOW_STEPS)}), and each step waits for it. Look for another "
            "program on its device, a throttled device, or fewer threads; its row in trace.json shows when.",
        )


_CHECKS: tuple[Callable[[Sequence[Record]], Iterable[Alarm]], ...] = (
    _skipped,
    _reward_errors,
    _no_spread,
    _truncated,
    _disagreement,
)
_TRENDS: Mapping[str, Callable[[Sequence[Record], trends.Past], Iterable[Alarm]]] = {
    "reward-fell": _reward_fell,
    "gap-grew": _gap_grew,
    "entropy-collapsed": _entropy_collapsed,
    "constant-reward": _constant_reward,  # a kind for each function
    "one-part-alone": _one_part_alone,
    "slow-engine": _slow_engine,
}
"""Kind of alarm → what finds it."""


def _mean_of(steps: int) -> str:
    return f"mean of the last {steps} steps"


def _recent(history: Sequence[Record], key: str) -> float | None:
    """Mean over the last `WINDOW` records; None until there are so many."""
    values = [record.get(key) for record in history[-WINDOW:]]
    found = [value for value in values if value is not None]
    # Rounded, so that a share exactly at a limit is not above it by the last bit of a sum.
    return round(sum(found) / len(found), 9) if len(found) == WINDOW else None
