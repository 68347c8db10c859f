"""What a reward function takes: the contract between its parameters and a sample.

All arguments are given by name. A function with `completion` grades one sample; one with `completions` grades a
group (the samples of one prompt) at once and gets a list for each parameter, aligned. The other parameters:
`prompt` (as rendered), `answer` (the column that `answer` names), `row` (the whole row) and any column by its name;
a group function may also write `prompts`, `answers` and `rows`. A parameter with a default is left at it where there
is no such column. `**kwargs` gets all columns, the prompt and the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

PLURALS = {"prompts": "prompt", "answers": "answer", "rows": "row"}
GIVEN = frozenset({"prompt", "row"})
"""Parameters that every sample has, whatever its columns."""


class FunctionSignature(msgspec.Struct, frozen=True, kw_only=True):
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    """Those without a default."""
    open: bool = False
    """Has `**kwargs`."""
    positional_only: tuple[str, ...] = ()

    @property
    def group(self) -> bool:
        return "completions" in self.parameters

    def column_of(self, parameter: str) -> str:
        return PLURALS.get(parameter, parameter) if self.group else parameter

    @property
    def needs_all_columns(self) -> bool:
        return self.open or any(self.column_of(parameter) == "row" for parameter in self.parameters)

    def problem(self) -> str | None:
        """What is wrong with it whatever the data, or None."""
        if self.positional_only:
            return (
                f"parameter {self.positional_only[0]!r} is positional-only; arguments are given by name: remove the '/'"
            )
        both = {"completion", "completions"} & set(self.parameters)
        if len(both) == 2:
            return "takes both 'completion' and 'completions'; take one sample, or a group"
        if not both and not self.open:
            takes = ", ".join(self.parameters) or "nothing"
            return f"takes {takes}; it needs 'completion' (one sample) or 'completions' (a group)"
        return None

    def unfilled(self, columns: Iterable[str]) -> list[str]:
        """Required parameters that neither a sample nor its columns provide."""
        have = {*columns, *GIVEN, "completion", "completions"}
        return [parameter for parameter in self.required if self.column_of(parameter) not in have]

    def arguments(self, completion: str, prompt: str, row: dict[str, Any]) -> dict[str, Any]:
        """Of one sample. In a group function, each name gets the list of these."""
        everything = {**row, "prompt": prompt, "row": row, "completion": completion, "completions": completion}
        if self.open:
            names = [*row, "prompt", "row", "completions" if self.group else "completion"]
            return {name: everything[name] for name in names} | {
                parameter: everything[self.column_of(parameter)]
                for parameter in self.parameters
                if self.column_of(parameter) in everything
            }
        return {
            parameter: everything[self.column_of(parameter)]
            for parameter in self.parameters
            if self.column_of(parameter) in everything
        }


def signature_of(function: Callable[..., Any]) -> FunctionSignature:
    kinds = inspect.Parameter
    named: list[str] = []
    required: list[str] = []
    positional: list[str] = []
    is_open = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is kinds.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is kinds.POSITIONAL_ONLY and parameter.default is kinds.empty:
            positional.append(name)
        elif parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            named.append(name)
            if parameter.default is kinds.empty:
                required.append(name)
    return FunctionSignature(
        parameters=tuple(named), required=tuple(required), open=is_open, positional_only=tuple(positional)
    )
