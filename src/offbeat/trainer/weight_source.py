"""The trainer's side of a weight transfer for any torch model: its checkpoint on disk, read from live memory.

Nothing is gathered at once: sharded parameters (FSDP2) become whole one at a time, on every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from offbeat.rpc.messages import Manifest
from offbeat.weights.manifest import LiveCheckpoint, build_manifest

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelWeightSource:
    """`WeightSource` of a transformers model (or any module; wrappers are stepped through)."""

    def __init__(self, model: nn.Module) -> None:
        self._checkpoint = LiveCheckpoint(model)

    def manifest(self, dtype: str | None) -> Manifest:
        """As the checkpoint is written now; floating tensors stated at `dtype`."""
        tensors, tied = self._checkpoint.read()
        return build_manifest(tensors, tied, dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in manifest order, at their own dtype. Collective when parameters are sharded."""
        for name, tensor in self._checkpoint.read()[0].items():
            whole: Any = getattr(tensor, "full_tensor", None)  # a DTensor: every rank gathers
            yield name, tensor if whole is None else whole()
