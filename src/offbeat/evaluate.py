"""Held-out evaluation: what the engines' weights can do, labelled with the version that really answered.

`evaluate` runs between a sync and the next launch, while engines are idle. Every set has its own sampling; seeds hash
the identity of a sample with the epoch fixed to 0, so each evaluation of a run draws the same random numbers and two
points differ by the weights only. The statistics are in `offbeat.metrics.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from offbeat.errors import RunError
from offbeat.metrics.evaluation import EvalResult, must_have_version, summarize
from offbeat.metrics.figures import counted
from offbeat.ports import Engine, Reward
from offbeat.types import GenerateRequest, Prompt, Rollout, Sampling, Scored, sample_seed

__all__ = ["EvalResult", "EvalSet", "evaluate", "requests_of", "summarize"]


@dataclass(frozen=True)
class EvalSet:
    """One held-out set, ready to ask."""

    name: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    samples_per_prompt: int = 1
    pass_threshold: float = 1.0
    """A sample passes when its reward is at least this."""

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    def __str__(self) -> str:
        """`heldout: 200 prompts, 1 sample each`."""
        return f"{self.name}: {counted(len(self.prompts), 'prompt')}, {counted(self.samples_per_prompt, 'sample')} each"


def requests_of(eval_set: EvalSet, run_seed: int) -> list[GenerateRequest]:
    """What the engines are asked: the same seeds at each evaluation of a run."""
    return [
        GenerateRequest(
            prompt_id=prompt.id,
            epoch=0,
            token_ids=prompt.token_ids,
            seeds=tuple(sample_seed(run_seed, prompt.id, i, 0) for i in range(eval_set.samples_per_prompt)),
        )
        for prompt in eval_set.prompts
    ]


async def evaluate(
    sets: Sequence[EvalSet],
    engine: Engine,
    reward: Reward,
    *,
    step: int,
    version: int,
    run_seed: int,
    begins: Callable[[EvalSet], None] | None = None,
    seen: Callable[[EvalSet, list[Scored]], None] | None = None,
) -> list[EvalResult]:
    """One point of each set, in order. `begins` is told of a set before it is asked, `seen` gets its scored samples, to
    write them down.

    Raises `RunError` when an engine answers with another version than `version`, or with other samples than asked for.
    """
    results: list[EvalResult] = []
    for eval_set in sets:
        if begins is not None:
            begins(eval_set)
        rollouts = await engine.generate(requests_of(eval_set, run_seed), eval_set.sampling)
        prompts = _prompts_of(eval_set, rollouts, version)
        scored = await reward.score(rollouts, prompts)
        if seen is not None:
            seen(eval_set, scored)
        results.append(
            summarize(eval_set.name, scored, step=step, version=version, pass_threshold=eval_set.pass_threshold)
        )
    return results


def _prompts_of(eval_set: EvalSet, rollouts: Sequence[Rollout], version: int) -> list[Prompt]:
    """The prompt of each rollout, after checking that they are the ones asked for, at the version promised."""
    asked = [(prompt, index) for prompt in eval_set.prompts for index in range(eval_set.samples_per_prompt)]
    got = [(rollout.prompt_id, rollout.sample_index) for rollout in rollouts]
    if got != [(prompt.id, index) for prompt, index in asked]:
        raise RunError(
            f"eval {eval_set.name}: asked for {len(asked)} samples ({len(eval_set.prompts)} prompts × "
            f"{eval_set.samples_per_prompt}) in order, the engine gave {len(got)} others: {got[:3]}…"
        )
    for rollout in rollouts:
        must_have_version(eval_set.name, rollout, version)
    return [msgspec.structs.replace(prompt, epoch=0) for prompt, _ in asked]
