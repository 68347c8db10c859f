"""Data rows as plain Python values, and the same values through a message without losing anything.

`plain_value` is applied to every row as it is read. `to_wire` and `from_wire` carry rows to reward workers: what
MessagePack has no word for (tuples, sets, integers beyond 64 bits, decimals, dates as such) is tagged on the way.
"""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np

from offbeat.unicode import well_formed

_TAG = "\x00offbeat"
"""Key of a tagged value. A dict that has it as a key of its own travels as a tagged one."""
DEEPEST = 100
"""Values within each other. Messages are read and written by recursion."""


def plain_value(value: Any, depth: int = 0) -> Any:
    """Arrays become lists, library scalars become Python's own, text loses lone surrogates; tuples stay tuples.

    Raises `ValueError` for values within each other more than `DEEPEST` times.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    match value:
        case str():
            return well_formed(str(value))
        case bool() | int() | float() | None:
            return value.item() if isinstance(value, np.generic) else value
        case dict():
            return {plain_value(key, depth + 1): plain_value(inner, depth + 1) for key, inner in value.items()}
        case list():
            return [plain_value(inner, depth + 1) for inner in value]
        case tuple():
            return tuple(plain_value(inner, depth + 1) for inner in value)
        case np.generic() | np.ndarray():
            return plain_value(value.tolist(), depth)
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
            if _TAG not in value and all(isinstance(key, str) for key in value):
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
