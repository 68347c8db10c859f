"""AdamW on float32 master weights, its learning rate as a pure function, and the guarded step.

AdamW is torch's (arXiv 1711.05101). Weight decay acts on matrices only, not on norms and biases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import AdamW

from offbeat.config import TrainerSection


def learning_rate(
    update_index: int,
    total_updates: int,
    *,
    peak: float,
    warmup: int,
    schedule: Literal["constant", "linear", "cosine"],
    min_ratio: float,
) -> float:
    """The learning rate of update `update_index` (from 0; updates that were skipped do not count).

    It rises linearly to the peak, which update `warmup - 1` has, then stays or falls so that the last update
    (`total_updates - 1`) and any after it have `min_ratio` × peak.
    """
    if update_index < warmup:
        return peak * (update_index + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (update_index + 1 - warmup) / max(1, total_updates - warmup))
    shape = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * shape)


def scheduled_rate(section: TrainerSection, update_index: int, total_updates: int) -> float:
    """`learning_rate` with the settings of `[trainer]`."""
    return learning_rate(
        update_index,
        total_updates,
        peak=section.lr,
        warmup=section.warmup_steps,
        schedule=section.schedule,
        min_ratio=section.min_lr_ratio,
    )


def adamw(model: nn.Module, *, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamW:
    """An optimizer over all trainable parameters; its learning rate is set before each step."""
    parameters = trainable(model)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Fused: one kernel call for all parameters, on CPU and CUDA alike; elsewhere torch chooses.
    fused = all(p.device.type in {"cpu", "cuda"} for p in parameters)
    return AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=fused or None)


def trainable(model: nn.Module) -> list[Parameter]:
    """The parameters that are trained, each once even where it is tied."""
    return [p for p in model.parameters() if p.requires_grad]


def clip_gradients(parameters: Sequence[Parameter], max_norm: float) -> float:
    """Scales gradients to a global L2 norm of at most `max_norm`; returns the norm before, perhaps not finite."""
    return float(nn.utils.clip_grad_norm_(parameters, max_norm))


def apply(optimizer: AdamW, rate: float) -> None:
    """One step at this learning rate; gradients are dropped."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.no_grad():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
