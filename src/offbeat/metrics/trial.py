"""What a handful of samples tells before a run is started: scores, failures, lengths, and what follows from them. Pure.

samples, reward functions of each source, limits ──▶ Trial ──▶ verdicts (sentences), lines
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.metrics import figures
from offbeat.metrics.alarms import NO_SPREAD_LIMIT, TRUNCATED_LIMIT, spread_advice
from offbeat.metrics.evaluation import mean_with_error
from offbeat.metrics.recorded import RecordedSample
from offbeat.metrics.records import has_spread, solved_fraction

NOT_GRADED_LIMIT = 0.1
"""A function that abstains on more than this share of its samples is spoken of."""
BINS = 24


@dataclass(frozen=True)
class PartScores:
    """One reward function. Errors of means are clustered by prompt: samples of one prompt are not independent."""

    name: str
    weight: float
    samples: int
    mean: float | None
    """Over the samples that have a value; a failed call counts as 0. None: no sample has one."""
    error: float | None
    low: float | None
    high: float | None
    abstained: int
    """Samples on which it returned None."""
    failed: int
    """Calls that raised, took too long or ended their worker."""
    first_error: str | None


@dataclass(frozen=True)
class Trial:
    """Everything that `offbeat try` measured."""

    prompts: int
    """Different ones: where more are asked for than the data has rows, some are sampled again in another epoch."""
    samples: int
    reward_mean: float
    reward_error: float | None
    reward_low: float
    reward_high: float
    parts: tuple[PartScores, ...]
    groups_with_spread_fraction: float
    solved_groups_fraction: float
    """See `records.solved_fraction`."""
    same_text_groups_fraction: float
    """Share of groups whose completions are all one text."""
    truncated_fraction: float
    empty_fraction: float
    """Completions without any text."""
    max_new_tokens: int
    length_mean: float
    length_percentiles: dict[str, int]
    """Tokens: `0` (shortest), `50`, `90`, `100` (longest)."""
    lengths: tuple[int, ...]
    """Samples in each of `BINS` equal bins from 0 to `max_new_tokens`."""
    tokens_generated: int
    time_generate_s: float
    time_reward_s: float


def measure(
    samples: Sequence[RecordedSample],
    functions: Mapping[str, Mapping[str, float]],
    *,
    max_new_tokens: int,
    time_generate_s: float,
    time_reward_s: float,
) -> Trial:
    """`functions`: source → name under which a function reports → its weight."""
    rewards = [sample.reward or 0.0 for sample in samples]
    groups: dict[tuple[str, int], list[RecordedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.prompt_id, sample.epoch), []).append(sample)
    grouped = [[sample.reward or 0.0 for sample in group] for group in groups.values()]
    mean, error, prompts = _clustered((sample.prompt_id, sample.reward or 0.0) for sample in samples)
    spread = [has_spread(group) for group in grouped]
    lengths = sorted(sample.completion_tokens for sample in samples)
    one_text = [len({sample.completion for sample in group}) == 1 < len(group) for group in groups.values()]
    return Trial(
        prompts=prompts,
        samples=len(samples),
        reward_mean=mean,
        reward_error=error,
        reward_low=min(rewards),
        reward_high=max(rewards),
        parts=tuple(_part(name, weight, samples, functions) for name, weight in _weights(functions, samples).items()),
        groups_with_spread_fraction=sum(spread) / len(grouped),
        solved_groups_fraction=solved_fraction(grouped) or 0.0,
        same_text_groups_fraction=sum(one_text) / len(grouped),
        truncated_fraction=sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        empty_fraction=sum(not sample.completion.strip() for sample in samples) / len(samples),
        max_new_tokens=max_new_tokens,
        length_mean=sum(lengths) / len(lengths),
        length_percentiles={str(p): lengths[round(p / 100 * (len(lengths) - 1))] for p in (0, 50, 90, 100)},
        lengths=_histogram(lengths, max_new_tokens),
        tokens_generated=sum(lengths),
        time_generate_s=time_generate_s,
        time_reward_s=time_reward_s,
    )


def _weights(functions: Mapping[str, Mapping[str, float]], samples: Sequence[RecordedSample]) -> dict[str, float]:
    sources = dict.fromkeys(sample.source for sample in samples)
    return {name: weight for source in sources for name, weight in functions[source].items()}


def _part(
    name: str, weight: float, samples: Sequence[RecordedSample], functions: Mapping[str, Mapping[str, float]]
) -> PartScores:
    own = [sample for sample in samples if name in functions[sample.source]]
    graded = [(sample.prompt_id, value) for sample in own if (value := sample.parts.get(name)) is not None]
    mean, error, _ = _clustered(graded) if graded else (None, None, 0)
    every = [value for _, value in graded]
    errors = [text.removeprefix(f"{name}: ") for s in own for text in s.errors if text.startswith(f"{name}: ")]
    return PartScores(
        name=name,
        weight=weight,
        samples=len(own),
        mean=mean,
        error=error,
        low=min(every, default=None),
        high=max(every, default=None),
        abstained=len(own) - len(every),
        failed=len(errors),
        first_error=errors[0] if errors else None,
    )


def _clustered(values: Iterable[tuple[str, float]]) -> tuple[float, float | None, int]:
    """Mean of (prompt, value) pairs with its standard error, and the number of prompts: a prompt's values are averaged
    first, of all its epochs, as they are not independent."""
    found: dict[str, list[float]] = {}
    for prompt, value in values:
        found.setdefault(prompt, []).append(value)
    return *mean_with_error([math.fsum(each) / len(each) for each in found.values()]), len(found)


def _histogram(lengths: Iterable[int], limit: int) -> tuple[int, ...]:
    bins = [0] * BINS
    for length in lengths:
        bins[min(BINS - 1, BINS * max(0, length - 1) // max(1, limit))] += 1
    return tuple(bins)


# --- words ----------------------------------------------------------------------------------------------------------


def trial_lines(trial: Trial) -> list[str]:
    """The figures, a line each."""
    shortest, middle, most, longest = trial.length_percentiles.values()
    size = f"{figures.counted(trial.samples, 'sample')} of {figures.counted(trial.prompts, 'prompt')}"
    rate = trial.tokens_generated / trial.time_generate_s if trial.time_generate_s > 0 else None
    return [
        f"reward     {figures.with_error(trial.reward_mean, trial.reward_error)}   {size}, "
        f"{_range(trial.reward_low, trial.reward_high)}",
        *(_part_line(part) for part in trial.parts),
        f"spread     {figures.percent(trial.groups_with_spread_fraction)} of groups have different rewards",
        f"truncated  {figures.percent(trial.truncated_fraction)} at {trial.max_new_tokens} new tokens",
        f"length     mean {trial.length_mean:.0f} · shortest {shortest} · median {middle} · 90 % up to {most} · "
        f"longest {longest}   0 {figures.sparkline(trial.lengths, BINS)} {trial.max_new_tokens}",
        f"speed      {figures.count(trial.tokens_generated)} tokens in {figures.seconds(trial.time_generate_s)}: "
        f"{figures.count(rate)} tokens/s · rewards {figures.seconds(trial.time_reward_s)}",
    ]


def _part_line(part: PartScores) -> str:
    mean = figures.MISSING if part.mean is None else figures.with_error(part.mean, part.error)
    words = [f"{part.name} {mean} × {part.weight:g}", f"{part.samples} samples"]
    if part.low is not None and part.high is not None:
        words.append(_range(part.low, part.high))
    if part.abstained:
        words.append(f"None {part.abstained} ({figures.percent(part.abstained / part.samples)})")
    if part.failed:
        words.append(f"failed {part.failed} ({figures.percent(part.failed / part.samples)})")
    return "           " + " · ".join(words)


def _range(low: float, high: float) -> str:
    if low == high:
        return f"all {figures.short(low)}"
    return f"{figures.short(low)} to {figures.short(high)}"


def verdicts(trial: Trial, *, max_error_fraction: float) -> list[str]:
    """What stands in the way of learning, worst first; empty where nothing does."""
    return [
        *_failures(trial, max_error_fraction),
        *_spread(trial),
        *(_constant(part) for part in trial.parts if trial.reward_low != trial.reward_high and _is_constant(part)),
        *_lengths(trial),
    ]


def _failures(trial: Trial, max_error_fraction: float) -> Iterable[str]:
    calls = sum(part.samples for part in trial.parts)
    failed = sum(part.failed for part in trial.parts)
    for part in trial.parts:
        if part.failed:
            yield (
                f"{part.name} failed on {part.failed} of {part.samples} samples, which then count as 0; the first: "
                f"{part.first_error}."
            )
        if part.samples and part.abstained / part.samples > NOT_GRADED_LIMIT:
            yield (
                f"{part.name} has no value (None) for {figures.percent(part.abstained / part.samples)} of its samples: "
                "if these are answers that it cannot read, return 0 for them, or say in the prompt how to answer."
            )
    if calls and failed / calls > max_error_fraction:
        yield (
            f"A run would stop at its first step: {figures.percent(failed / calls)} of reward calls fail, more than "
            f"rewards.max_error_fraction = {max_error_fraction:g}."
        )


def _spread(trial: Trial) -> Iterable[str]:
    without = 1 - trial.groups_with_spread_fraction
    if trial.reward_low == trial.reward_high:
        if trial.reward_high == 0:
            yield (
                "All rewards are 0: nothing can be learned. Look at the completions below: use easier data, a better "
                "prompt or model, a [warmup], or a reward that gives part of the credit."
            )
        else:
            yield (
                f"All rewards are {figures.short(trial.reward_high)}: nothing can be learned. Use a reward that "
                "tells good samples from bad ones, or harder data."
            )
    elif without > NO_SPREAD_LIMIT:
        advice = spread_advice(without, trial.solved_groups_fraction)
        yield f"{figures.percent(without)} of groups are without spread and teach nothing. {advice}"
    if trial.same_text_groups_fraction > NO_SPREAD_LIMIT:
        yield (
            f"In {figures.percent(trial.same_text_groups_fraction)} of groups all completions are the same text: raise "
            "sampling.temperature."
        )


def _is_constant(part: PartScores) -> bool:
    return part.low is not None and part.low == part.high


def _constant(part: PartScores) -> str:
    value = figures.short(part.low)
    return f"{part.name} is {value} for every sample: it teaches nothing here; is it the function that you mean?"


def _lengths(trial: Trial) -> Iterable[str]:
    if trial.truncated_fraction > TRUNCATED_LIMIT:
        yield (
            f"{figures.percent(trial.truncated_fraction)} of samples are cut off at {trial.max_new_tokens} new tokens: "
            "raise sampling.max_new_tokens, or check that the model's stop ids are right (offbeat check)."
        )
    if trial.empty_fraction > TRUNCATED_LIMIT:
        yield (
            f"{figures.percent(trial.empty_fraction)} of completions are empty: the model stops at once; check the "
            "prompt format (offbeat check --tokens)."
        )
