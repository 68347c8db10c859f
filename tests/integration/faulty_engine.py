"""The hf engine with a loader that keeps nothing of what it receives: `python -m faulty_engine`.

OFFBEAT_TEST_LOADER = "deaf@n"    from the n-th transfer on, nothing reaches the model
                      "liar@n"    the same, and what came is shown in place of the model's memory
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch

from offbeat.rollout import weight_sink, worker
from offbeat.rpc.messages import Manifest
from offbeat.rpc.server import Method, WorkerContext, serve


class Deaf(weight_sink.ModelWeightSink):
    """Takes every tensor and loads none."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | str) -> None:
        super().__init__(model, dtype)
        kind, _, first = os.environ["OFFBEAT_TEST_LOADER"].partition("@")
        self.lies = kind == "liar"
        self.left = int(first) - 1
        self.came: dict[str, torch.Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.left -= 1
        if self.left >= 0:
            super().load(tensors)
        else:
            self.came = {name: tensor.clone() for name, tensor in tensors}

    def finish(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        memory = super().finish(manifest)
        return {**memory, **self.came} if self.lies else memory


def build(context: WorkerContext) -> Mapping[str, Method]:
    weight_sink.ModelWeightSink = Deaf
    return worker.build(context)


if __name__ == "__main__":
    serve(build)
