"""From per-token losses to one number: loss = Σ weight · loss / denominator, and nothing else ever scales.

The denominator is of the whole optimizer update, over all micro-batches and all ranks, and is known before the first
backward pass. That is what makes the gradient independent of how the update is split.

    token_mean      weight 1, denominator = trained tokens                     (DAPO, arXiv 2503.14476, equation 8)
    sequence_mean   weight 1 / trained tokens of the sample,
                    denominator = samples with trained tokens                  (GRPO, arXiv 2402.03300, equation 3)
    constant        weight 1, denominator = samples × max_new_tokens           (Dr. GRPO, arXiv 2503.20783, section 3.2)

A sample without trained tokens counts in no denominator. An update without any has denominator 0 and is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor

from offbeat.config import Aggregation


def aggregation_denominator(trained_tokens: Sequence[int], aggregation: Aggregation, *, max_new_tokens: int) -> float:
    """The denominator of one update, from the number of trained tokens of each of its samples (all ranks)."""
    samples = sum(count > 0 for count in trained_tokens)
    match aggregation:
        case "token_mean":
            return float(sum(trained_tokens))
        case "sequence_mean":
            return float(samples)
        case "constant":
            return float(samples * max_new_tokens)
        case _:
            assert_never(aggregation)


def token_weights(mask_N: Tensor, sample_N: Tensor, aggregation: Aggregation) -> Tensor:
    """The weight of each token, float32 (N,); 0 where not trained.

    Args:
        mask_N: bool, True where the token is trained. All tokens of a sample must be present.
        sample_N: int64, which sample (row of this micro-batch) a token belongs to, counted from 0.
    """
    mask_N = mask_N.float()
    match aggregation:
        case "token_mean" | "constant":
            return mask_N
        case "sequence_mean":
            if not mask_N.numel():
                return mask_N
            trained_B = mask_N.new_zeros(int(sample_N.max()) + 1).scatter_add(0, sample_N, mask_N)
            return mask_N / trained_B.clamp_min(1.0)[sample_N]
        case _:
            assert_never(aggregation)


def reduce_loss(loss_N: Tensor, weight_N: Tensor, denominator: float) -> Tensor:
    """This micro-batch's share of the update's loss: shares add up, over micro-batches and ranks.

    Tokens of weight 0 are cut off rather than multiplied, so that a non-finite value there is not 0 · inf.
    """
    return torch.where(weight_N > 0, weight_N * loss_N, torch.zeros_like(loss_N)).sum() / denominator
