"""The training loops, a page each. They order stages and do nothing else: no logging, no backends, no features.

Which loop runs follows from `max_staleness`: 0 → `on_policy`, 1 → `one_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

Sampled = TypeVar("Sampled")


class Stages(Protocol, Generic[Sampled]):
    """What a loop needs. `Sampled` is one step's scored samples; a loop hands it on and never looks inside."""

    def steps(self) -> Iterator[int]:
        """The steps still to do, in order; ends early when the run is told to stop."""
        ...

    def has(self, step: int) -> bool:
        """True when `step` is one of the steps to do, and the run has not been told to stop."""
        ...

    async def sync(self) -> None:
        """Every engine gets the trainer's weights, verified. Engines must be idle."""
        ...

    async def evaluate(self) -> None:
        """Run the evaluations that are due at the engines' version. Engines must be idle."""
        ...

    async def sample(self, step: int) -> Sampled:
        """Generate and score the samples of a step with the weights that the engines hold now."""
        ...

    async def train(self, step: int, sampled: Sampled) -> None:
        """Update the weights with one step's samples, then record and save."""
        ...
