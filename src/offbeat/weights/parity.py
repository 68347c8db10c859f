"""The parity probe, as pure decisions: does the engine compute what the trainer computes, at the same version?

Digests show that the bytes are right. They cannot show that a model *uses* them: a head that is no longer tied, a stale
cache, a layer the loader skipped, a temperature that is ignored. Logprobs of the engine's own samples, scored again by
the trainer, do. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from offbeat.config import Dtype
from offbeat.errors import WeightSyncError
from offbeat.types import FloatArray, Rollout, Sampling

FLOAT32_TOLERANCE = 1e-3
BFLOAT16_CAP = 0.5
BFLOAT16_FLOOR = 0.05
"""A few tokens of the first sync may agree by luck; three times almost nothing would then fail for rounding alone."""
MAX_MASKED = 0.05
"""Share of probe tokens that may lie outside the trainer's own nucleus when sampling truncates."""


@dataclass(frozen=True)
class Gap:
    """|engine logprob − trainer logprob| over the probe tokens of one engine."""

    mean: float
    max: float
    where: str
    """Prompt, sample and token of the largest gap, with both values."""


class Baseline(msgspec.Struct, frozen=True):
    """What later probes are held against. A checkpoint keeps it: a resume goes on with it."""

    dtype: Dtype
    """The coarser one of the two sides: with another, the gap says nothing."""
    gap: float
    """Of the first probe."""
    version: int
    """Of the newest probe that was due."""


@dataclass
class Probes:
    """At which syncs the probe runs: the first, and every `every`-th version after it (0: none).

    A process that continues a run probes its first sync besides, for its engines are new; so does the sync after one
    that failed.
    """

    every: int
    baseline: Baseline | None = None
    _seen: bool = False
    """This process has probed, and no sync has failed since."""

    def due(self, version: int, dtype: Dtype) -> bool:
        """`dtype`: the coarser one of the two sides."""
        if self.baseline is not None and self.baseline.dtype != dtype:
            self.baseline = None
        return not self._seen or self._regular(version)

    def passed(self, version: int, dtype: Dtype, largest: float) -> None:
        """The probe of this version has run, and its largest gap was within the limit."""
        if self.baseline is None:
            self.baseline = Baseline(dtype, largest, version)
        elif self._regular(version):
            self.baseline = msgspec.structs.replace(self.baseline, version=version)
        self._seen = True

    def failed(self) -> None:
        """A sync failed: its engines hold nothing that was ever probed, so the next one is."""
        self._seen = False

    def _regular(self, version: int) -> bool:
        if self.baseline is None:
            return True
        since = version - self.baseline.version
        return self.every > 0 and (since >= self.every or since <= 0)  # a sync that failed is made again


def gap(engine: str, rollouts: Sequence[Rollout], trainer: Sequence[FloatArray], sampling: Sampling) -> Gap:
    """Compare token by token. WeightSyncError when there is nothing to compare or a number is not finite."""
    if len(rollouts) != len(trainer) or not rollouts:
        raise WeightSyncError(
            f"parity probe of {engine}: {len(rollouts)} samples, {len(trainer)} scored by the trainer."
        )
    total, tokens, masked, largest, where = 0.0, 0, 0, -1.0, ""
    for rollout, scored in zip(rollouts, trainer, strict=True):
        own = np.asarray(rollout.logprobs, np.float64)
        other = np.asarray(scored, np.float64)
        if own.shape != other.shape:
            raise WeightSyncError(f"parity probe of {engine}: {own.size} logprobs, the trainer gave {other.size}.")
        kept = np.isfinite(other) if sampling.truncates else np.ones(own.shape, bool)
        masked += int(own.size - kept.sum())
        delta = np.abs(own - other)[kept]
        if not np.all(np.isfinite(delta)):
            raise WeightSyncError(f"parity probe of {engine}: a logprob is not finite: weights or logits are broken.")
        tokens += own.size
        total += float(delta.sum())
        if delta.size and float(delta.max()) > largest:
            at = int(np.flatnonzero(kept)[int(delta.argmax())])
            largest = float(delta.max())
            place = f"prompt {rollout.prompt_id}, sample {rollout.sample_index}, token {at}"
            where = f"{place}: engine {own[at]:.5f}, trainer {other[at]:.5f}"
    if tokens == masked or masked > max(1.0, MAX_MASKED * tokens):
        raise WeightSyncError(
            f"parity probe of {engine}: {masked} of {tokens} sampled tokens lie outside what the trainer would sample "
            "at this top_p, top_k and min_p: the two sides do not truncate alike."
        )
    return Gap(total / (tokens - masked), largest, where)


def tolerance(dtype: Dtype, first: float | None, given: float | None) -> float:
    """Largest gap that is let pass. `first` is the gap of the first sync; None at the first sync itself."""
    if given is not None:
        return given
    if dtype == "float32":
        return FLOAT32_TOLERANCE
    return BFLOAT16_CAP if first is None else min(BFLOAT16_CAP, max(BFLOAT16_FLOOR, 3 * first))


def check_gap(engine: str, found: Gap, limit: float, *, version: int, sampling: Sampling) -> None:
    """WeightSyncError in words unless the gap is within the limit."""
    if found.max <= limit:
        return
    raise WeightSyncError(
        f"parity probe of {engine} at version {version}: its logprobs differ from the trainer's by up to "
        f"{found.max:.4g} (mean {found.mean:.4g}), allowed is {limit:.4g}. Largest at {found.where}. The bytes in its "
        "memory are those that were sent, so the engine computes something else with them. Likely causes: a tied "
        "output head or another derived copy of a weight was not refreshed; a cache of the old weights was not reset; "
        f"a layer is laid out differently; the temperature ({sampling.temperature:g}) or truncation is applied "
        "differently; or the engine's dtype is coarser than weights.parity_tolerance allows for. Nothing was committed."
    )
