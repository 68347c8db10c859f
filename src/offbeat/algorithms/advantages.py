"""Group-relative advantages: how much better a sample did than the others drawn for the same prompt.

Sources. GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean(r)) / std(r), over the group of i. Dr. GRPO (arXiv
2503.20783, section 3.1) leaves the division out, because it weights easy and hard prompts more than the others.

Differences. The papers do not say which standard deviation: ours is the sample one (divisor n - 1), with `STD_EPSILON`
added to it. A group is given by an explicit id, so that order, arrival and missing samples do not matter. A group of
one, and a group whose rewards are all equal, has advantage exactly 0 and is reported as having no spread.

Shapes: N samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group."""
SPREAD_TOLERANCE = 1e-9
"""Rewards of a group count as equal when they differ by less than this, relative to the largest (or 1): a weighted
sum of equal parts may differ in its last bit, and dividing that by its own deviation would make it a full signal."""


class GroupAdvantages(NamedTuple):
    """What `group_advantages` returns."""

    advantages_N: Tensor
    """float64."""
    has_spread_N: Tensor
    """bool: False for samples of a group of one or of equal rewards."""


def group_advantages(rewards_N: Tensor, group_ids_N: Tensor, *, scale_by_std: bool) -> GroupAdvantages:
    """Advantages of samples in any order.

    Args:
        rewards_N: finite rewards, any float dtype; computed in float64.
        group_ids_N: int64; samples with one id form a group, wherever they stand.
        scale_by_std: divide by the group's sample standard deviation (GRPO); False: Dr. GRPO.

    Raises:
        ValueError: lengths differ, or a reward is not finite.
    """
    if rewards_N.ndim != 1 or rewards_N.shape != group_ids_N.shape:
        raise ValueError(f"rewards {tuple(rewards_N.shape)} and group ids {tuple(group_ids_N.shape)} must match")
    rewards_N = rewards_N.double()
    if not bool(torch.isfinite(rewards_N).all()):
        raise ValueError("a reward is not finite")
    _, index_N, count_G = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
    zero_G = rewards_N.new_zeros(count_G.numel())

    mean_G = zero_G.scatter_add(0, index_N, rewards_N) / count_G
    centred_N = rewards_N - mean_G[index_N]
    high_G = zero_G.scatter_reduce(0, index_N, rewards_N, "amax", include_self=False)
    low_G = zero_G.scatter_reduce(0, index_N, rewards_N, "amin", include_self=False)
    scale_G = torch.maximum(high_G.abs(), low_G.abs()).clamp_min(1.0)
    has_spread_G = (high_G - low_G) > SPREAD_TOLERANCE * scale_G

    if scale_by_std:
        variance_G = zero_G.scatter_add(0, index_N, centred_N**2) / (count_G - 1).clamp_min(1)
        centred_N = centred_N / (variance_G.sqrt() + STD_EPSILON)[index_N]
    has_spread_N = has_spread_G[index_N]
    advantages_N = torch.where(has_spread_N, centred_N, torch.zeros_like(centred_N))
    return GroupAdvantages(advantages_N, has_spread_N)
