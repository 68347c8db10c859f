"""How old samples are, in weights versions and in optimizer updates. Pure; the only place that decides it.

`version` is that of the weights about to be updated. The staleness of a sample is `version` minus the version of its
oldest token: 0 when every token comes from the very weights that are updated. One training step publishes one version,
whatever the number of optimizer updates in it; the lag in updates is `updates_behind_max`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.errors import RunError
from offbeat.types import Rollout, Scored


def staleness(rollout: Rollout, version: int) -> int | None:
    """Versions between the rollout's oldest token and `version`; None for a rollout without tokens."""
    return version - rollout.version_min if rollout.versions else None


def staleness_range(scored: Sequence[Scored], version: int) -> tuple[int, int] | None:
    """Smallest and largest staleness of a batch; None when it has no token."""
    ages = [age for sample in scored if (age := staleness(sample.rollout, version)) is not None]
    return (min(ages), max(ages)) if ages else None


def check(scored: Sequence[Scored], version: int, max_staleness: int) -> None:
    """Raises `RunError` unless every sample may be trained on: not older than the bound, not from the future."""
    for sample in scored:
        rollout = sample.rollout
        age = staleness(rollout, version)
        if age is None:
            continue
        newest = max(token_version for token_version, _ in rollout.versions)
        name = f"sample {rollout.prompt_id} #{rollout.sample_index} (epoch {rollout.epoch}, {rollout.engine})"
        if age > max_staleness:
            raise RunError(
                f"{name} has tokens from weights version {rollout.version_min}, {age} behind version {version} that is "
                f"about to be updated; max_staleness = {max_staleness} allows {max_staleness}. It was not trained on. "
                "An engine missed a weight sync: see the engine's log."
            )
        if newest > version:
            raise RunError(
                f"{name} has tokens from weights version {newest}, which is newer than version {version} that is about "
                "to be updated. It was not trained on. The trainer lost an update, or the engine's count is wrong."
            )


def updates_behind_max(scored: Sequence[Scored], updates_at: Mapping[int, int], updates_done: int) -> int | None:
    """The largest number of optimizer updates between the weights of a token and those that a gradient of it changed.

    `updates_at[v]` is the number of updates that made version v; `updates_done` the number after this step. The last
    update of the step is applied to weights that have `updates_done - 1` updates behind them. So one update a step
    gives 0 on-policy and 1 one step off-policy; two give 1 and 3. None when the batch has no token or changed nothing.
    """
    versions = [sample.rollout.version_min for sample in scored if sample.rollout.versions]
    if not versions:
        return None
    return max(0, updates_done - 1 - updates_at[min(versions)])
