"""Samples for the supervised warm-up: prompt ids rendered as for reinforcement learning, answer ids, end id.

The answer is encoded without special tokens, and the tokenizer's end id follows it: what the model has to sample to
stop. With `format = "chat"` the system message of the first `[[data]]` is used. Order and passes work as for prompts,
but a set may be smaller than a step's samples: it is then repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat.config import Config, DataSection
from offbeat.data.columns import check_column
from offbeat.data.order import permutation
from offbeat.data.prompts import PromptSource, open_source
from offbeat.errors import DataError, ModelError
from offbeat.types import SupervisedSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class WarmupSet:
    source: PromptSource
    end_id: int
    samples_per_step: int
    seed: int

    def batch(self, step: int) -> list[SupervisedSample]:
        """The samples of warm-up step `step` (from 0): a function of configuration, seed and `step` only."""
        first = step * self.samples_per_step
        size = len(self.source.kept)
        places = [divmod(ordinal, size) for ordinal in range(first, first + self.samples_per_step)]
        order = [int(permutation(self.seed, "warmup", epoch, size)[place]) for epoch, place in places]
        return [self.sample(int(self.source.kept[place])) for place in order]

    def sample(self, index: int) -> SupervisedSample:
        section, tokenizer = self.source.section, self.source.renderer.tokenizer
        row = self.source.rows.rows[index]
        assert section.answer is not None
        answer = row[section.answer]
        rendered = self.source.renderer.render(row[section.prompt], self.source.rows.where(index))
        ids: list[int] = tokenizer(str(answer), add_special_tokens=False)["input_ids"]
        return SupervisedSample(
            prompt_token_ids=rendered.token_ids, token_ids=np.asarray([*ids, self.end_id], dtype=np.int32)
        )


def open_warmup(config: Config, tokenizer: PreTrainedTokenizerBase) -> WarmupSet | None:
    """The `[warmup]` set, or None where there is none. Raises `ConfigError`."""
    warmup = config.warmup
    if warmup is None:
        return None
    end_id = tokenizer.eos_token_id
    if not isinstance(end_id, int):
        raise ModelError("[warmup] needs the tokenizer's end token, and it has none; set eos_token in its files.")
    base = config.data[0]
    section = DataSection(
        name="warmup",
        source=warmup.source,
        options=warmup.options,
        prompt=warmup.prompt,
        answer=warmup.answer,
        format=warmup.format,
        system=base.system if warmup.format == "chat" else None,
        max_prompt_tokens=base.max_prompt_tokens,
    )
    source = open_source(section, tokenizer, config.sampling.chat_template_kwargs, kind="warmup")
    check_column(source.rows, warmup.answer, "warmup.answer")
    for index, row in enumerate(source.rows.rows):
        if not isinstance(row[warmup.answer], str | int | float):
            kind = type(row[warmup.answer]).__name__
            raise DataError(
                f"{source.rows.where(index)}: column {warmup.answer!r} (warmup.answer) is {kind}, not text."
            )
    return WarmupSet(source, end_id, warmup.samples_per_step, config.seed)
