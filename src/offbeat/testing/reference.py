"""A whole training run in one process and on one page: what offbeat must compute, in however many processes.

    for each step k:    engine ◀── weights of version max(k - delay, 0) ── samples ── updates ──▶ version k + 1

Plain torch and plain Python, written from the papers named in `offbeat.algorithms`. It shares no code with offbeat's
loops, trainer, batching, advantages or loss. It computes in float64, so that a difference is the other side's rounding.
The caller samples, with whatever it trusts; everything else is here. For tests only.

Shapes: B samples, L columns, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.testing.oracle import OracleSample

Weighed = list[tuple[OracleSample, float]]
"""The samples of an update, each with its advantage."""


@dataclass(frozen=True)
class ReferenceSettings:
    """The keys of a config that decide what is learned, under their own names."""

    steps: int
    max_new_tokens: int
    delay: int = 0
    """`max_staleness`: batch k is sampled with the weights of version max(k - delay, 0)."""
    updates_per_step: int = 1
    temperature: float = 1.0
    lr: float = 1e-6
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    scale_by_std: bool = True
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"


Sample = Callable[[Any, int], Sequence[OracleSample]]
"""(model to sample from, step) → the scored samples of that step, group after group."""
Loss = Callable[[Any, Weighed, ReferenceSettings], Tensor]


def reference_run(
    model: Any, sample: Sample, settings: ReferenceSettings, loss: Loss | None = None
) -> dict[str, Tensor]:
    """The weights after all steps, float64, by name. `model` is left as it is; `loss` defaults to `reference_loss`."""
    engine, trainer = copy.deepcopy(model).float().eval(), copy.deepcopy(model).double().eval()
    parameters = list(trainer.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps)
    versions = [copy.deepcopy(trainer.state_dict())]
    done = 0
    for step in range(settings.steps):
        engine.load_state_dict(versions[max(step - settings.delay, 0)])
        for update in reference_updates(sample(engine, step), settings):
            optimizer.zero_grad()
            (loss or reference_loss)(trainer, update, settings).backward()
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            done += 1
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, done / max(1, settings.warmup_steps))
            for gradient in gradients:
                gradient.mul_(min(1.0, settings.max_grad_norm / norm))
            optimizer.step()
        versions.append(copy.deepcopy(trainer.state_dict()))
    return versions[-1]


def reference_updates(samples: Sequence[OracleSample], settings: ReferenceSettings) -> Iterator[Weighed]:
    """The samples of each update. Groups of equal rewards are left out, the others shared out in order."""
    groups: dict[object, list[OracleSample]] = {}
    for one in samples:
        groups.setdefault(one.group, []).append(one)
    weighed: list[Weighed] = []
    for members in groups.values():
        rewards = [one.reward for one in members]
        if max(rewards) > min(rewards):
            mean = sum(rewards) / len(rewards)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            scale = deviation + 1e-6 if settings.scale_by_std else 1.0
            weighed.append([(one, (one.reward - mean) / scale) for one in members])
    for index in range(settings.updates_per_step):
        first, last = (len(weighed) * i // settings.updates_per_step for i in (index, index + 1))
        if first < last:
            yield [pair for group in weighed[first:last] for pair in group]


def reference_loss(model: Any, update: Weighed, settings: ReferenceSettings) -> Tensor:
    """The clipped objective of one update with its sign turned; a scalar with gradient."""
    tokens = sum(len(one.tokens) for one, _ in update)
    total = torch.zeros((), dtype=torch.float64)
    for (one, advantage), logprobs in zip(update, reference_logprobs(model, update, settings), strict=True):
        ratio = (logprobs - torch.tensor(one.behaviour, dtype=torch.float64)).exp()
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        if advantage < 0:
            objective = objective.clamp(min=settings.dual_clip * advantage)
        denominator = {
            "token_mean": tokens,
            "sequence_mean": len(one.tokens) * len(update),
            "constant": len(update) * settings.max_new_tokens,
        }[settings.aggregation]
        total = total - objective.sum() / denominator
    return total


def reference_logprobs(model: Any, update: Weighed, settings: ReferenceSettings) -> list[Tensor]:
    """Of each sample's tokens, in one forward pass over all samples, padded on the right."""
    rows = [[*one.prompt, *one.tokens] for one, _ in update]
    width = max(len(row) for row in rows)
    ids_BL = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
    logs_BLV = (logits_BLV.double() / settings.temperature).log_softmax(-1)
    return [
        logs_BLV[row, len(one.prompt) - 1 : len(one.prompt) - 1 + len(one.tokens)][
            torch.arange(len(one.tokens)), torch.tensor(list(one.tokens))
        ]
        for row, (one, _) in enumerate(update)
    ]
