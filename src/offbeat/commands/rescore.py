"""`offbeat rescore`: a changed reward over recorded samples. No engine, no trainer, no tokenizer, no torch.

    samples.jsonl ── a step at a time ──▶ reward workers ──▶ old against new
    rows of the run's data, by prompt id ─┘

samples.jsonl has texts and no columns. A prompt id names source and row, so columns come from the run's data as it is
now; each sample holds a digest of the columns that it was graded with, and one whose row has changed is left out and
counted (or graded by the new row, when asked for). Nothing of the run is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from rich.console import Console

from offbeat.commands.output_file import check_output
from offbeat.commands.passing import passing_folder
from offbeat.commands.printing import console, progress, show
from offbeat.commands.run_config import run_config
from offbeat.config import Config, DataSection, load_config
from offbeat.data.columns import check_column, columns_everywhere
from offbeat.data.prompts import columns_of, eval_data_section
from offbeat.data.sources import Rows, load_rows
from offbeat.durable import replacing
from offbeat.errors import ConfigError
from offbeat.interrupt import Interrupt
from offbeat.metrics.figures import counted
from offbeat.metrics.recorded import Damage, RecordedSample, Wanted, read_samples, sample_files
from offbeat.metrics.rescoring import Comparison, Score, comparison_lines
from offbeat.metrics.sample_text import Line, sample_lines
from offbeat.metrics.samples import TEXT_LIMIT
from offbeat.metrics.writer import CONFIG, RunFolder, encode_line
from offbeat.rewards.functions import check_columns, inspect_function, short_names
from offbeat.rewards.pool import RewardPool
from offbeat.rpc.client import Hub
from offbeat.types import Prompt

SHOWN_CHARACTERS = 800
_CUT = re.compile(r"\n… \d+ characters left out …\n")
_NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Source:
    """Where samples of one name come from, and how they are graded now."""

    rows: Rows
    before: DataSection
    """As the run had it: what the digests of its samples were taken of."""
    now: DataSection


def rescore(
    target: Path,
    overrides: Sequence[str] = (),
    *,
    rewards: Path | None = None,
    wanted: Wanted | None = None,
    limit: int | None = None,
    changed_rows: bool = False,
    output: Path | None = None,
    out: Console | None = None,
) -> Comparison:
    """Print old against new. `limit`: at most about so many samples, whole groups.

    Raises `ConfigError` before a process starts, and `RunError`.
    """
    wanted = wanted or Wanted()
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: must be at least 1.")
    paths = sample_files(target)
    before, now = _configs(target, overrides, rewards)
    sources = open_sources(before, now, wanted.evaluation)
    if output is not None:
        check_output("--output", output)
        if output.exists():
            raise ConfigError(f"--output {output}: is there already; give the path of a file that is not.")
    columns = Columns(sources, changed_rows=changed_rows)
    comparison = Comparison()

    with _written(output) as keep:
        with (
            passing_folder("rescore") as folder,
            progress("scoring samples", sum(path.stat().st_size for path in paths)) as seen,
        ):
            chosen = (sample for sample in read_samples(paths, seen, columns.damage) if sample in wanted)

            def take(graded: Sequence[tuple[RecordedSample, Score]]) -> None:
                comparison.add([sample for sample, _ in graded], [score for _, score in graded])
                keep(_rescored(sample, score) for sample, score in graded)

            asyncio.run(_score_all(now, columns, blocks(chosen, limit), folder.logs, take))
            if not comparison.samples:
                raise ConfigError(_nothing(target, columns))
        show(report(comparison, columns), out or console())
    return comparison


# --- what is graded by what -----------------------------------------------------------------------------------------


def _configs(target: Path, overrides: Sequence[str], rewards: Path | None) -> tuple[Config, Config]:
    """The config of the samples and that of the new scores."""
    run = target if target.is_dir() else target.absolute().parent
    folder = RunFolder(run) if (run / CONFIG).is_file() else None
    if rewards is not None:
        now = load_config(rewards, overrides)
        return (now if folder is None else run_config(folder)), now
    if folder is None:
        raise ConfigError(f"{target} lies in no run's folder: name the config of its data and rewards with --rewards.")
    return run_config(folder), run_config(folder, overrides)


def reported_names(config: Config) -> dict[str, str]:
    """Spec → the name under which a run of this config reports it: unique over all its functions, not only over those
    of the samples that are scored."""
    return short_names(spec for section in (*config.data, *config.eval) for spec in section.rewards or ())


def open_sources(before: Config, now: Config, evaluation: str | None) -> dict[str, Source]:
    """The sources of training samples, or that of one held-out set; rows read, functions and columns checked.

    Raises one `ConfigError` with every problem.
    """
    sections = _sections(before, evaluation)
    new = _sections(now, evaluation)
    found: dict[str, Source] = {}
    problems: list[str] = []
    for name, section in sections.items():
        if name not in new:
            problems.append(f"the samples have a source {name!r}, the new config only {', '.join(new)}; name it alike.")
            continue
        try:
            source = Source(load_rows(section.source, section.options), section, new[name])
            _check(source)
            found[name] = source
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return found


def _sections(config: Config, evaluation: str | None) -> dict[str, DataSection]:
    if evaluation is None:
        return {section.name: section for section in config.data}
    found = {s.name: eval_data_section(config, s) for s in config.eval if s.name == evaluation}
    if not found:
        names = ", ".join(section.name for section in config.eval) or "none"
        raise ConfigError(f"--eval {evaluation}: the config has no such [[eval]] set; it has {names}.")
    return found


def _check(source: Source) -> None:
    """Are the functions there, and has every row what they ask for?"""
    section = source.now
    if section.answer is not None:
        check_column(source.rows, section.answer, f"{section.name}.answer", allow_none=True)
    columns = columns_everywhere(source.rows) | ({"answer"} if section.answer is not None else set())
    for spec in section.rewards:
        signature = inspect_function(spec)
        if signature is not None:
            check_columns(spec, signature, sorted(columns), section.name)


@dataclass
class Columns:
    """Gives samples the data row that they were graded with, and counts those for which there is none."""

    sources: Mapping[str, Source]
    changed_rows: bool = False
    """Grade a sample whose row has changed by the row as it is now."""
    left_out: Counter[str] = field(default_factory=Counter[str])
    unchecked: int = 0
    """Samples of a version that wrote no digest."""
    damage: Damage = field(default_factory=Damage)

    def prompt(self, sample: RecordedSample) -> Prompt | None:
        """What the reward functions see beside the completion; None: the sample is left out."""
        source = self.sources.get(sample.source)
        row = None if source is None else _row(source.rows, sample.prompt_id)
        if source is None or row is None:
            return self._leave("their row is not in the data any more")
        if any(len(text) > TEXT_LIMIT and _CUT.search(text) for text in (sample.prompt, sample.completion)):
            return self._leave("only the ends of their text were recorded")
        try:
            was = _prompt(sample, columns_of(row, source.before))
            prompt = _prompt(sample, columns_of(row, source.now))
        except KeyError:
            return self._leave("their row has lost its answer")
        if sample.row is None:
            self.unchecked += 1
        elif was.row_digest != sample.row and not self.changed_rows:
            return self._leave("their row in the data has changed since")
        return prompt

    def _leave(self, reason: str) -> None:
        self.left_out[reason] += 1


def _prompt(sample: RecordedSample, columns: dict[str, Any]) -> Prompt:
    return Prompt(
        id=sample.prompt_id,
        epoch=sample.epoch,
        source=sample.source,
        token_ids=_NO_TOKENS,
        text=sample.prompt,
        columns=columns,
    )


def _row(rows: Rows, prompt_id: str) -> dict[str, Any] | None:
    """Prompt ids are `<source>/<row>`."""
    number = prompt_id.rpartition("/")[2]
    return rows.rows[int(number)] if number.isdecimal() and int(number) < len(rows.rows) else None


# --- scoring --------------------------------------------------------------------------------------------------------


def blocks(samples: Iterable[RecordedSample], limit: int | None) -> Iterator[list[RecordedSample]]:
    """The samples of one step after the other: groups lie within one. At the limit the group at hand is finished."""
    taken = 0
    for _, step in itertools.groupby(samples, key=lambda sample: (sample.step, sample.eval)):
        block = list(step)
        if limit is not None and taken + len(block) > limit:
            groups = [list(group) for _, group in itertools.groupby(block, key=lambda sample: sample.group)]
            sizes = itertools.accumulate((len(group) for group in groups), initial=taken)
            block = [sample for group, before in zip(groups, sizes, strict=False) if before < limit for sample in group]
            if block:
                yield block
            return
        taken += len(block)
        yield block


async def _score_all(
    config: Config,
    columns: Columns,
    steps: Iterable[Sequence[RecordedSample]],
    logs: Path,
    take: Callable[[Sequence[tuple[RecordedSample, Score]]], object],
) -> None:
    """Starts the reward workers, and ends them whatever happens; `take` gets what they made of each step."""
    functions = {name: source.now.rewards for name, source in columns.sources.items()}
    section = config.rewards.model_copy(update={"max_error_fraction": 1.0})
    with Interrupt(asyncio.current_task(), lambda _: None).installed():
        async with Hub(heartbeat_s=config.limits.heartbeat_s) as hub:
            pool = await RewardPool.start(
                hub, section, functions, None, logs, start_s=config.limits.start_s, names=reported_names(config)
            )
            try:
                for samples in steps:
                    take(await _grade(pool, columns, samples))
            finally:
                await pool.close()


async def _grade(
    pool: RewardPool, columns: Columns, samples: Sequence[RecordedSample]
) -> list[tuple[RecordedSample, Score]]:
    found = [(sample, prompt) for sample in samples if (prompt := columns.prompt(sample)) is not None]
    grades = await pool.grade(
        [f"{sample.prompt_id} sample {sample.sample_index}" for sample, _ in found],
        [prompt for _, prompt in found],
        [sample.completion for sample, _ in found],
    )
    return [
        (sample, Score(grade.reward, grade.parts, grade.errors))
        for (sample, _), grade in zip(found, grades, strict=True)
    ]


def _rescored(sample: RecordedSample, score: Score) -> dict[str, Any]:
    """The sample's object with the new scores; the advantage belonged to the old ones."""
    old = {"reward": sample.reward, "parts": sample.parts}
    new = {"reward": score.reward, "parts": score.parts, "errors": list(score.errors), "advantage": None}
    return {**msgspec.to_builtins(sample), **new, "old": old}


@contextlib.contextmanager
def _written(output: Path | None) -> Generator[Callable[[Iterable[Any]], object]]:
    """Takes objects for the file, which is there when all is done and not before."""
    if output is None:
        yield lambda _: None
        return

    def write(file: BinaryIO, objects: Iterable[Any]) -> None:
        file.writelines(encode_line(one) for one in objects)

    with replacing(output, shared=True) as file:
        yield partial(write, file)


# --- words ----------------------------------------------------------------------------------------------------------


def report(comparison: Comparison, columns: Columns) -> list[Line]:
    lines: list[Line] = [("", line) for line in comparison_lines(comparison)]
    lines += [("bold yellow", f"! {sentence}") for sentence in _left_out(columns)]
    largest = comparison.largest
    lines += [("", ""), ("bold", "largest changes" if largest else "no sample's reward has changed"), ("", "")]
    for sample, score in largest:
        now = msgspec.structs.replace(sample, reward=score.reward, parts=dict(score.parts), errors=score.errors)
        lines += sample_lines(sample, SHOWN_CHARACTERS, now=now)
    return lines


def _left_out(columns: Columns) -> list[str]:
    said = [
        f"{counted(count, 'sample')} left out: {reason}" + _REMEDY.get(reason, "") + "."
        for reason, count in columns.left_out.items()
    ]
    if columns.unchecked:
        said.append(
            f"{counted(columns.unchecked, 'sample')} recorded without a digest of the data row: nobody can tell "
            "whether the row is still the same."
        )
    if told := columns.damage.words():
        said.append(told)
    return said


_REMEDY = {
    "their row in the data has changed since": " (--changed-rows grades them by the row as it is now)",
}


def _nothing(target: Path, columns: Columns) -> str:
    said = _left_out(columns)
    return (
        f"{target}: no sample could be scored: {' '.join(said)}"
        if said
        else f"{target} has no such sample; 'offbeat samples {target}' shows what there is."
    )
