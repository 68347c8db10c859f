"""Says in words when a run is unhealthy, and what to do. Pure: records in, sentences out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from offbeat.metrics.figures import percent

Record: TypeAlias = Mapping[str, Any]

WINDOW = 3
"""A share must be too high on average over this many steps: a single small batch is no reason to speak."""
NO_SPREAD_LIMIT = 0.7
TRUNCATED_LIMIT = 0.1


@dataclass(frozen=True)
class Alarm:
    kind: str
    """One alarm of a kind is shown once in a run."""
    text: str


def alarms(history: Sequence[Record]) -> list[Alarm]:
    """What is wrong as of the newest record. `history` needs the last few records only, oldest first."""
    if not history:
        return []
    checks: tuple[Callable[[Sequence[Record]], Iterable[Alarm]], ...] = (
        _skipped,
        _reward_errors,
        _no_spread,
        _truncated,
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
            f"step {record['step']}: {_were_skipped(empty)} because in every group all rewards are equal: nothing can "
            "be learned from that. Use easier or harder data, or more samples_per_prompt.",
        )


def _were_skipped(updates: int) -> str:
    return "1 update was skipped" if updates == 1 else f"{updates} updates were skipped"


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


def _no_spread(history: Sequence[Record]) -> Iterable[Alarm]:
    share = _recent(history, "groups_without_spread_fraction")
    if share is None or share <= NO_SPREAD_LIMIT:
        return
    reward = _recent(history, "reward_mean")
    best = max((r["reward_mean"] for r in history if r.get("reward_mean") is not None), default=None)
    if reward is not None and best is not None and reward < 0.5 * best:
        advice = "The reward has fallen by more than half: stop, and lower trainer.lr."
    elif reward is not None and reward <= 0.1:
        advice = "Nearly all fail: use easier data, more samples_per_prompt, or a [warmup]."
    else:
        advice = "They teach nothing: use harder data, or more samples_per_prompt."
    yield Alarm("no-spread", f"step {history[-1]['step']}: {percent(share)} of groups have no spread. {advice}")


def _truncated(history: Sequence[Record]) -> Iterable[Alarm]:
    share = _recent(history, "truncated_fraction")
    if share is not None and share > TRUNCATED_LIMIT:
        yield Alarm(
            "truncated",
            f"step {history[-1]['step']}: {percent(share)} of samples were cut off at max_new_tokens. Raise "
            "sampling.max_new_tokens, or check that the model's stop ids are right (`offbeat check`).",
        )


def _recent(history: Sequence[Record], key: str) -> float | None:
    """Mean over the last `WINDOW` records; None until there are so many."""
    values = [record.get(key) for record in history[-WINDOW:]]
    found = [value for value in values if value is not None]
    # Rounded, so that a share exactly at a limit is not above it by the last bit of a sum.
    return round(sum(found) / len(found), 9) if len(found) == WINDOW else None
