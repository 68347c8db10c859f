"""From logits to the logprob of each token that was sampled: the one function for it, temperature required.

The distribution is that of `truncation.sampled_logits`, which the engine draws from: softmax(logits / temperature),
truncated as sampling says, in float32 whatever dtype the model computed in. It is a copy of the logits that is cast;
the head's own weights, perhaps tied to the embedding, keep their dtype.

A sampled token may lie outside this model's own nucleus even when the weights are identical (kernels are not
batch-invariant): `inside_N` says so, its logprob is a harmless 0 without gradient, and the caller leaves it out.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offbeat.algorithms.truncation import sampled_logits
from offbeat.types import Sampling

CHUNK_ELEMENTS = 1 << 26
"""float32 logits held at once (256 MiB); above it, chunks are recomputed in the backward pass."""


class TokenLogprobs(NamedTuple):
    logprobs_N: Tensor
    """float32, with gradient; 0 where not inside."""
    inside_N: Tensor
    """bool: the token has non-zero probability under this model's (truncated) distribution."""
    entropy_N: Tensor
    """float32, detached, in nats, of that distribution; all zeros when not asked for."""


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, sampling: Sampling, *, entropy: bool) -> TokenLogprobs:
    """Logprobs of `targets_N` (int64) at the temperature and truncation of `sampling`; greedy is temperature 1."""
    rows = max(1, CHUNK_ELEMENTS // logits_NV.shape[-1])
    if logits_NV.shape[0] <= rows:
        return TokenLogprobs(*_scored(logits_NV, targets_N, sampling, entropy))
    parts = [
        # The chunk's float32 copy and its softmax are not kept for the backward pass, only the logits as they are.
        checkpoint(_scored, logits, targets, sampling, entropy, use_reentrant=False, preserve_rng_state=False)
        for logits, targets in zip(logits_NV.split(rows), targets_N.split(rows), strict=True)
    ]
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _scored(
    logits_NV: Tensor, targets_N: Tensor, sampling: Sampling, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scaled_NV = sampled_logits(logits_NV, sampling)
    normaliser_N = scaled_NV.logsumexp(-1)
    target_N = scaled_NV.gather(-1, targets_N[:, None])[:, 0]
    inside_N = target_N != float("-inf")
    logprobs_N = torch.where(inside_N, target_N, normaliser_N) - normaliser_N
    if not with_entropy:
        return logprobs_N, inside_N, torch.zeros_like(logprobs_N.detach())
    with torch.no_grad():
        logs_NV = scaled_NV - normaliser_N[:, None]
        entropy_N = torch.special.entr(logs_NV.exp()).sum(-1)
    return logprobs_N, inside_N, entropy_N
