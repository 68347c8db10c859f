"""The trainer's model: float32 master weights, no dropout, on its device. Loads on the CPU, so needs no accelerator."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from offbeat.errors import ModelError
from offbeat.models import positions


def load_model(
    model: str, revision: str | None, *, init: Literal["pretrained", "random"], seed: int
) -> PreTrainedModel:
    """From a folder or hub id, every parameter float32.

    `init="random"` reads the configuration only; equal seeds give equal weights.

    Raises:
        ModelError: it cannot be loaded.
    """
    transformers_logging.disable_progress_bar()
    try:
        if init == "random":
            config = AutoConfig.from_pretrained(model, revision=revision)
            torch.manual_seed(seed)
            loaded = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"model {model!r}: cannot be loaded ({type(error).__name__}: {error}); give a folder with config.json and "
            "safetensors weights, or a hub id."
        ) from error
    check_float32(loaded)
    loaded.eval()
    return loaded


def check_float32(model: nn.Module) -> None:
    """Master weights in a narrower dtype would round updates of a usual RL learning rate away.

    Raises:
        ModelError: names the first parameter that is not float32.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype} after loading, not float32: the trainer cannot train a "
                "quantized or narrow model; give one saved in float32, bfloat16 or float16."
            )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass.

    transformers does so in modules in training mode only. Those are switched to it one by one, and everything that
    could then be random is set to 0, so that scores stay a function of weights and tokens.
    """
    # Renamed in transformers 5.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # this module only: `train()` would reach its children


def max_length(model: PreTrainedModel) -> int:
    """Longest sequence in tokens; 0 where the model has no limit of its own."""
    return positions(model.config.get_text_config().to_dict()) or 0


def head_rows(model: PreTrainedModel) -> int:
    """Rows of the output head: the ids that can be sampled or scored."""
    head = model.get_output_embeddings()
    if head is None:
        return int(model.config.get_text_config().vocab_size)
    return int(head.weight.shape[0])
