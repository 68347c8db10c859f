"""From a model's logits to the distribution that tokens are drawn from. Engine and trainer both use this file.

    logits ── float32 ── / temperature ── min-p ── top-k ── top-p ── renormalise

The order is vLLM's (its V1 sampler; min-p is one of its processors that run before top-k and top-p). transformers'
`generate` runs top-k, top-p, min-p: the two differ only where min-p is combined with top-p. Unlike both, a filter here
is a threshold on the value of a logit: tokens that tie with the last one kept are kept as well, so that the result
does not depend on how a sort orders equal values.

The temperature scales logits, never logprobs (the normaliser would be that of another distribution).

Shapes: ... any leading dimensions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.types import Sampling

MINUS_INFINITY = float("-inf")


def sampled_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Float32 logits (..., V) of the distribution that a token is drawn from: scaled, then truncated.

    `log_softmax` of the result is what an engine reports and what the trainer compares with. At temperature 0 (greedy)
    the scale is 1. The input is left as it is.
    """
    scaled = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    return truncate(scaled, sampling)


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Put -inf on every token outside the nucleus; the rest keeps its value. At least one token stays.

    `logits` (..., V) are already divided by the temperature. Differentiable in the tokens that stay.
    """
    if not sampling.truncates:
        return logits
    vocabulary = logits.shape[-1]
    with torch.no_grad():
        threshold = torch.full_like(logits[..., :1], MINUS_INFINITY)
        if sampling.min_p > 0.0:
            # p >= min_p * p_max, written for logits: no softmax is needed.
            offset = torch.log(torch.tensor(sampling.min_p, dtype=logits.dtype, device=logits.device))
            threshold = logits.amax(-1, keepdim=True) + offset
        if 0 < sampling.top_k < vocabulary:
            threshold = torch.maximum(threshold, logits.topk(sampling.top_k, dim=-1).values[..., -1:])
        if sampling.top_p < 1.0:
            kept = logits.masked_fill(logits < threshold, MINUS_INFINITY)
            threshold = torch.maximum(threshold, _top_p_threshold(kept, sampling.top_p))
    return logits.masked_fill(logits < threshold, MINUS_INFINITY)


def _top_p_threshold(logits: Tensor, top_p: float) -> Tensor:
    """Value (..., 1) of the last logit in the smallest set of most likely tokens whose mass reaches `top_p`."""
    ordered = logits.sort(dim=-1, descending=True).values
    mass = ordered.softmax(-1, dtype=torch.float64).cumsum(-1)
    # A token stays while the mass before it is below top_p; the first one always does.
    count = (mass < top_p).sum(-1, keepdim=True).clamp_max(logits.shape[-1] - 1)
    return ordered.gather(-1, count)
