"""`offbeat samples`: what a run wrote, to read in a terminal. Two passes at most, with as many samples in memory as
are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from offbeat.commands.printing import console, progress, show_paged
from offbeat.errors import ConfigError
from offbeat.metrics.figures import counted
from offbeat.metrics.recorded import Damage, Order, RecordedSample, Wanted, first_of, read_samples, sample_files
from offbeat.metrics.sample_text import Line, sample_lines

TEXT_LIMIT = 2000
"""Characters of a prompt or completion that are shown unless all are asked for."""


@dataclass(frozen=True)
class Choice:
    """What to show."""

    wanted: Wanted = field(default_factory=Wanted)
    order: Order | None = None
    """None: the newest."""
    count: int = 5
    groups: bool = False
    """Show all samples of the prompts that the chosen samples belong to."""
    full: bool = False


def samples(target: Path, choice: Choice, *, out: Console | None = None) -> None:
    """Print them. Raises `ConfigError` when there is no file, or no such sample in it."""
    if choice.count < 1:
        raise ConfigError(f"-n {choice.count}: must be at least 1.")
    paths, damage = sample_files(target), Damage()
    with progress("reading samples", sum(path.stat().st_size for path in paths)) as seen:
        every = read_samples(paths, seen, damage)
        chosen = first_of((sample for sample in every if sample in choice.wanted), choice.count, choice.order)
    told = damage.words()
    if not chosen:
        raise ConfigError(_nothing(target, paths, choice.wanted), *([] if told is None else [told]))
    if choice.groups:
        chosen = _whole_groups(paths, chosen)
    lines = [line for sample in chosen for line in sample_lines(sample, None if choice.full else TEXT_LIMIT)]
    warned: list[Line] = [] if told is None else [("bold yellow", f"! {told}")]
    show_paged([*lines, _last_line(chosen), *warned], out or console())


def _whole_groups(paths: Sequence[Path], chosen: Sequence[RecordedSample]) -> list[RecordedSample]:
    """In the order in which the groups were chosen."""
    order = {group: place for place, group in enumerate(dict.fromkeys(sample.group for sample in chosen))}
    found = [sample for sample in read_samples(paths) if sample.group in order]
    return sorted(found, key=lambda sample: (order[sample.group], sample.sample_index))


def _last_line(chosen: Sequence[RecordedSample]) -> Line:
    groups = len({sample.group for sample in chosen})
    return ("dim", f"{counted(len(chosen), 'sample')} of {counted(groups, 'prompt')}")


def _nothing(target: Path, paths: Sequence[Path], wanted: Wanted) -> str:
    """What there is instead."""
    steps: dict[str | None, tuple[int, int]] = {}
    for sample in read_samples(paths):
        low, high = steps.get(sample.eval, (sample.step, sample.step))
        steps[sample.eval] = (min(low, sample.step), max(high, sample.step))
    there = [
        f"training steps {low} to {high}" if name is None else f"eval {name} at versions {low} to {high}"
        for name, (low, high) in steps.items()
    ]
    asked = "training samples" if wanted.evaluation is None else f"samples of eval {wanted.evaluation!r}"
    limits = [
        *([] if wanted.step is None else [f"step {wanted.step}"]),
        *([] if wanted.prompt is None else [f"prompt {wanted.prompt!r}"]),
        *([] if wanted.text is None else [f"text {wanted.text!r}"]),
    ]
    with_ = f" with {' and '.join(limits)}" if limits else ""
    return f"{target} has no {asked}{with_}; it has {', '.join(there) or 'no sample at all yet'}."
