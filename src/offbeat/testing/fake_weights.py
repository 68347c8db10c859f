"""Fakes of the two ends of a weight transfer: plain tensors by name, without a model. For tests of what moves them.

A `FakeWeightSink` can be told to forget a tensor, or to corrupt one element of it: what verification must notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import Manifest
from offbeat.weights.manifest import build_manifest


@dataclass
class FakeWeightSource:
    """`ports.WeightSource` of given tensors, in their order."""

    weights: Mapping[str, Tensor]

    def manifest(self, dtype: str | None) -> Manifest:
        return build_manifest(self.weights, {}, dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


@dataclass
class FakeWeightSink:
    """`ports.WeightSink` into given tensors; `loaded` has the names in the order in which they came."""

    weights: dict[str, Tensor]
    forget: str | None = None
    corrupt: str | None = None
    loaded: list[str] = field(default_factory=list[str])

    def check(self, manifest: Manifest) -> None:
        offered = {entry.name: entry.shape for entry in manifest.entries}
        wanted = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        wrong = sorted(name for name in {*offered, *wanted} if offered.get(name) != wanted.get(name))
        if wrong:
            raise WeightSyncError(f"missing, unexpected or misshapen: {', '.join(wrong)}")

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            if name != self.forget:
                self.weights[name].copy_(tensor)

    def finish(self, manifest: Manifest) -> dict[str, Tensor]:
        if self.corrupt is not None:
            self.weights[self.corrupt].view(-1)[0] += torch.ones((), dtype=self.weights[self.corrupt].dtype)
        return {entry.name: self.weights[entry.name] for entry in manifest.entries}
