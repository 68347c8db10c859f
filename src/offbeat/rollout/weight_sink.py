"""The engine's side of a weight transfer for a transformers model: tensors are written into live memory in place.

`check` compares names, shapes, dtypes and tying before the first byte; `finish` confirms tying, refreshes what was
derived from the weights, and hands out the model's own memory, of which the digest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import Manifest
from offbeat.weights.manifest import LiveCheckpoint, dtype_name, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHOWN = 5


class ModelWeightSink:
    """`WeightSink` of a transformers model.

    Args:
        model: the live model; its parameters may be re-created between transfers.
        dtype: what the model computes in; its floating parameters must have this dtype or a wider one.
        refresh: called in order by `finish`, before anything is verified: recompute derived copies of weights, reset
            prefix caches. An exception fails the transfer, so that nothing stale is ever served.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | str, refresh: Sequence[Callable[[], None]] = ()) -> None:
        self._checkpoint = LiveCheckpoint(model)
        self._dtype = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        self._refresh = tuple(refresh)

    def check(self, manifest: Manifest) -> None:
        """Raises WeightSyncError that names every missing, unexpected or misshapen tensor, and every tying conflict."""
        own, tied = self._checkpoint.read()
        offered = {entry.name: entry for entry in manifest.entries}
        offered_ties = dict(manifest.tied)
        problems: list[str] = []
        if len(offered) != len(manifest.entries):
            problems.append("a name is in the manifest twice")
        covered = {*offered, *(a for a, kept in offered_ties.items() if kept in offered)}
        problems += _names("missing from the transfer", [name for name in own if name not in covered])
        problems += _names("unknown to this model", [n for n in offered if n not in own and n not in tied])
        problems += _names("unknown to this model (tied)", [n for n in offered_ties if n not in own and n not in tied])
        for name, entry in offered.items():
            if name in tied:
                problems.append(
                    f"{name} is a tensor of its own in the trainer, but this model ties it to {tied[name]}: "
                    "load both with the same tie_word_embeddings"
                )
            elif name in own:
                problems += _unlike(name, own[name], entry.shape, torch_dtype(entry.dtype), self._dtype)
        if problems:
            raise WeightSyncError("the trainer's weights do not fit this engine's model: " + "; ".join(problems) + ".")

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies whole tensors into the model as they come."""
        own, _ = self._checkpoint.read()
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in own:
                    raise WeightSyncError(f"{name}: received, but this model has no such tensor.")
                own[name].copy_(tensor.view(own[name].shape))

    def finish(self, manifest: Manifest) -> dict[str, Tensor]:
        """Confirms tying, refreshes derived copies, returns the model's own memory of every manifest entry."""
        names = self._checkpoint.alias_tensors()
        with torch.no_grad():
            for alias, kept in manifest.tied:
                if names[alias].data_ptr() != names[kept].data_ptr():
                    names[alias].copy_(names[kept])  # tied in the trainer, two tensors here
        for refresh in self._refresh:
            refresh()
        names = self._checkpoint.alias_tensors()
        for alias, kept in manifest.tied:
            if not torch.equal(names[alias], names[kept]):
                raise WeightSyncError(f"{alias} is tied to {kept} in the trainer, but they differ here after the load.")
        return {entry.name: names[entry.name] for entry in manifest.entries}


def _unlike(name: str, own: Tensor, shape: tuple[int, ...], sent: torch.dtype, computes: torch.dtype) -> list[str]:
    if tuple(own.shape) != shape:
        return [f"{name} has shape {list(shape)}, this model needs {list(own.shape)}"]
    if own.is_floating_point() and torch.promote_types(own.dtype, computes) != own.dtype:
        return [f"{name} is {dtype_name(own.dtype)} here though the engine was asked for {dtype_name(computes)}"]
    if torch.promote_types(own.dtype, sent) != own.dtype or own.dtype.is_floating_point != sent.is_floating_point:
        return [f"{name} comes as {dtype_name(sent)} and would lose precision as {dtype_name(own.dtype)}"]
    return []


def _names(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]
