"""Data rows as plain Python values, and the same values through a message without losing anything.

`plain_value` is applied to every row as it is read. `to_wire` and `from_wire` carry rows to reward workers: what
MessagePack has no word for (tuples, sets, integers beyond 64 bits, decimals, dates as such) is tagged on the way.
"""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np

_TAG = "\x00offbeat"
"""Key of a tagged value; no column name begins with a zero byte."""


def plain_text(text: str) -> str:
    """The text with every lone surrogate replaced by U+FFFD: tokenizers and UTF-8 files accept none."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def plain_value(value: Any) -> Any:
    """Arrays become lists, library scalars become Python's own, text loses lone surrogates; tuples stay tuples."""
    match value:
        case str():
            return plain_text(str(value))
        case bool() | int() | float() | None:
            return value.item() if isinstance(value, np.generic) else value
        case dict():
            return {plain_value(key): plain_value(inner) for key, inner in value.items()}
        case list():
            return [plain_value(inner) for inner in value]
        case tuple():
            return tuple(plain_value(inner) for inner in value)
        case np.generic() | np.ndarray():
            return plain_value(value.tolist())
        case _:
            return value


def to_wire(value: Any) -> Any:
    """A plain value in words that MessagePack has. Raises `TypeError` for types that rows cannot hold."""
    match value:
        case None | bool() | str() | float() | bytes():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else {_TAG: "int", "value": hex(value)}
        case list():
            return [to_wire(inner) for inner in value]
        case dict():
            if all(isinstance(key, str) for key in value):
                return {key: to_wire(inner) for key, inner in value.items()}
            return {_TAG: "dict", "value": [[to_wire(key), to_wire(inner)] for key, inner in value.items()]}
        case tuple():
            return {_TAG: "tuple", "value": [to_wire(inner) for inner in value]}
        case set() | frozenset():
            return {_TAG: "set", "value": [to_wire(inner) for inner in value]}
        case decimal.Decimal():
            return {_TAG: "decimal", "value": str(value)}
        case datetime.datetime():
            return {_TAG: "datetime", "value": value.isoformat()}
        case datetime.date():
            return {_TAG: "date", "value": value.isoformat()}
        case _:
            raise TypeError(f"a data row holds a {type(value).__name__}, which cannot be sent to a reward function")


def from_wire(value: Any) -> Any:
    match value:
        case list():
            return [from_wire(inner) for inner in value]
        case dict():
            if _TAG in value:
                return _untag(value[_TAG], value["value"])
            return {key: from_wire(inner) for key, inner in value.items()}
        case _:
            return value


def _untag(kind: str, value: Any) -> Any:
    match kind:
        case "int":
            return int(value, 16)
        case "dict":
            return {from_wire(key): from_wire(inner) for key, inner in value}
        case "tuple":
            return tuple(from_wire(inner) for inner in value)
        case "set":
            return {from_wire(inner) for inner in value}
        case "decimal":
            return decimal.Decimal(value)
        case "datetime":
            return datetime.datetime.fromisoformat(value)
        case "date":
            return datetime.date.fromisoformat(value)
        case _:
            raise TypeError(f"unknown kind of value {kind!r}")
