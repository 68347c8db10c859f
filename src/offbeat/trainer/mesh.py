"""The ranks of a trainer: the only file that knows there can be more than one.

Every rank runs the same updates in the same order on its own shard. Denominators are global and computed before, so
what ranks exchange is sums, once an update, after all backward passes: ranks may have different numbers of
micro-batches, or none at all, without waiting for each other in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Mesh:
    """This rank's place. `group` is a torch process group; None with one rank."""

    rank: int = 0
    world: int = 1
    group: Any = None

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Replaces each gradient by its sum over ranks. A rank without samples contributes zeros."""
        if self.world == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)

    def sum(self, values: Tensor) -> Tensor:
        """Sums in place over ranks."""
        if self.world > 1:
            from torch import distributed

            distributed.all_reduce(values, op=distributed.ReduceOp.SUM, group=self.group)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Largest over ranks, in place."""
        if self.world > 1:
            from torch import distributed

            distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=self.group)
        return values
