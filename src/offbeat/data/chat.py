"""Prompt → token ids, and token ids → the text that rewards see. The only place where either is done.

`format = "chat"`: the chat template turns messages into token ids in one call. No special token is added afterwards,
so there are exactly the start tokens that the template writes (one or none; two are refused).
`format = "text"`: the text as it is, behind the special tokens that the tokenizer itself puts in front of a text
(usually one start token or none; not a second one where the text brings its own). Nothing is put behind it: an end
token before the completion would tell the model to stop.

The same renderer measures prompts for `max_prompt_tokens` and produces the ids that are used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from offbeat.errors import ConfigError, DataError, ModelError
from offbeat.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    token_ids: IntArray
    text: str
    """What the template wrote (chat), or the prompt as given (text)."""


class Renderer:
    """Renders prompts of one source. Raises `ModelError` when the tokenizer has no chat template to do it with."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        format: Literal["chat", "text"],
        system: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self.system = system
        self.template_kwargs = dict(template_kwargs or {})
        self._bos = tokenizer.bos_token_id
        if format == "chat":
            _check_template(tokenizer, self.template_kwargs)
        else:
            self._prefix = _text_prefix(tokenizer)

    def render(self, prompt: str | Sequence[Message], where: str) -> Rendered:
        """`where` says which row it is, for messages. Raises `DataError`."""
        if self.format == "text":
            text = self._text(prompt, where)
            ids = self._encode([text], [where])[0]
        else:
            messages = self._messages(prompt)
            ids = self._apply([messages], [where])[0]
            text = self._written(messages)
        return Rendered(np.asarray(ids, dtype=np.int32), text)

    def lengths(self, prompts: Sequence[str | Sequence[Message]], where: Sequence[str]) -> list[int]:
        """Tokens of each prompt, by the same path as `render`; quick for many at once."""
        if self.format == "text":
            return [
                len(ids) for ids in self._encode([self._text(p, w) for p, w in zip(prompts, where, strict=True)], where)
            ]
        return [len(ids) for ids in self._apply([self._messages(prompt) for prompt in prompts], where)]

    def _messages(self, prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
        """A row's own system message wins over the configured one."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return messages

    def _apply(self, conversations: list[list[dict[str, Any]]], where: Sequence[str]) -> list[list[int]]:
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                conversations, tokenize=True, add_generation_prompt=True, return_dict=True, **self.template_kwargs
            )
        except Exception as error:  # a template is a program, which may raise anything
            if len(conversations) > 1:  # find the row at fault
                return [self._apply([one], [w])[0] for one, w in zip(conversations, where, strict=True)]
            raise DataError(
                f"{where[0]}: the chat template cannot render the prompt ({type(error).__name__}: {error}); "
                "correct the row, or give another template with sampling.chat_template."
            ) from error
        rows: list[list[int]] = encoded["input_ids"]
        for ids, w in zip(rows, where, strict=True):
            self._check(ids, w)
        return rows

    def _written(self, messages: list[dict[str, Any]]) -> str:
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template_kwargs
        )
        return str(text)

    def _text(self, prompt: str | Sequence[Message], where: str) -> str:
        if isinstance(prompt, str):
            return prompt
        raise DataError(f'{where}: the prompt is a list of chat messages; use format = "chat", or a column with text.')

    def _encode(self, texts: list[str], where: Sequence[str]) -> list[list[int]]:
        plain: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rows = [
            ids if self._prefix and ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids] for ids in plain
        ]
        for ids, w in zip(rows, where, strict=True):
            self._check(ids, w)
        return rows

    def _check(self, ids: list[int], where: str) -> None:
        if not ids:
            raise DataError(f"{where}: the prompt has no tokens after rendering; fill it or remove the row.")
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise DataError(
                f"{where}: the prompt begins with two start tokens ({self.tokenizer.bos_token!r} twice); "
                "the template and the data both write one: remove it from one of them."
            )


def _check_template(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    if tokenizer.chat_template is None:
        raise ModelError(
            'format = "chat" needs a chat template, and the tokenizer has none (base models usually do not). Either '
            'set format = "text" to use prompts as they are, or name a Jinja file with sampling.chat_template, or use '
            "the instruct version of the model."
        )
    try:
        template = tokenizer.get_chat_template(tools=kwargs.get("tools"))
    except Exception as error:  # a template is a program, which may raise anything
        raise ModelError(
            f'format = "chat": none of the tokenizer\'s chat templates can be taken ({type(error).__name__}: {error}); '
            "name a Jinja file with sampling.chat_template."
        ) from error
    known = sorted(set(re.findall(r"[A-Za-z_]\w*", template)))
    for name in kwargs:
        if name in {"tokenize", "add_generation_prompt", "return_dict", "return_tensors", "chat_template", "padding"}:
            raise ConfigError(f"sampling.chat_template_kwargs.{name}: set by offbeat itself; remove it.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else "remove it."
            raise ConfigError(f"sampling.chat_template_kwargs.{name}: the chat template does not use it; {hint}")


def _text_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts in front of a text of its own accord."""
    probe = "a"
    bare: list[int] = tokenizer(probe, add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer(probe)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Sequence[int] | IntArray], stop_ids: Sequence[int]
) -> list[str]:
    """The texts that reward functions see: the stop id at the end and all special tokens left out."""
    stops = set(stop_ids)
    cut: list[list[int]] = []
    for completion in completions:
        ids = [int(i) for i in completion]
        cut.append(ids[:-1] if ids and ids[-1] in stops else ids)
    return tokenizer.batch_decode(cut, skip_special_tokens=True, clean_up_tokenization_spaces=False)
