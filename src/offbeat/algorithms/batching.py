"""The controller's step from scored rollouts to a batch: groups, advantages, updates, denominators. Pure.

    scored ── groups by (prompt_id, epoch) ── advantages ── drop those without spread ── deal to updates ── Batch

- A group is what carries one (prompt_id, epoch): never neighbouring rows, never equal prompt tokens. Groups may have
  unequal sizes or miss samples.
- Groups without spread carry no signal. They leave the numerator *and* the denominator: the step
  size does not depend on how many prompts are solved or hopeless.
- The groups that are left are dealt, whole and in order of first appearance, evenly over `updates_per_step`; the
  number of updates survives filtering. One that got no group is an empty mini-batch with denominator 0, which the
  trainer skips.
- Each pass of `epochs_per_batch` repeats the same updates in the same order.
- Each sample's advantage stands at every one of its trained tokens, the last one included.

torch is imported inside the call: the controller imports this module without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from offbeat.config import LossSection
from offbeat.errors import RewardError, RunError
from offbeat.types import Batch, MiniBatch, Sampling, Scored, TrainSample


def make_batch(
    step: int,
    scored: Sequence[Scored],
    sampling: Sampling,
    *,
    loss: LossSection,
    updates_per_step: int,
    epochs_per_batch: int,
) -> Batch:
    """One training step's batch, for one rank.

    Raises:
        RunError: no samples, or two rollouts with one (prompt_id, epoch, sample_index).
        RewardError: a reward that is not a finite number.
    """
    import torch

    from offbeat.algorithms.advantages import group_advantages

    _check(step, scored)
    group_N = _group_numbers(scored)
    rewards = np.asarray([item.reward for item in scored], dtype=np.float64)
    result = group_advantages(torch.from_numpy(rewards), torch.from_numpy(group_N), scale_by_std=loss.scale_by_std)
    advantages = result.advantages_N.numpy()
    kept = result.has_spread_N.numpy()

    updates = _deal([int(g) for g in dict.fromkeys(group_N[kept].tolist())], updates_per_step)
    members: dict[int, list[int]] = {}
    for index in np.flatnonzero(kept).tolist():
        members.setdefault(int(group_N[index]), []).append(index)
    one_pass = tuple(
        _minibatch([(scored[i], advantages[i]) for group in update for i in members[group]], loss, sampling)
        for update in updates
    )
    return Batch(step=step, minibatches=one_pass * epochs_per_batch, sampling=sampling)


def _check(step: int, scored: Sequence[Scored]) -> None:
    if not scored:
        raise RunError(f"step {step} has no samples: nothing was generated for it")
    seen: set[tuple[str, int, int]] = set()
    for item in scored:
        rollout = item.rollout
        key = (rollout.prompt_id, rollout.epoch, rollout.sample_index)
        if key in seen:
            raise RunError(f"step {step} has sample {rollout.sample_index} of prompt {rollout.prompt_id!r} twice")
        seen.add(key)
        if not np.isfinite(item.reward):
            raise RewardError(
                f"the reward of prompt {rollout.prompt_id!r}, sample {rollout.sample_index}, is {item.reward}: "
                "make the reward function return a finite number"
            )


def _group_numbers(scored: Sequence[Scored]) -> np.ndarray:
    """Which group each sample is of, numbered by first appearance (int64)."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [(item.rollout.prompt_id, item.rollout.epoch) for item in scored]
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _deal(groups: list[int], updates: int) -> list[list[int]]:
    """Consecutive shares whose sizes differ by at most one."""
    bounds = [len(groups) * k // updates for k in range(updates + 1)]
    return [groups[low:high] for low, high in pairwise(bounds)]


def _minibatch(members: Sequence[tuple[Scored, float]], loss: LossSection, sampling: Sampling) -> MiniBatch:
    from offbeat.algorithms.reduce import aggregation_denominator

    samples = tuple(_train_sample(item, advantage) for item, advantage in members if len(item.rollout.token_ids) > 0)
    trained = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
    denominator = aggregation_denominator(trained, loss.aggregation, max_new_tokens=sampling.max_new_tokens)
    return MiniBatch(samples=samples, denominator=denominator)


def _train_sample(item: Scored, advantage: float) -> TrainSample:
    rollout = item.rollout
    tokens = len(rollout.token_ids)
    mask = np.ones(tokens, dtype=np.uint8) if rollout.loss_mask is None else rollout.loss_mask
    return TrainSample(
        prompt_token_ids=rollout.prompt_token_ids,
        token_ids=rollout.token_ids,
        logprobs=rollout.logprobs,
        advantages=np.full(tokens, advantage, dtype=np.float32),
        loss_mask=mask,
    )
