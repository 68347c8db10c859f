"""The clipped policy loss, per token, and what to watch of it.

Sources. PPO (arXiv 1707.06347, equation 7): the objective is min(r·A, clip(r, 1 - ε, 1 + ε)·A), with r the ratio of
the current to the behaviour probability of the token. DAPO (arXiv 2503.14476, equation 10): separate bounds,
[1 - clip_low, 1 + clip_high]. Dual clip (arXiv 1912.09729, equation 3): where A < 0 the objective is at least c·A, so
that a token which became far more probable cannot push without limit.

Differences. `behaviour` is always what the engine sampled with, one logprob a token as it was drawn; logprobs
recomputed with newer weights never stand in for it. The log ratio is clamped to ±`LOG_RATIO_LIMIT` before `exp`, which
changes nothing inside the clip range and keeps overflow (inf · 0 = NaN) out of the gradient. No KL term.

Shapes: N tokens, of any samples in any order: nothing here averages or masks, see `reduce`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


class PolicyLoss(NamedTuple):
    """Per-token loss (differentiable) and per-token facts (detached)."""

    loss_N: Tensor
    ratio_N: Tensor
    kl_k1_N: Tensor
    """behaviour - current: an unbiased estimate of KL(behaviour ‖ current)."""
    kl_k3_N: Tensor
    """(r - 1) - log r: the same expectation, never negative, less noise for small gaps."""
    clipped_low_N: Tensor
    """bool: A < 0 and r below 1 - clip_low; the token's gradient is zero."""
    clipped_high_N: Tensor
    """bool: A > 0 and r above 1 + clip_high; the token's gradient is zero."""
    clipped_dual_N: Tensor
    """bool: A < 0 and r above `dual_clip`; the token's gradient is zero."""


def clipped_policy_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """The loss of each token (the objective with its sign turned).

    Args:
        logprobs_N: float32, of the current policy, with gradient.
        behaviour_N: float32, as sampled.
        advantages_N: float32.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: and above at 1 + clip_high.
        dual_clip: c > 1, or None for no bound on tokens with a negative advantage.
    """
    log_ratio_N = (logprobs_N - behaviour_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if dual_clip is not None:
        bounded_N = torch.maximum(objective_N, dual_clip * advantages_N)
        objective_N = torch.where(advantages_N < 0, bounded_N, objective_N)

    log_ratio_N, ratio_N = log_ratio_N.detach(), ratio_N.detach()
    negative_N = advantages_N < 0
    above_dual_N = ratio_N > (float("inf") if dual_clip is None else dual_clip)
    return PolicyLoss(
        loss_N=-objective_N,
        ratio_N=ratio_N,
        kl_k1_N=-log_ratio_N,
        kl_k3_N=torch.expm1(log_ratio_N) - log_ratio_N,
        clipped_low_N=negative_N & (ratio_N < 1.0 - clip_low),
        clipped_high_N=(advantages_N > 0) & (ratio_N > 1.0 + clip_high),
        clipped_dual_N=negative_N & above_dual_N,
    )


def effective_sample_share(ratio_sum: float, ratio_square_sum: float, count: float) -> float:
    """Effective sample size as a share of the tokens, in (0, 1]: (Σr)² / (n · Σr²). 1 when all ratios are equal."""
    return ratio_sum**2 / (count * ratio_square_sum) if count and ratio_square_sum else 0.0
