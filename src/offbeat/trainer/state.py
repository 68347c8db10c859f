"""A trainer rank on disk. No pickle: tensors are safetensors, everything else is JSON.

    <folder>/model/                          as `save_pretrained` writes it: `from_pretrained` and engines can load it
    <folder>/trainer-rank-0.safetensors      optimizer moments by parameter name, random states of torch
    <folder>/trainer-rank-0.json             counters, optimizer steps, random states of python and numpy

Restoring gives back exactly the weights, moments, schedule position and random states: a resumed run continues bit for
bit on the same device type. Whether a folder is a complete checkpoint is for its owner to say; here every file is
flushed to disk before `save` returns, and a file that is missing or damaged is named.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from offbeat.durable import sync_path
from offbeat.errors import RunError
from offbeat.trainer.learner import SUPERVISED_BETAS, Counters, Learner
from offbeat.trainer.optimizer import adamw
from offbeat.trainer.tensor_file import write_tensors
from offbeat.weights.verify import NOT_FINITE, all_finite

FORMAT = "offbeat-trainer/1"
MOMENTS = ("exp_avg", "exp_avg_sq")
SHARD_BYTES = 4 << 30
"""Largest file of the model. Of a model on a device, no more than this is copied to the host at once."""


class Scalars(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file."""

    format: str
    counters: dict[str, int]
    optimizer_steps: dict[str, dict[str, int]]
    """Optimizer (`policy`, `supervised`) → parameter name → steps of AdamW."""
    python_random: list[Any]
    numpy_random: list[Any]


def save(learner: Learner, folder: Path, rank: int, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Writes into an existing folder. Returns the files written, all flushed to disk.

    RunError for weights that are no numbers, a checkpoint of which could not be continued, and for a full disk.
    """
    for name, parameter in learner.model.named_parameters():
        if not all_finite(parameter.detach()):
            raise RunError(f"{name} {NOT_FINITE}; no checkpoint is made of them.")
    tensors: dict[str, Tensor] = {}
    steps: dict[str, dict[str, int]] = {}
    for kind, optimizer in _optimizers(learner).items():
        steps[kind] = {}
        for name, parameter in learner.model.named_parameters():
            state = optimizer.state.get(parameter)
            if state:
                steps[kind][name] = int(state["step"])
                tensors |= {f"{kind}/{moment}/{name}": state[moment] for moment in MOMENTS}
    tensors["random/torch"] = torch.get_rng_state()
    if learner.device.type == "cuda":
        tensors["random/device"] = torch.cuda.get_rng_state(learner.device)

    tensor_file, scalar_file = _files(folder, rank)
    try:
        if rank == 0:
            learner.model.save_pretrained(folder / "model", max_shard_size=shard_bytes)
        write_tensors(tensors, tensor_file)
    except SafetensorError as error:
        raise RunError(f"{folder} cannot be written: {error}") from error
    counters = {name: int(value) for name, value in vars(learner.counters).items()}
    scalars = Scalars(
        format=FORMAT,
        counters=counters,
        optimizer_steps=steps,
        python_random=list(random.getstate()),
        numpy_random=_numpy_state(),
    )
    scalar_file.write_bytes(msgspec.json.encode(scalars))
    model_files = sorted(p for p in (folder / "model").rglob("*") if p.is_file()) if rank == 0 else []
    written = [*model_files, tensor_file, scalar_file]
    for path in [*written, folder]:
        sync_path(path)
    return written


def load(learner: Learner, folder: Path, rank: int) -> None:
    """Brings the learner to exactly the state saved. The model object stays the same: its tensors are overwritten.

    Raises:
        RunError: names the file that is missing, damaged or of another model. The learner is then not to be used.
    """
    tensor_file, scalar_file = _files(folder, rank)
    scalars = _read_scalars(scalar_file)
    tensors = _read_tensors(tensor_file)
    _load_weights(learner, folder / "model")
    learner.supervised = None
    if "supervised" in scalars.optimizer_steps:
        learner.supervised = adamw(
            learner.model, betas=SUPERVISED_BETAS, eps=learner.policy.defaults["eps"], weight_decay=0
        )
    for kind, optimizer in _optimizers(learner).items():
        _load_optimizer(learner, kind, optimizer, scalars.optimizer_steps.get(kind, {}), tensors, tensor_file)
    try:
        learner.counters = Counters(**scalars.counters)
        random.setstate(_as_tuples(scalars.python_random))
        np.random.set_state(tuple(scalars.numpy_random))
        torch.set_rng_state(tensors["random/torch"])
        if learner.device.type == "cuda" and "random/device" in tensors:
            torch.cuda.set_rng_state(tensors["random/device"], learner.device)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise _damaged(scalar_file, error) from error


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"trainer-rank-{rank}.safetensors", folder / f"trainer-rank-{rank}.json"


def _optimizers(learner: Learner) -> dict[str, AdamW]:
    optimizers = {"policy": learner.policy}
    if learner.supervised is not None:
        optimizers["supervised"] = learner.supervised
    return optimizers


def _read_scalars(path: Path) -> Scalars:
    try:
        scalars = msgspec.json.decode(path.read_bytes(), type=Scalars)
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(path, error) from error
    if scalars.format != FORMAT:
        raise RunError(f"{path}: format {scalars.format!r}; this version reads {FORMAT!r} only")
    return scalars


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _load_weights(learner: Learner, folder: Path) -> None:
    """Through `from_pretrained`, which undoes whatever conversion `save_pretrained` did."""
    if not any(folder.glob("*.safetensors")):
        raise RunError(f"{folder}: no safetensors file there; resume from another checkpoint")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        saved, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:
            raise RunError(f"{folder}: tensor {missing[0]!r} is missing; resume from another checkpoint")
        learner.model.load_state_dict(saved.state_dict())
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RunError):
            raise
        raise _damaged(folder, error) from error


def _load_optimizer(
    learner: Learner, kind: str, optimizer: AdamW, steps: dict[str, int], tensors: dict[str, Tensor], path: Path
) -> None:
    optimizer.state.clear()
    parameters = dict(learner.model.named_parameters())
    for name, step in steps.items():
        parameter = parameters.get(name)
        moments = {moment: tensors.get(f"{kind}/{moment}/{name}") for moment in MOMENTS}
        if parameter is None or any(m is None or m.shape != parameter.shape for m in moments.values()):
            raise RunError(f"{path}: the optimizer state of {name!r} is missing or does not fit this model")
        on_device = {moment: value.to(parameter.device) for moment, value in moments.items() if value is not None}
        optimizer.state[parameter] = {"step": _step_tensor(optimizer, parameter, step), **on_device}


def _step_tensor(optimizer: AdamW, parameter: Tensor, step: int) -> Tensor:
    """AdamW keeps its step as a float32 tensor: beside the parameter when fused, on the CPU otherwise."""
    device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
    return torch.tensor(float(step), dtype=torch.float32, device=device)


def _numpy_state() -> list[Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), position, has_gauss, gauss]


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _damaged(path: Path, error: Exception) -> RunError:
    missing = isinstance(error, FileNotFoundError)
    what = "is missing" if missing else f"cannot be read ({type(error).__name__}: {error})"
    return RunError(f"{path}: {what}; resume from another checkpoint")
