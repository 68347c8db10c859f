"""Do held-out accuracy and rollout reward of one weights version agree? A pure look at samples.jsonl.

Both are drawn by the engines, so where training and held-out prompts are of one kind they agree within noise. They part
when the weights that sampled are not those that the line is labelled with: an engine that is never synced keeps its
first reward, while what the trainer's weights can do rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.metrics.evaluation import mean_with_error


@dataclass(frozen=True)
class Comparison:
    """One weights version. Errors are standard errors, clustered by prompt."""

    version: int
    heldout: float
    heldout_error: float
    rollout: float
    rollout_error: float

    @property
    def difference(self) -> float:
        return self.heldout - self.rollout

    @property
    def variance(self) -> float:
        return self.heldout_error**2 + self.rollout_error**2


def compare(samples: Iterable[Mapping[str, Any]], heldout: str) -> list[Comparison]:
    """Every version with samples of the set `heldout` and with training samples, in order.

    `samples` are lines of samples.jsonl. Lines whose tokens are of several versions are left out, and so are versions
    with fewer than two prompts on either side: they have no error.
    """
    rewards: dict[tuple[int, str | None], dict[str, list[float]]] = {}
    for line in samples:
        versions = {version for version, _ in line["versions"]}
        if len(versions) == 1 and line["eval"] in (None, heldout):
            prompts = rewards.setdefault((versions.pop(), line["eval"]), {})
            prompts.setdefault(line["prompt_id"], []).append(line["reward"])
    points = {key: mean_with_error([sum(r) / len(r) for r in prompts.values()]) for key, prompts in rewards.items()}
    found: list[Comparison] = []
    for version in sorted(version for version, name in points if name is None and (version, heldout) in points):
        (own, own_error), (rollout, rollout_error) = points[version, heldout], points[version, None]
        if own_error is not None and rollout_error is not None:
            found.append(Comparison(version, own, own_error, rollout, rollout_error))
    return found


def sigmas(comparisons: Sequence[Comparison]) -> float:
    """The mean difference in units of its standard error, signed: above about 4 it is no noise."""
    variance = sum(comparison.variance for comparison in comparisons)
    difference = sum(comparison.difference for comparison in comparisons)
    return difference / math.sqrt(variance) if variance else math.copysign(math.inf, difference) if difference else 0.0
