"""Prompts in order: `PromptStream.batch(k)` gives the prompts of batch k, and nothing else decides which they are.

A prompt's id is `<source>/<row>`; its epoch counts the passes over that source. A pass is over all rows that are left
after filtering, and the next one follows without a gap, so a batch may span two epochs. No row comes twice within
one epoch, and no source may have fewer rows than its share of a batch, rounded up (an error at start).

Rows are rendered and measured once, at start, in blocks (some thousands a second); only which rows stay is kept.
The token ids of a batch are made when the batch is asked for, by the same renderer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from offbeat.config import Config, DataSection, EvalSection
from offbeat.data.chat import Renderer
from offbeat.data.columns import check_column, check_present, check_prompts
from offbeat.data.order import permutation, shares, slots
from offbeat.data.sources import Row, Rows, load_rows
from offbeat.errors import ConfigError, DataError
from offbeat.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 1000


@dataclass(frozen=True)
class PromptSource:
    """One source after its checks: which of its rows are used, and how they are rendered."""

    section: DataSection
    rows: Rows
    kept: np.ndarray
    """Indices of the rows that are short enough, ascending."""
    longest: int
    """Tokens of the longest prompt among them."""
    renderer: Renderer

    @property
    def name(self) -> str:
        return self.section.name

    @property
    def dropped(self) -> int:
        """Rows left out because their prompt is too long."""
        return len(self.rows.rows) - len(self.kept)

    def prompt(self, index: int, epoch: int) -> Prompt:
        """The prompt of row `index`. Raises `DataError` if it has become too long since it was measured."""
        row = self.rows.rows[index]
        where = self.rows.where(index)
        rendered = self.renderer.render(row[self.section.prompt], where)
        if len(rendered.token_ids) > self.section.max_prompt_tokens:
            raise DataError(
                f"{where}: the prompt has {len(rendered.token_ids)} tokens now, more than max_prompt_tokens = "
                f"{self.section.max_prompt_tokens}, but had fewer at start; "
                "make the chat template independent of the time."
            )
        return Prompt(
            id=f"{self.name}/{index}",
            epoch=epoch,
            source=self.name,
            token_ids=rendered.token_ids,
            text=rendered.text,
            columns=columns_of(row, self.section),
        )


def columns_of(row: Row, section: DataSection) -> dict[str, Any]:
    """What reward functions see of a row: its columns, and `answer` as the section names it."""
    return dict(row) if section.answer is None else {**row, "answer": row[section.answer]}


def open_source(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    kind: Literal["data", "eval", "warmup"] = "data",
) -> PromptSource:
    """Read a source, check its columns, leave out over-long prompts. Raises `ConfigError` (mostly `DataError`)."""
    key = kind if kind == "warmup" else f"{kind}.{section.name}"
    renderer = Renderer(tokenizer, format=section.format, system=section.system, template_kwargs=template_kwargs or {})
    rows = load_rows(section.source, section.options)
    columns = {f"{key}.prompt": section.prompt, f"{key}.answer": section.answer}
    check_present(rows, {name: column for name, column in columns.items() if column is not None})
    check_prompts(rows, section.prompt, f"{key}.prompt")
    if section.answer is not None:
        # Some reasoning-gym tasks have no single answer, only a scorer.
        check_column(rows, section.answer, f"{key}.answer", allow_none=section.source.startswith("reasoning_gym:"))
    kept, longest = _short_enough(section, rows, renderer, key)
    return PromptSource(section, rows, kept, longest, renderer)


def _short_enough(section: DataSection, rows: Rows, renderer: Renderer, key: str) -> tuple[np.ndarray, int]:
    kept: list[int] = []
    longest = 0
    total = len(rows.rows)
    for start in range(0, total, _BLOCK):
        indices = range(start, min(start + _BLOCK, total))
        where = [rows.where(index) for index in indices]
        lengths = renderer.lengths([rows.rows[index][section.prompt] for index in indices], where)
        for index, length in zip(indices, lengths, strict=True):
            if length <= section.max_prompt_tokens:
                kept.append(index)
                longest = max(longest, length)
            elif section.over_long == "error":
                raise DataError(
                    f"{rows.where(index)}: the prompt has {length} tokens, more than {key}.max_prompt_tokens = "
                    f'{section.max_prompt_tokens}; raise it, or set over_long = "drop".'
                )
    if not kept:
        raise DataError(
            f"{key}: {total} rows before filtering, 0 after: every prompt is longer than max_prompt_tokens = "
            f"{section.max_prompt_tokens}; raise it."
        )
    return np.asarray(kept, dtype=np.int64), longest


class PromptStream:
    """All batches of a run, by number. Reading one leaves no trace: any order, any number of times."""

    def __init__(self, sources: Sequence[PromptSource], *, prompts_per_step: int, seed: int) -> None:
        self.sources = tuple(sources)
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self._shares = shares([source.section.weight for source in sources])
        self._check_sizes()

    def _check_sizes(self) -> None:
        problems: list[str] = []
        for source, share in zip(self.sources, self._shares, strict=True):
            need = math.ceil(share * self.prompts_per_step)
            if len(source.kept) >= need:
                continue
            of_batch = "" if share == 1 else f", its share of prompts_per_step = {self.prompts_per_step}"
            remedy = "" if share == 1 else ", lower its weight"
            problems.append(
                f"data.{source.name}: {len(source.rows.rows)} rows before filtering, {len(source.kept)} after, "
                f"but a batch takes {need} of them{of_batch}; add rows{remedy} or lower prompts_per_step"
                + (" (or raise max_prompt_tokens)." if source.dropped else ".")
            )
        if problems:
            raise DataError(*problems)

    def batch(self, index: int) -> list[Prompt]:
        """The prompts of batch `index` (from 0): a function of configuration, seed and `index` only."""
        prompts: list[Prompt] = []
        for source_index, ordinal in slots(self._shares, index * self.prompts_per_step, self.prompts_per_step):
            source = self.sources[source_index]
            size = len(source.kept)
            epoch, place = divmod(ordinal, size)
            if source.section.shuffle:
                place = int(permutation(self.seed, source.name, epoch, size)[place])
            prompts.append(source.prompt(int(source.kept[place]), epoch))
        return prompts

    @property
    def rows(self) -> int:
        """Rows in use, of all sources."""
        return sum(len(source.kept) for source in self.sources)

    @property
    def steps_per_epoch(self) -> dict[str, float]:
        """Source → steps in which each of its rows comes once: a step takes the source's share of the prompts."""
        return {
            source.name: float(len(source.kept) / (share * self.prompts_per_step))
            for source, share in zip(self.sources, self._shares, strict=True)
        }

    def check_unchanged(self, fingerprint: str, next_batch: int) -> None:
        """Raises `DataError` if the data is not what it was when its fingerprint was saved, before `next_batch`."""
        if fingerprint != self.fingerprint():
            raise DataError(
                f"the data is not what it was when the run was saved at batch {next_batch} (rows, lengths, "
                "weights, seed, prompts_per_step or shuffle differ); put the old data back, or start a new run."
            )

    def fingerprint(self) -> str:
        """Changes with anything that decides which row comes when, and with what is in the rows."""
        digest = hashlib.blake2b(f"{self.seed} {self.prompts_per_step}".encode(), digest_size=16)
        for source, share in zip(self.sources, self._shares, strict=True):
            digest.update(f"\n{source.name} {share} {source.section.shuffle} {len(source.rows.rows)}".encode())
            digest.update(source.kept.tobytes())
            for row in source.rows.rows:
                digest.update(repr(row).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()


def open_train(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptStream:
    """Every `[[data]]` source, mixed. Problems of all sources are raised together as one `DataError`."""
    opened: list[PromptSource] = []
    problems: list[str] = []
    missing: dict[str, str] = {}
    for section in config.data:
        try:
            opened.append(open_source(section, tokenizer, config.sampling.chat_template_kwargs))
        except DataError as error:
            problems.extend(error.problems)
            missing |= error.missing
    if problems:
        raise DataError(*problems, missing=missing)
    return PromptStream(opened, prompts_per_step=config.prompts_per_step, seed=config.seed)


@dataclass(frozen=True)
class EvalSet:
    """One held-out set, in the order of its rows; always the same prompts, with epoch 0."""

    section: EvalSection
    source: PromptSource
    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        return self.section.name

    @property
    def rewards(self) -> dict[str, float]:
        return self.source.section.rewards

    def digest(self) -> str:
        """Changes with what is asked and what it is graded by."""
        asked = [(prompt.id, prompt.text, prompt.row_digest) for prompt in self.prompts]
        return hashlib.blake2b(repr(asked).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def eval_data_section(config: Config, section: EvalSection) -> DataSection:
    """An `[[eval]]` section with what it leaves out taken from the first `[[data]]`, as a data section."""
    fields = ("prompt", "answer", "format", "system", "rewards", "max_prompt_tokens")
    given = {name: value for name in fields if (value := getattr(section, name)) is not None}
    base = config.data[0].model_copy(
        update={"name": section.name, "source": section.source, "options": section.options, "weight": 1.0, **given}
    )
    return base.model_copy(update={"system": None}) if base.format == "text" else base


def own_problems(config: Config, section: EvalSection, error: DataError, told: Mapping[str, str]) -> list[str]:
    """What is wrong with a held-out set, but for columns named by the first `[[data]]` that are missing there, too.

    `told`: `DataError.missing` of the data.
    """
    fields = [name for name in ("prompt", "answer") if getattr(section, name) is None]
    inherited = [f"eval.{section.name}.{name}" for name in fields if f"data.{config.data[0].name}.{name}" in told]
    known = {error.missing.get(key) for key in inherited}
    return [problem for problem in error.problems if problem not in known]


def open_eval(config: Config, section: EvalSection, tokenizer: PreTrainedTokenizerBase) -> EvalSet:
    """Read and check one held-out set. `max_prompts` takes the first rows that are short enough."""
    if section.name in {data.name for data in config.data}:
        raise ConfigError(
            f"eval.{section.name}: a [[data]] source has this name too; give the set another name, "
            "so that ids are unique."
        )
    data = eval_data_section(config, section)
    source = open_source(data, tokenizer, config.sampling.chat_template_kwargs, kind="eval")
    rows = source.kept[: section.max_prompts]
    return EvalSet(section, source, tuple(source.prompt(int(row), 0) for row in rows))
