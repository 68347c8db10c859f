"""Sums over trained tokens that become the metrics of a step.

A micro-batch adds one vector on the device; it is read once, at the end of the update. Ranks add theirs. A step's
metrics are means over its updates, weighted by trained tokens, and never see an update that was not applied. A metric
that has no value (nothing was trained) is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.algorithms.losses import PolicyLoss, effective_sample_share
from offbeat.trainer.mesh import Mesh

_SUMS = (
    "loss", "tokens", "outside", "ratio", "ratio_square", "k1", "k3", "entropy", "low", "high", "dual",
)  # fmt: skip


@dataclass
class UpdateTally:
    """One update, on one rank, while its micro-batches run."""

    device: torch.device
    _vectors: list[Tensor] = field(default_factory=list)
    _maxima: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor, policy: PolicyLoss, entropy_N: Tensor, trained_N: Tensor, outside: Tensor) -> None:
        """`trained_N` (bool) says which tokens count; `outside` how many were left out; `loss` is this share's."""

        def total(values_N: Tensor) -> Tensor:
            return torch.where(trained_N, values_N.float(), 0.0).sum()

        ratio_N = policy.ratio_N
        self._vectors.append(
            torch.stack(
                [
                    loss.detach(),
                    trained_N.sum().float(),
                    outside.float(),
                    total(ratio_N),
                    total(ratio_N**2),
                    total(policy.kl_k1_N),
                    total(policy.kl_k3_N),
                    total(entropy_N),
                    total(policy.clipped_low_N),
                    total(policy.clipped_high_N),
                    total(policy.clipped_dual_N),
                ]
            )
        )
        self._maxima.append(torch.where(trained_N, ratio_N, 0.0).max())

    def finish(self, mesh: Mesh) -> UpdateFacts:
        """The sums of all ranks, as numbers."""
        sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        maximum = torch.zeros(1)
        if self._vectors:
            sums = torch.stack(self._vectors).cpu().double().sum(0)
            maximum = torch.stack(self._maxima).max().reshape(1).cpu()
        if mesh.world > 1:
            sums, maximum = mesh.sum(sums.to(self.device)).cpu(), mesh.maximum(maximum.to(self.device)).cpu()
        return UpdateFacts(dict(zip(_SUMS, sums.tolist(), strict=True)), float(maximum))


@dataclass(frozen=True)
class UpdateFacts:
    """One update, over all ranks."""

    sums: dict[str, float]
    ratio_max: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.sums["loss"])


@dataclass
class StepTally:
    """One training step: the updates that were applied, and the indices of those that were not."""

    applied: list[tuple[UpdateFacts, float, float]] = field(default_factory=list)
    """(facts, learning rate, gradient norm)."""
    empty: list[int] = field(default_factory=list[int])
    """Updates without a token to train."""
    nonfinite: list[int] = field(default_factory=list[int])
    """Updates left out for a non-finite loss or gradient."""

    @property
    def skipped(self) -> tuple[int, ...]:
        return tuple(sorted(self.empty + self.nonfinite))

    def metrics(self) -> dict[str, float]:
        facts = [f for f, _, _ in self.applied]
        tokens = sum(f.sums["tokens"] for f in facts)

        def mean(values: list[float]) -> float:
            weighted = sum(v * f.sums["tokens"] for v, f in zip(values, facts, strict=True))
            return weighted / tokens if tokens else math.nan

        def share(name: str, among: float = tokens) -> float:
            return sum(f.sums[name] for f in facts) / among if among else math.nan

        outside = sum(f.sums["outside"] for f in facts)
        first = facts[0].sums if facts else {}
        return {
            "loss": mean([f.sums["loss"] for f in facts]),
            "lr": mean([rate for _, rate, _ in self.applied]),
            "grad_norm": mean([norm for _, _, norm in self.applied]),
            "entropy": share("entropy"),
            # Of the first update only: later ones are measured after this step's own updates have moved the weights.
            "kl_engine_trainer": first["k3"] / first["tokens"] if first and first["tokens"] else math.nan,
            "kl_engine_trainer_k1": first["k1"] / first["tokens"] if first and first["tokens"] else math.nan,
            "clip_fraction_low": share("low"),
            "clip_fraction_high": share("high"),
            "clip_fraction_dual": share("dual"),
            "ratio_mean": share("ratio"),
            "ratio_max": max((f.ratio_max for f in facts), default=math.nan),
            "ess": mean(
                [effective_sample_share(f.sums["ratio"], f.sums["ratio_square"], f.sums["tokens"]) for f in facts]
            ),
            "tokens_trained": tokens,
            "outside_nucleus_fraction": share("outside", tokens + outside),
            "updates": float(len(facts)),
            "empty_updates": float(len(self.empty)),
            "nonfinite_updates": float(len(self.nonfinite)),
        }
