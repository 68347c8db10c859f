"""Signs of life from inside one pass of a model: however long it takes on a slow machine, each layer is told of.

The signs come from the work itself, never from a clock: a pass that hangs gives none. On an accelerator they are given
as a layer is launched, so that they run ahead of it by no more than the device's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def tell_of_layers(model: nn.Module, done: Callable[[], None]) -> None:
    """Calls `done` after the forward and after the backward pass of each layer and of the output head, recomputed
    layers included (gradient checkpointing). It changes no value.

    `done` must be thread-safe: backward passes run on threads of their own.
    """

    def after_forward(_module: nn.Module, _arguments: Any, output: Any) -> None:
        done()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            # Its gradient is ready when the backward pass of all that comes after this layer is.
            first.register_hook(after_backward)

    def after_backward(_gradient: Tensor) -> None:
        done()

    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    for module in [*_layers(model), *([] if head is None else [head])]:
        module.register_forward_hook(after_forward)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Entries of the outermost lists of modules: transformer blocks, but not the experts in one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)
