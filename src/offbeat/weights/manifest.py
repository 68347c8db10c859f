"""What a transfer carries: names, shapes and dtypes of the checkpoint on disk, and which names are tied to which.

The trainer builds a manifest of its own model, the engine compares it with what its own model needs; both compare its
hash before the first byte moves. Tying is decided from storages on each side, never from a config: an alias is stated
in `Manifest.tied` and not sent. Persistent buffers belong to the checkpoint, non-persistent ones do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor, nn

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import Manifest, TensorEntry
from offbeat.weights.layout import Place, alias_names, disk_places, memory_tensors, unwrap
from offbeat.weights.packing import ITEM_BYTES


class LiveCheckpoint:
    """A live model seen as its checkpoint on disk: each tensor is a view of the model's own memory.

    The tensors are looked up anew at each call, so parameters that were allocated again are found; only the layout
    (which slice of which name) is kept, for as long as names and shapes stay the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self._places: dict[str, Place] = {}

    def read(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """(name on disk → view of the live tensor, without aliases; alias on disk → the name that it is tied to)."""
        memory = self._memory()
        names = tuple((name, tuple(tensor.shape)) for name, tensor in memory.items())
        if names != self._known:
            self._places, self._known = disk_places(self._model, memory), names
        aliases = alias_names(self._model, memory)
        on_disk = {place.memory: name for name, place in self._places.items() if place.strides is None}
        for name in {*aliases, *aliases.values()}:
            if name not in on_disk:
                raise WeightSyncError(f"{name}: tied and also split on disk; this architecture cannot be synchronised.")
        tied = {on_disk[alias]: on_disk[kept] for alias, kept in aliases.items()}
        return {n: p.view(memory[p.memory]) for n, p in self._places.items() if n not in tied}, tied

    def alias_tensors(self) -> dict[str, Tensor]:
        """Every name on disk → view of the live tensor, aliases included."""
        memory = self._memory()
        self.read()
        return {name: place.view(memory[place.memory]) for name, place in self._places.items()}

    def _memory(self) -> dict[str, Tensor]:
        ignored: set[str] = set(getattr(unwrap(self._model), "_keys_to_ignore_on_save", None) or ())
        return {name: tensor for name, tensor in memory_tensors(self._model).items() if name not in ignored}


def build_manifest(tensors: Mapping[str, Tensor], tied: Mapping[str, str], dtype: str | None) -> Manifest:
    """The manifest of these tensors. Floating ones are stated at `dtype` when it is given, others at their own."""
    if dtype is not None and not torch_dtype(dtype).is_floating_point:
        raise WeightSyncError(f"dtype {dtype!r}: weights are cast to a floating dtype only; give float32 or bfloat16.")
    entries = tuple(
        TensorEntry(name, tuple(tensor.shape), _entry_dtype(name, tensor, dtype)) for name, tensor in tensors.items()
    )
    return Manifest(entries=entries, tied=tuple(sorted(tied.items())))


def _entry_dtype(name: str, tensor: Tensor, dtype: str | None) -> str:
    own = dtype_name(tensor.dtype)
    if own not in ITEM_BYTES:
        raise WeightSyncError(f"tensor {name!r}: dtype {own!r} cannot be sent; known: {', '.join(ITEM_BYTES)}.")
    return dtype if dtype is not None and tensor.dtype.is_floating_point else own


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the prefix: `float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name. WeightSyncError for a name that torch does not know or that cannot be sent."""
    found = getattr(torch, name, None) if name in ITEM_BYTES else None
    if not isinstance(found, torch.dtype):
        raise WeightSyncError(f"dtype {name!r} is unknown; known: {', '.join(ITEM_BYTES)}.")
    return found


def manifest_hash(manifest: Manifest) -> str:
    """32 hexadecimal digits over names, order, shapes, dtypes and tying."""
    return hashlib.blake2b(msgspec.json.encode(manifest), digest_size=16).hexdigest()


def diff(ours: Manifest, theirs: Manifest) -> str | None:
    """The first difference of two manifests in words (`ours` is what was expected), or None."""
    mine = {entry.name: entry for entry in ours.entries}
    other = {entry.name: entry for entry in theirs.entries}
    if missing := [name for name in mine if name not in other]:
        return f"{missing[0]} is missing ({len(missing)} missing in all)"
    if unexpected := [name for name in other if name not in mine]:
        return f"{unexpected[0]} is not expected ({len(unexpected)} unexpected in all)"
    for name, entry in mine.items():
        if entry.shape != other[name].shape:
            return f"{name} has shape {list(other[name].shape)}, expected {list(entry.shape)}"
        if entry.dtype != other[name].dtype:
            return f"{name} has dtype {other[name].dtype}, expected {entry.dtype}"
    for index, (one, two) in enumerate(zip(ours.entries, theirs.entries, strict=False)):
        if one.name != two.name:
            return f"tensor {index} is {two.name}, expected {one.name}: the order differs, or a name is there twice"
    if len(ours.entries) != len(theirs.entries):
        return f"{len(theirs.entries)} tensors, expected {len(ours.entries)}: a name is there twice"
    if ours.tied != theirs.tied:
        return f"tied names are {dict(theirs.tied)}, expected {dict(ours.tied)}"
    return None
