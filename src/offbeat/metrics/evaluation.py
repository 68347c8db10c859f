"""Statistics of one evaluation, from scored samples. Pure; `offbeat.evaluate` runs the engines.

avg@k     mean reward of k samples a prompt, averaged over prompts
pass@k    chance that at least one of k samples passes, estimated without bias from n ≥ k samples of each prompt
          (Chen et al. 2021, arXiv 2107.03374, equation 1)
error     one standard error, clustered by prompt: samples of a prompt are not independent, prompts are
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import RunError
from offbeat.metrics.parts import part_means
from offbeat.types import Rollout, Scored, pass_at


@dataclass(frozen=True)
class EvalResult:
    """One point of one set."""

    name: str
    version: int
    """Of the weights that sampled every token."""
    step: int
    prompts: int
    samples_per_prompt: int
    avg: float
    avg_error: float | None
    """None with a single prompt: nothing to estimate a spread from."""
    pass_at: Mapping[int, tuple[float, float | None]]
    """k → (pass@k, its standard error)."""
    truncated_fraction: float
    response_length_mean: float
    parts: Mapping[str, float]
    """Reward function → mean over the samples that it scored."""
    reward_errors: int

    def to_metrics(self) -> dict[str, float | int | None]:
        """The keys of this point in metrics.jsonl, `eval/<name>/…`."""
        prefix = f"eval/{self.name}/"
        found: dict[str, float | int | None] = {
            f"{prefix}avg@{self.samples_per_prompt}": self.avg,
            f"{prefix}avg@{self.samples_per_prompt}_error": self.avg_error,
        }
        for k, (value, error) in self.pass_at.items():
            found[f"{prefix}pass@{k}"] = value
            found[f"{prefix}pass@{k}_error"] = error
        found |= {
            f"{prefix}weights_version": self.version,
            f"{prefix}prompts": self.prompts,
            f"{prefix}truncated_fraction": self.truncated_fraction,
            f"{prefix}response_length_mean": self.response_length_mean,
            f"{prefix}reward_errors": self.reward_errors,
        }
        return found | {f"{prefix}reward/{name}": value for name, value in self.parts.items()}


def evaluated_at(step: int, records: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The held-out sets of which these records of metrics.jsonl have a point at a step."""
    return frozenset(
        key.split("/")[1]
        for record in records
        if record.get("step") == step
        for key in record
        if key.startswith("eval/")
    )


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)` for n samples of which c passed: Chen et al. 2021, equation 1.

    Computed as a product, as in the paper, so that no binomial overflows. Needs 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise ValueError(f"pass@{k} of {samples} samples with {passed} passed: needs 1 <= k <= n and 0 <= c <= n")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def mean_with_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of one value a prompt and its standard error `std(ddof=1) / sqrt(prompts)`; no error for one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def summarize(
    name: str,
    scored: Sequence[Scored],
    *,
    step: int,
    version: int,
    pass_threshold: float = 1.0,
) -> EvalResult:
    """Statistics of one evaluation. Every prompt must have the same number of samples.

    Raises `RunError` when a token has another version than `version`, or when samples are missing.
    """
    groups: dict[str, list[Scored]] = {}
    for sample in scored:
        must_have_version(name, sample.rollout, version)
        groups.setdefault(sample.rollout.prompt_id, []).append(sample)
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1:
        raise RunError(f"eval {name}: prompts have {sorted(sizes)} samples; each needs the same number, at least one.")
    samples = sizes.pop()
    avg, avg_error = mean_with_error([math.fsum(s.reward for s in g) / samples for g in groups.values()])
    passed = [sum(sample.reward >= pass_threshold for sample in group) for group in groups.values()]
    return EvalResult(
        name=name,
        version=version,
        step=step,
        prompts=len(groups),
        samples_per_prompt=samples,
        avg=avg,
        avg_error=avg_error,
        pass_at={k: mean_with_error([pass_at_k(samples, c, k) for c in passed]) for k in pass_at(samples)},
        truncated_fraction=sum(sample.rollout.finish_reason == "length" for sample in scored) / len(scored),
        response_length_mean=sum(len(sample.rollout.token_ids) for sample in scored) / len(scored),
        parts=part_means(scored),
        reward_errors=sum(len(sample.errors) for sample in scored),
    )


def must_have_version(name: str, rollout: Rollout, version: int) -> None:
    """Raises `RunError` when any token was sampled by other weights than the point is labelled with."""
    strange = sorted({found for found, _ in rollout.versions if found != version})
    if strange:
        raise RunError(
            f"eval {name}: sample {rollout.prompt_id} #{rollout.sample_index} of {rollout.engine} has tokens from "
            f"weights version {strange[0]}, but the point is labelled {version}. The engine missed a weight sync."
        )
