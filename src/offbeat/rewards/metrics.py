"""What a batch of scored rollouts says about its reward functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offbeat.types import Scored


def reward_metrics(scored: Sequence[Scored], names_by_source: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """For each function f that applies to any of the samples:

    `reward/f`: mean of its values, failed scores counted as 0 and abstentions left out (absent if all abstained);
    `reward_errors/f` and `reward_abstained/f`: how many, where there are any. And `reward_errors`: over all functions.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    failed: dict[str, int] = {}
    abstained: dict[str, int] = {}
    for one in scored:
        errors = {text.partition(": ")[0] for text in one.errors}
        for name in names_by_source[one.prompt.source]:
            if name not in one.parts and name not in errors:
                abstained[name] = abstained.get(name, 0) + 1
                continue
            sums[name] = sums.get(name, 0.0) + one.parts.get(name, 0.0)
            counts[name] = counts.get(name, 0) + 1
            failed[name] = failed.get(name, 0) + (name in errors)
    metrics = {f"reward/{name}": sums[name] / counts[name] for name in sums}
    metrics["reward_errors"] = float(sum(failed.values()))
    metrics.update({f"reward_errors/{name}": float(count) for name, count in failed.items() if count})
    metrics.update({f"reward_abstained/{name}": float(count) for name, count in abstained.items()})
    return metrics


def first_error(scored: Iterable[Scored]) -> str | None:
    """Text and sample id of one error, to show beside the count."""
    for one in scored:
        if one.errors:
            return f"{one.rollout.prompt_id} sample {one.rollout.sample_index}: {one.errors[0]}"
    return None
