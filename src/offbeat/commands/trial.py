"""`offbeat try`: sample and score a few prompts as step 0 of a run would, and say what that means.

Same prompts, seeds, sampling, weights (after `[warmup]`, unless told otherwise) and reward functions. Writes into no
run, and leaves nothing behind but the files that it is asked for.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from offbeat.build import System
from offbeat.commands.output_file import check_output
from offbeat.commands.printing import console, show
from offbeat.commands.serving import serve
from offbeat.config import Config
from offbeat.errors import ConfigError
from offbeat.host import require_host
from offbeat.metrics.display import Display
from offbeat.metrics.recorded import Order, RecordedSample, best, first_of, worst
from offbeat.metrics.sample_text import Line, sample_lines
from offbeat.metrics.samples import sample_objects
from offbeat.metrics.trial import Trial, measure, trial_lines, verdicts
from offbeat.metrics.writer import encode_line
from offbeat.prepare import Prepared, prepare
from offbeat.rewards.functions import short_names
from offbeat.stages import generate_requests
from offbeat.types import Prompt, Scored

SHOWN = 3
TEXT_LIMIT = 800


@dataclass(frozen=True)
class Outputs:
    """Files that are written when asked for."""

    figures: Path | None = None
    """One JSON object: every field of `Trial`, and the verdicts."""
    samples: Path | None = None
    """In the form of samples.jsonl."""

    def check(self) -> None:
        for option, path in (("--json", self.figures), ("--samples", self.samples)):
            if path is not None:
                check_output(option, path)

    def write(self, trial: Trial, said: Sequence[str], objects: Iterable[dict[str, Any]]) -> None:
        if self.samples is not None:
            self.samples.write_bytes(b"".join(encode_line(one) for one in objects))
        if self.figures is not None:
            values = {**asdict(trial), "verdicts": list(said)}
            self.figures.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def try_config(
    config: Config,
    *,
    prompts: int,
    warmup: bool = True,
    outputs: Outputs | None = None,
    display: Display,
    out: Console | None = None,
) -> Trial:
    """Print what `prompts` × samples_per_prompt samples look like. Raises `ConfigError` and `RunError`."""
    outputs = outputs or Outputs()
    if prompts < 1:
        raise ConfigError(f"-n {prompts}: must be at least 1.")
    outputs.check()
    # What failing calls mean is told at the end; the first few must not end it.
    rewards = config.rewards.model_copy(update={"max_error_fraction": 1.0})
    prepared = prepare(config.model_copy(update={"rewards": rewards, "eval": ()}))
    require_host(config)
    wanted = first_prompts(prepared.prompts.batch, prompts)

    async def body(system: System, version: int) -> tuple[list[Scored], float, float]:
        if config.warmup is not None and not warmup:
            display.warn("without the supervised warm-up: a run would start from other weights")
        display.phase(f"sampling {prompts} prompts × {config.samples_per_prompt}")
        started_s = time.monotonic()
        requests = generate_requests(wanted, config.samples_per_prompt, config.seed)
        rollouts = await system.engine.generate(requests, prepared.sampling)
        generated_s = time.monotonic()
        display.phase("scoring")
        scored = await system.reward.score(rollouts, wanted)
        return scored, generated_s - started_s, time.monotonic() - generated_s

    scored, generate_s, reward_s = serve("try", prepared, display, body, warmup=warmup)
    objects = sample_objects(0, scored)
    samples = [msgspec.json.decode(encode_line(one), type=RecordedSample) for one in objects]
    trial = measure(
        samples,
        _functions(prepared),
        max_new_tokens=prepared.sampling.max_new_tokens,
        time_generate_s=generate_s,
        time_reward_s=reward_s,
    )
    said = verdicts(trial, max_error_fraction=config.rewards.max_error_fraction)
    show(report(trial, said, samples), out or console())
    outputs.write(trial, said, objects)  # last: a disk that is full by now costs the files only
    return trial


def first_prompts(batch: Callable[[int], list[Prompt]], count: int) -> list[Prompt]:
    """The first prompts that a run would see, those of later steps too where one step has fewer."""
    every = itertools.chain.from_iterable(batch(step) for step in itertools.count())
    return list(itertools.islice(every, count))


def _functions(prepared: Prepared) -> dict[str, dict[str, float]]:
    """Source → the name under which a function reports → its weight."""
    weights = prepared.reward_weights
    names = short_names(spec for functions in weights.values() for spec in functions)
    return {source: {names[spec]: w for spec, w in functions.items()} for source, functions in weights.items()}


def report(trial: Trial, said: Sequence[str], samples: Sequence[RecordedSample]) -> list[Line]:
    """Figures, verdicts, and the worst and best samples, where they differ."""
    lines: list[Line] = [("", ""), *(("", line) for line in trial_lines(trial)), ("", "")]
    lines += [("bold yellow", f"! {sentence}") for sentence in said]
    if not said:
        lines.append(("bold green", "Nothing stands in the way of training on this."))
    lines.append(("", ""))
    low = _shown(samples, worst)
    lines += [("bold", f"worst {len(low)} of {len(samples)} samples"), ("", "")]
    lines += [line for sample in low for line in sample_lines(sample, TEXT_LIMIT)]
    high = [sample for sample in _shown(samples, best) if sample not in low]
    if high and trial.reward_low != trial.reward_high:
        lines += [("bold", f"best {len(high)}"), ("", "")]
        lines += [line for sample in high for line in sample_lines(sample, TEXT_LIMIT)]
    return lines


def _shown(samples: Sequence[RecordedSample], order: Order) -> list[RecordedSample]:
    """The first in this order, of different prompts as far as there are so many."""
    first: dict[str, RecordedSample] = {}
    others: list[RecordedSample] = []
    for sample in first_of(samples, len(samples), order):
        if first.setdefault(sample.prompt_id, sample) is not sample:
            others.append(sample)
    return [*first.values(), *others][:SHOWN]
