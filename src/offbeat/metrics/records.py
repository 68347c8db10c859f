"""The record of a step: one JSON object for metrics.jsonl, from the values that the step left behind. Pure.

Every key of `REQUIRED` is in every record; what was not measured is null. JSON has no NaN and no infinity: such a
number is written as null and its key is listed in `nonfinite`, so that "not measured" and "not a number" stay apart
(a mean over no update at all, because all were skipped, is not a number either).
docs/metrics.md explains each key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from offbeat.metrics.evaluation import EvalResult
from offbeat.metrics.overlap import intersection, intervals_of, length, overlap, seconds_of
from offbeat.metrics.parts import part_deviations, part_errors, part_means
from offbeat.metrics.spans import Window
from offbeat.metrics.trends import NEAR_ZERO
from offbeat.ports import SyncReport
from offbeat.rpc.messages import UpdateResult
from offbeat.types import Batch, Rollout, Scored

Json: TypeAlias = dict[str, Any]

SPREAD_TOLERANCE = 1e-9
"""Rewards of a group are equal when they differ by less, relative to the largest (or 1): as in the advantages, which
cannot be imported here because they need torch; a test holds the two together."""

ERROR_LENGTH = 300
"""Characters of the first error of a step; its whole text is in samples.jsonl."""

FROM_TRAINER = (
    "loss",
    "lr",
    "grad_norm",
    "entropy",
    "kl_reference",
    "kl_engine_trainer",
    "clip_fraction_low",
    "clip_fraction_high",
    "ratio_mean",
    "ratio_max",
    "ess",
)
"""Taken from `UpdateResult.metrics` under these names; null where the trainer does not give one."""

SYNC_PHASES = ("rendezvous", "transfer", "verify", "probe")
"""Of a transfer: `SyncReport.phases` with these names."""

REQUIRED = (
    "step",
    "weights_version",
    "reward_mean",
    "reward_std",
    "response_length_mean",
    "truncated_fraction",
    "groups_without_spread_fraction",
    "solved_groups_fraction",
    "reward_errors",
    "staleness_min",
    "staleness_max",
    "updates_behind_max",
    *FROM_TRAINER,
    "logprob_gap_mean",
    "logprob_gap_max",
    "tokens_generated",
    "tokens_trained",
    "time_step_s",
    "time_generate_s",
    "time_wait_s",
    "time_reward_s",
    "time_train_s",
    "time_sync_s",
    *(f"time_sync_{phase}_s" for phase in SYNC_PHASES),
    "time_evaluate_s",
    "sync_bytes",
    "overlap",
    "skipped_updates",
    "nonfinite",
)
"""In every record of a step, whatever happened; more keys may follow."""


def step_record(
    *,
    step: int,
    version: int,
    scored: Sequence[Scored],
    batch: Batch,
    update: UpdateResult,
    window: Window,
    sync: SyncReport | None,
    staleness: tuple[int, int] | None,
    updates_behind_max: int | None,
    evaluations: Sequence[EvalResult] = (),
) -> Json:
    """The record of one step.

    `version` is that of the weights that the step updated; `sync` the transaction since the previous record, None
    where there was none; `evaluations` those since the previous record (they ran at `version`); `staleness` and
    `updates_behind_max` come from `offbeat.staleness`.
    """
    low, high = staleness or (None, None)
    record: Json = {
        "step": step,
        "weights_version": version,
        **sample_statistics(scored),
        "staleness_min": low,
        "staleness_max": high,
        "updates_behind_max": updates_behind_max,
        **{key: update.metrics.get(key) for key in FROM_TRAINER},
        "logprob_gap_mean": None if sync is None else sync.probe_gap_mean,
        "logprob_gap_max": None if sync is None else sync.probe_gap_max,
        "tokens_trained": tokens_trained(batch, update),
        **times(step, window),
        **sync_times(sync),
        "sync_bytes": 0 if sync is None else sync.bytes_moved,
        "overlap": overlap(window.spans, window.start_s, window.end_s),
        "skipped_updates": update.skipped_updates,
    }
    for result in evaluations:
        record |= result.to_metrics()
    for key, value in update.metrics.items():
        # What else the trainer tells is kept; it never replaces a number of the controller's own.
        record.setdefault(key, value)
    return finite(record)


def evaluation_record(step: int, version: int, evaluations: Sequence[EvalResult], window: Window) -> Json:
    """The last line of metrics.jsonl: the evaluations after the last step, which no step's record could hold.

    `window` is the time since that step.
    """
    record: Json = {"step": step, "weights_version": version, "time_evaluate_s": seconds_of(window, "evaluate")}
    for result in evaluations:
        record |= result.to_metrics()
    return finite(record)


def sample_statistics(scored: Sequence[Scored]) -> Json:
    """What the samples alone tell. Lengths are counts of sampled tokens, never the width of a padded array.

    `reward_std` is the standard deviation over all samples of the step (divided by n). A group is what has the same
    (`prompt_id`, `epoch`); see `has_spread`.
    """
    lengths = [len(sample.rollout.token_ids) for sample in scored]
    rewards = [sample.reward for sample in scored]
    groups: dict[tuple[str, int], list[float]] = {}
    for sample in scored:
        groups.setdefault((sample.rollout.prompt_id, sample.rollout.epoch), []).append(sample.reward)
    mean = average(rewards)
    return {
        "reward_mean": mean,
        "reward_std": None if mean is None else math.sqrt(average([(r - mean) ** 2 for r in rewards]) or 0.0),
        "response_length_mean": average(lengths),
        "truncated_fraction": average([sample.rollout.finish_reason == "length" for sample in scored]),
        "groups_without_spread_fraction": average([not has_spread(group) for group in groups.values()]),
        "solved_groups_fraction": solved_fraction(list(groups.values())),
        **{f"reward/{name}": value for name, value in part_means(scored).items()},
        **{f"reward_std/{name}": value for name, value in part_deviations(scored).items()},
        **{f"engine_seconds_per_token/{name}": value for name, value in seconds_per_token(scored).items()},
        "reward_errors": sum(len(sample.errors) for sample in scored),
        **{f"reward_errors/{name}": count for name, count in part_errors(scored).items()},
        **_first_error(scored),
        "tokens_generated": sum(lengths),
    }


def _first_error(scored: Sequence[Scored]) -> Json:
    found = next((error for sample in scored for error in sample.errors), None)
    return {} if found is None else {"reward_error_first": found[:ERROR_LENGTH]}


def seconds_per_token(scored: Sequence[Scored]) -> dict[str, float]:
    """Engine → its seconds for each token of its longest sample; nothing to compare with one engine.

    Samples are made side by side, so the longest one says how long an engine has to work, and its length differs. Only
    engines with equally many samples are compared: one more prompt may mean a wave more, or wider batches. Those are
    the largest number of equal ones, of two such the ones with more samples.
    """
    rollouts: dict[str, list[Rollout]] = {}
    for sample in scored:
        rollouts.setdefault(sample.rollout.engine, []).append(sample.rollout)
    shares = Counter(len(own) for own in rollouts.values())
    common = max(shares, key=lambda share: (shares[share], share), default=0)
    if shares[common] < 2:
        return {}
    return {
        engine: (max(r.finished_s for r in own) - min(r.started_s for r in own))
        / max(1, *(len(r.token_ids) for r in own))
        for engine, own in sorted(rollouts.items())
        if len(own) == common
    }


def has_spread(rewards: Sequence[float]) -> bool:
    """False for a group that teaches nothing: its rewards are all equal, up to the last bits of a weighted sum."""
    low, high = min(rewards), max(rewards)
    return high - low > SPREAD_TOLERANCE * max(abs(low), abs(high), 1.0)


def solved_fraction(groups: Sequence[Sequence[float]]) -> float | None:
    """Share of all groups that are without spread and good: in the upper half of the rewards seen.

    Where all rewards are one, its sign alone tells. None without a group.
    """
    if not groups:
        return None
    low, high = min(map(min, groups)), max(map(max, groups))
    good = (low + high) / 2 if has_spread([low, high]) else NEAR_ZERO
    return sum(not has_spread(group) and group[0] > good for group in groups) / len(groups)


def average(values: Sequence[float]) -> float | None:
    """None for nothing. NaN goes through: it is listed, not hidden."""
    return sum(values) / len(values) if values else None


def tokens_trained(batch: Batch, update: UpdateResult) -> int:
    """As the trainer counted them (tokens of skipped updates left out), else as many as it was given with a loss.

    Each pass over a token counts.
    """
    told = update.metrics.get("tokens_trained", math.nan)
    if math.isfinite(told):
        return int(told)
    return sum(int(sample.loss_mask.sum()) for minibatch in batch.minibatches for sample in minibatch.samples)


def times(step: int, window: Window) -> Json:
    """Seconds. Generation and scoring are those of the samples trained in this step, whenever they ran."""
    evaluate_s = seconds_of(window, "evaluate")
    return {
        "time_step_s": window.seconds - evaluate_s,
        "time_generate_s": seconds_of(window, "generate", step),
        "time_wait_s": waited_s(step, window),
        "time_reward_s": seconds_of(window, "reward", step),
        "time_train_s": seconds_of(window, "train"),
        "time_sync_s": seconds_of(window, "sync"),
        "time_evaluate_s": evaluate_s,
    }


def sync_times(sync: SyncReport | None) -> Json:
    """Seconds of each phase of the transfer; null without one, and for a phase that it did not have."""
    took = {} if sync is None else {phase.name: phase.end_s - phase.start_s for phase in sync.phases}
    return {f"time_sync_{name}_s": took.get(name) for name in SYNC_PHASES}


def waited_s(step: int, window: Window) -> float:
    """Seconds of the window in which this step's samples were in the making while the trainer did not train."""
    own = [span for span in window.spans if span.step == step]
    making = intersection(intervals_of(own, "generate") + intervals_of(own, "reward"), [(window.start_s, window.end_s)])
    return length(making) - length(intersection(making, intervals_of(window.spans, "train")))


def finite(record: Mapping[str, Any]) -> Json:
    """The same record with NaN and infinities replaced by null and their keys in `nonfinite`."""
    strange = sorted(key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value))
    return {**record, **dict.fromkeys(strange), "nonfinite": strange}
