"""Column checks, on every row, before anything is started. All raise `DataError`.

A message names the column, the columns that are present, and the first row at fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from offbeat.data.sources import Rows
from offbeat.errors import DataError

_ROLES = ("system", "user", "assistant", "tool", "developer")


def check_prompts(rows: Rows, column: str, key: str) -> None:
    """Every row has text or chat messages in `column`; `key` is the config key that named it: `data.gsm8k.prompt`."""
    check_column(rows, column, key)
    for index, row in enumerate(rows.rows):
        problem = _prompt_problem(row[column])
        if problem:
            raise DataError(f"{rows.where(index)}: column {column!r} ({key}) {problem}.")


def check_column(rows: Rows, column: str, key: str, *, allow_none: bool = False) -> None:
    """Every row has the column, with something in it."""
    if not rows.rows:
        raise DataError(f"{rows.source}: no rows; a source needs at least one.")
    check_present(rows, {key: column})
    for index, row in enumerate(rows.rows):
        if column not in row:
            raise DataError(
                f"{rows.where(index)}: no column {column!r} ({key}), which other rows have; this row has "
                f"{', '.join(row) or 'none'}: add the column or remove the row."
            )
        if row[column] is None and not allow_none:
            raise DataError(
                f"{rows.where(index)}: column {column!r} ({key}) is empty (null); fill it or remove the row."
            )


def check_present(rows: Rows, columns: Mapping[str, str]) -> None:
    """Config key → column that some row must have. One `DataError` for all that no row has."""
    missing: dict[str, str] = {}
    for key, column in columns.items():
        if rows.rows and not any(column in row for row in rows.rows):
            present = column_names(rows.rows)
            near = difflib.get_close_matches(column, present, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; set {key} to one of them."
            missing[key] = f"{key} = {column!r}: {rows.source} has no such column, only {', '.join(present)}{hint}"
    if missing:
        raise DataError(*missing.values(), missing=missing)


def column_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of all columns that any row has, in order of first appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def columns_everywhere(rows: Rows) -> set[str]:
    """Names of the columns that every row has."""
    names = set(rows.rows[0]) if rows.rows else set[str]()
    for row in rows.rows:
        names &= row.keys()
    return names


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "is an empty text; fill it or remove the row"
    if not isinstance(prompt, list):
        return f"is {type(prompt).__name__} {str(prompt)[:80]!r}; text or a list of chat messages is needed"
    if not prompt:
        return "is an empty list; fill it or remove the row"
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'holds {str(message)[:80]!r}; each message is {{"role": …, "content": …}}'
        if message["role"] not in _ROLES:
            return f"has a message with role {message['role']!r}; roles are {', '.join(_ROLES)}"
        if not isinstance(message.get("content"), str | list):
            return f"has a {message['role']} message whose content is {type(message.get('content')).__name__}, not text"
    if prompt[-1]["role"] == "assistant":
        return "ends with an assistant message; the model answers next, so end with a user message"
    return None
