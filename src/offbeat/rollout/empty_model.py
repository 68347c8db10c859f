"""A model built from its configuration alone. Its weights are random until the first weight transfer brings them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offbeat.config import Dtype
from offbeat.errors import ModelError, RunError

ATTENTION = ("sdpa", "eager")
"""Tried in this order: not every architecture has the first."""


def empty_model(model: str, revision: str | None, dtype: Dtype, device: torch.device) -> PreTrainedModel:
    """The architecture of a folder or hub id, in eval mode, without gradients, on `device`; no weight file is read.

    Buffers that no checkpoint holds (rotary frequencies) are computed by the model's own constructor, which is why it
    is not built on the `meta` device.

    Raises:
        ModelError: the configuration cannot be read or is not a causal language model.
        RunError: the model came up in another dtype.
    """
    try:
        config = AutoConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model!r}: its configuration cannot be read ({error}).") from error
    built = _build(model, config, getattr(torch, dtype), device)
    built.requires_grad_(False)
    built.eval()  # a fresh model is in training mode: dropout would be on
    require_dtype(built, getattr(torch, dtype))
    return built


def _build(name: str, config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    problem: Exception | None = None
    for attention in ATTENTION:
        try:
            with device:
                return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        except ValueError as error:
            problem = error
    raise ModelError(
        f"model {name!r} (model_type {config.model_type!r}) cannot be built as a causal language model: {problem}"
    ) from problem


def require_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The keyword for the dtype has changed its name before, and a loader may ignore one that it does not know."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            raise RunError(
                f"the engine asked for {dtype}, but {name} came up as {parameter.dtype}: this transformers release "
                "does not honour the dtype for this model; choose that dtype in rollout.dtype, or another release."
            )
