"""Where every tensor of the checkpoint on disk lies in a live model's memory.

Two things differ between a module tree in memory and what `save_pretrained` writes:

- wrappers (`torch.compile`, DDP, FSDP, activation checkpointing) put a prefix of their own into names, at any level and
  more than one deep. Names are built here by walking the modules and stepping through wrapper *objects*, so that a
  layer which is really called `module` keeps its name;
- transformers keeps some weights fused in memory (the experts of a mixture) and splits them on disk. Its own
  `revert_weight_conversion` is asked what it does, once, with numbered elements in place of weights; each tensor on
  disk then becomes a strided view of the live memory, which can be read and written without a copy. What is not such a
  view is refused by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from offbeat.errors import WeightSyncError

Revert: TypeAlias = Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]

_LAYER = re.compile(r"^.*?\.\d+\.")
_OWN_WRAPPER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Private names that only wrappers use: torch.compile, FSDP, activation checkpointing."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of wrappers."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _inner(module: nn.Module) -> nn.Module | None:
    children = module._modules  # pyright: ignore[reportPrivateUsage]  # attribute access would be forwarded to the inner module
    for name in _OWN_WRAPPER_NAMES:
        if children.get(name) is not None:
            return children[name]
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return module.module
    return None


def memory_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Canonical name → live parameter or persistent buffer, aliases included, in module order."""
    found = dict(_walk(model, ""))
    adapters = [name for name in found if ".base_layer." in name or ".lora_" in name]
    if adapters:
        raise WeightSyncError(
            f"the model has adapters (first: {adapters[0]}), which are not synchronised yet; merge them into the "
            "model before training."
        )
    flat = [name for name in found if name.rpartition(".")[2] == "_flat_param"]
    if flat:
        raise WeightSyncError(f"{flat[0]}: FSDP with flat parameters is not supported; use FSDP2 (fully_shard).")
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    module = unwrap(module)
    for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]  # named_parameters drops aliases
        if parameter is not None:
            yield prefix + name, parameter.detach()
    skipped = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  # torch has no public way to ask
    for name, buffer in module._buffers.items():  # pyright: ignore[reportPrivateUsage]  # named_buffers drops aliases
        if buffer is not None and name not in skipped:
            yield prefix + name, buffer.detach()
    for name, child in module._modules.items():  # pyright: ignore[reportPrivateUsage]  # named_children drops aliases
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


@dataclass(frozen=True)
class Place:
    """One tensor on disk as a view of one tensor in memory. `strides` and `offset` count elements, row-major."""

    memory: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """None: the whole tensor, as it is."""
    offset: int = 0

    def view(self, tensor: Tensor) -> Tensor:
        if self.strides is None:
            return tensor
        if not tensor.is_contiguous():
            raise WeightSyncError(f"{self.memory}: a fused tensor must be contiguous in memory to be split.")
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def disk_places(model: nn.Module, memory: Mapping[str, Tensor]) -> dict[str, Place]:
    """Name on disk → its place in `memory`. WeightSyncError names what cannot be expressed as a view."""
    revert = _revert_conversion()
    inner = unwrap(model)
    if revert is None or not hasattr(inner, "config"):
        return {name: Place(name, tuple(tensor.shape), None) for name, tensor in memory.items()}
    markers = {name: torch.empty(tensor.shape, device="meta") for name, tensor in memory.items()}
    known = {id(marker): name for name, marker in markers.items()}
    places: dict[str, Place] = {}
    moved: list[str] = []
    for disk_name, marker in revert(inner, dict(markers)).items():
        if id(marker) in known:
            name = known[id(marker)]
            places[disk_name] = Place(name, tuple(marker.shape), None)
        else:
            moved.append(disk_name)
    whole = {place.memory for place in places.values()}
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in memory.items():
        if name not in whole:
            numbered_prefix = _LAYER.match(name)  # a layer at a time bounds the memory that the numbers take
            layers.setdefault(numbered_prefix.group() if numbered_prefix else "", {})[name] = tensor
    for fused in layers.values():
        places |= _split_places(inner, fused, revert)
    if missing := [name for name in moved if name not in places]:
        raise WeightSyncError(
            f"{missing[0]}: on disk it is made of several layers' weights, so it cannot be synchronised."
        )
    return places


def _split_places(model: nn.Module, fused: Mapping[str, Tensor], revert: Revert) -> dict[str, Place]:
    """Number the elements of fused tensors, let transformers split them, and read where each element went."""
    numbers: dict[str, Tensor] = {}
    first: list[tuple[int, str]] = []
    start = 0
    for name, tensor in fused.items():
        numbers[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        first.append((start, name))
        start += tensor.numel()
    return {name: _place(name, numbered, first, fused) for name, numbered in revert(model, numbers).items()}


def _place(name: str, numbered: Tensor, first: list[tuple[int, str]], fused: Mapping[str, Tensor]) -> Place:
    corner = int(numbered[(0,) * numbered.dim()]) if numbered.numel() else 0
    start, memory = max(entry for entry in first if entry[0] <= corner)
    strides: list[int] = []
    for dim, size in enumerate(numbered.shape):
        step = int(numbered[tuple(int(d == dim) for d in range(numbered.dim()))]) - corner if size > 1 else 0
        strides.append(step)
    place = Place(memory, tuple(numbered.shape), tuple(strides), corner - start)
    expected = torch.full((), corner)
    for dim, size in enumerate(numbered.shape):
        shape = [1] * numbered.dim()
        shape[dim] = size
        expected = expected + (torch.arange(size) * strides[dim]).view(shape)
    inside = (
        corner + sum((n - 1) * s for n, s in zip(place.shape, strides, strict=True)) < start + fused[memory].numel()
    )
    if min(strides, default=0) < 0 or not inside or not torch.equal(expected.expand_as(numbered), numbered):
        raise WeightSyncError(
            f"{name}: on disk this tensor is no plain slice of the model's {memory}, so it cannot be synchronised. "
            "Use a model whose checkpoint has the layout that it has in memory."
        )
    return place


@functools.cache
def _revert_conversion() -> Revert | None:
    """transformers' own function from memory layout to disk layout; None before transformers 5 (one layout)."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return cast(Revert, revert_weight_conversion)


def alias_names(model: nn.Module, memory: Mapping[str, Tensor]) -> dict[str, str]:
    """Alias → the name that is kept on disk, decided from storages: the same bytes under two names are one tensor."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in memory.items():
        if tensor.numel() and tensor.device.type != "meta":
            key = (tensor.device, _address(tensor), tuple(tensor.shape), tensor.dtype)
            groups.setdefault(key, []).append(name)
    dropped = set(_declared_aliases(model))
    aliases: dict[str, str] = {}
    for names in groups.values():
        if len(names) > 1:
            kept = next((name for name in names if name not in dropped), names[0])
            aliases |= {name: kept for name in names if name != kept}
    return aliases


def _address(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no address of its own
    return local.data_ptr()


def _declared_aliases(model: nn.Module) -> Iterable[str]:
    declared = getattr(unwrap(model), "all_tied_weights_keys", None) or getattr(
        unwrap(model), "_tied_weights_keys", None
    )
    return tuple(declared or ())
