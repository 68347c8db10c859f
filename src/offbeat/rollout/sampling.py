"""Drawing tokens: pure functions over tensors, with random numbers that belong to a sample and not to a batch.

The random number of a token is a hash of (seed of the sample, index of the token in the sample). Whatever else is in
the batch, in which order, on which device: the same sample sees the same numbers.

Shapes: B rows (one sample each), V vocabulary, K blocks of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from offbeat.errors import ConfigError
from offbeat.types import Sampling

# Constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, figure 17).
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)

BLOCK = 256
"""Tokens of one block in the two-level search for a token."""


def check_sampling(sampling: Sampling) -> None:
    """Raises `ConfigError` with every value that no distribution can be made of."""
    rules = [
        (sampling.max_new_tokens >= 1, f"max_new_tokens = {sampling.max_new_tokens}: must be at least 1."),
        (
            0.0 <= sampling.temperature < float("inf"),
            f"temperature = {sampling.temperature}: must be 0 (greedy) or a positive number.",
        ),
        (0.0 < sampling.top_p <= 1.0, f"top_p = {sampling.top_p}: must be above 0 and at most 1 (off)."),
        (sampling.top_k >= 0, f"top_k = {sampling.top_k}: must be 0 (off) or positive."),
        (0.0 <= sampling.min_p < 1.0, f"min_p = {sampling.min_p}: must be at least 0 (off) and below 1."),
    ]
    problems = [text for holds, text in rules if not holds]
    if problems:
        raise ConfigError(*problems)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits: float64 (B,), from uint64 seeds (B,) and token indices (B,).

    Output number `position` of a SplitMix64 generator whose state starts at the mixed seed (mixed, because neighbouring
    seeds would otherwise give shifted copies of one stream).
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * GAMMA
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * MIX_1
    value = (value ^ (value >> np.uint64(27))) * MIX_2
    return value ^ (value >> np.uint64(31))


def draw(logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of each row at its number.

    Args:
        logits_BV: float32, -inf where a token cannot be drawn (see `offbeat.algorithms.truncation`).
        uniforms_B: float64 in [0, 1), on the same device.

    Returns:
        tokens int64 (B,) and their logprobs float64 (B,) under softmax(logits).

    A token of probability zero is never returned: the cumulative sum is taken in float64, where it does not rise over
    such a token, and the search wants a strict rise. (In float32 the sum over a large vocabulary stalls: a tail of
    tokens below 2^-24 would never be drawn.) Sums are taken over blocks first, so that a row costs one pass. A row
    with a NaN or without any finite logit gives the logprob NaN.
    """
    probabilities_BV = logits_BV.softmax(-1)
    vocabulary = logits_BV.shape[-1]
    padded_BV = functional.pad(probabilities_BV, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else probabilities_BV
    blocks_BKV = padded_BV.view(len(logits_BV), -1, BLOCK)
    block_mass_BK = blocks_BKV.sum(-1, dtype=torch.float64).cumsum(-1)
    total_B = block_mass_BK[:, -1]
    block_B, rest_B = _find(block_mass_BK, uniforms_B * total_B)
    inside_BV = blocks_BKV[torch.arange(len(logits_BV), device=logits_BV.device), block_B]
    offset_B, _ = _find(inside_BV.cumsum(-1, dtype=torch.float64), rest_B)
    chosen_B = inside_BV.gather(-1, offset_B[:, None])[:, 0].double()
    # Divided by the float64 total, which takes the rounding of the float32 normaliser out again.
    return block_B * BLOCK + offset_B, chosen_B.log() - total_B.log()


def _find(cumulative_BK: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative value is above the target, and what is left of the target inside that entry."""
    # Rounding may put a target at or above the end: the largest float64 below the end keeps the rise strict.
    end_B = cumulative_BK[:, -1]
    target_B = torch.minimum(target_B, torch.nextafter(end_B, torch.zeros_like(end_B)))
    index_B = (cumulative_BK <= target_B[:, None]).sum(-1)
    # Only rows with a NaN end up past the end; their logprob is NaN whatever is chosen.
    index_B = index_B.clamp_max(cumulative_BK.shape[-1] - 1)
    before_B = torch.where(index_B > 0, cumulative_BK.gather(-1, (index_B - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    return index_B, target_B - before_B


def take_most_likely(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy: the first token with the largest logit, and its logprob float64 (B,) under softmax(logits)."""
    tokens_B = logits_BV.argmax(-1)
    chosen_B = logits_BV.gather(-1, tokens_B[:, None])[:, 0].double()
    return tokens_B, chosen_B - torch.logsumexp(logits_BV, -1).double()
