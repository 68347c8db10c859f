"""A float64, one-process, one-sample-at-a-time reference of what a training step must compute. For tests only.

Written from the definitions, with Python loops and no batching, padding, packing or micro-batches, and sharing no code
with `offbeat.algorithms` or `offbeat.trainer`: agreement means something.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from offbeat.types import Sampling


@dataclass(frozen=True)
class OracleSample:
    """One rollout with the reward it got."""

    group: object
    prompt: Sequence[int]
    tokens: Sequence[int]
    behaviour: Sequence[float]
    """Logprob of each token as sampled."""
    reward: float
    mask: Sequence[bool] | None = None


@dataclass(frozen=True)
class OracleLoss:
    """The choices of `[loss]`."""

    scale_by_std: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"


def oracle_advantages(samples: Sequence[OracleSample], *, scale_by_std: bool) -> list[float | None]:
    """One advantage a sample; None for samples of groups without spread."""
    result: list[float | None] = []
    for sample in samples:
        rewards = [other.reward for other in samples if other.group == sample.group]
        if max(rewards) == min(rewards):
            result.append(None)
            continue
        mean = math.fsum(rewards) / len(rewards)
        advantage = sample.reward - mean
        if scale_by_std:
            advantage /= math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) + 1e-6
        result.append(advantage)
    return result


def double(model: Any) -> Any:
    """A float64 copy. (Norms that transformers computes in float32 stay at that precision, about 1e-7.)"""
    return copy.deepcopy(model).double().eval()


def oracle_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> Tensor:
    """float64 (T,), with gradient; -inf outside the nucleus. One unpadded sequence, all its logits."""
    ids = torch.tensor([[*prompt, *tokens]], dtype=torch.int64, device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0].double()
    temperature = sampling.temperature or 1.0
    values: list[Tensor] = []
    for position, token in enumerate(tokens):
        row = logits[len(prompt) - 1 + position] / temperature
        keep = _nucleus(row.detach(), sampling)
        values.append((row - torch.logsumexp(row[keep], 0))[token] if keep[token] else row.new_tensor(-math.inf))
    return torch.stack(values)


def _nucleus(row: Tensor, sampling: Sampling) -> Tensor:
    """Which of the V tokens can be sampled: min-p, then top-k, then top-p."""
    values = row.tolist()
    keep = [True] * len(values)
    if sampling.min_p > 0:
        keep = [v >= max(values) + math.log(sampling.min_p) for v in values]
    if sampling.top_k:
        lowest = sorted(values, reverse=True)[: sampling.top_k][-1]
        keep = [k and v >= lowest for k, v in zip(keep, values, strict=True)]
    if sampling.top_p < 1:
        left = sorted((v for k, v in zip(keep, values, strict=True) if k), reverse=True)
        total = math.fsum(math.exp(v - left[0]) for v in left)
        mass, lowest = 0.0, left[0]
        for value in left:
            if mass >= sampling.top_p:
                break
            lowest = value
            mass += math.exp(value - left[0]) / total
        keep = [k and v >= lowest for k, v in zip(keep, values, strict=True)]
    return torch.tensor(keep, device=row.device)


def oracle_loss(model: Any, samples: Sequence[OracleSample], sampling: Sampling, loss: OracleLoss) -> Tensor:
    """The scalar loss of one update over all samples, float64, with gradient."""
    advantages = oracle_advantages(samples, scale_by_std=loss.scale_by_std)
    used = [(s, a) for s, a in zip(samples, advantages, strict=True) if a is not None and any(_mask(s))]
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    all_tokens = sum(sum(_mask(sample)) for sample, _ in used)
    for sample, advantage in used:
        logprobs = oracle_logprobs(model, sample.prompt, sample.tokens, sampling)
        mask = _mask(sample)
        terms = [
            _token_loss(logprobs[i], sample.behaviour[i], advantage, loss)
            for i in range(len(mask))
            if mask[i] and math.isfinite(float(logprobs[i].detach()))
        ]
        share = torch.stack(terms).sum() if terms else total.new_zeros(())
        match loss.aggregation:
            case "token_mean":
                total = total + share / all_tokens
            case "sequence_mean":
                total = total + share / sum(mask) / len(used)
            case "constant":
                total = total + share / (len(used) * sampling.max_new_tokens)
    return total


def _mask(sample: OracleSample) -> list[bool]:
    return [bool(m) for m in sample.mask] if sample.mask is not None else [True] * len(sample.tokens)


def _token_loss(logprob: Tensor, behaviour: float, advantage: float, loss: OracleLoss) -> Tensor:
    ratio = torch.exp(logprob - behaviour)
    value = float(ratio.detach())
    # Which branch is active decides the gradient: the clipped branch is a constant.
    if advantage >= 0:
        return -advantage * (ratio if value <= 1 + loss.clip_high else ratio.new_tensor(1 + loss.clip_high))
    if value < 1 - loss.clip_low:
        return -advantage * ratio.new_tensor(1 - loss.clip_low)
    if loss.dual_clip is not None and value > loss.dual_clip:
        return -advantage * ratio.new_tensor(loss.dual_clip)
    return -advantage * ratio


def oracle_gradient(
    model: Any, samples: Sequence[OracleSample], sampling: Sampling, loss: OracleLoss
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and gradient of every parameter by name, float64; the model given is left as it is."""
    reference = double(model)
    value = oracle_loss(reference, samples, sampling, loss)
    if value.requires_grad:
        value.backward()
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).cpu().numpy()
        for name, p in reference.named_parameters()
    }
    return float(value.detach()), gradients
