"""What a reward function may return, and what each rollout's values add up to.

A finite number: `float`, `int`, `bool`, a numpy scalar, or a tensor without dimensions (on any device). `None`: the
function abstains; it adds nothing to the sample's reward and is left out of its mean. Anything else breaks the
contract and stops the run: NaN and infinity, text, lists, dicts, complex numbers, and `Decimal` or `Fraction` too (they
are exact types that somebody chose; return `float(value)`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LARGEST = 1e6
"""Advantages are float32 and are squared on the way: what is much larger loses its differences or overflows."""


class NotAReward(TypeError):
    """A reward function broke its contract; the text says how."""


def as_reward(value: Any) -> float | None:
    """Raises `NotAReward`."""
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        number = _to_float(value)
    elif (
        not isinstance(value, str | bytes | complex) and getattr(value, "shape", None) == () and hasattr(value, "item")
    ):
        inner = value.item()
        if not isinstance(inner, bool | int | float):
            raise NotAReward(f"returned {_seen(value)}; a real number is needed")
        number = _to_float(inner)
    else:
        raise NotAReward(f"returned {_seen(value)}; a number is needed (float, int or bool), or None to abstain")
    if not math.isfinite(number):
        raise NotAReward(f"returned {_seen(value)}; rewards must be finite, or None to abstain")
    if abs(number) > LARGEST:
        raise NotAReward(f"returned {_seen(value)}; rewards must lie within ±{LARGEST:g}: scale them")
    return number


def as_group_rewards(values: Any, count: int) -> list[float | None]:
    """One reward for each completion of a group; raises `NotAReward` for any other number of them."""
    shape = getattr(values, "shape", None)
    if shape is not None and not isinstance(values, Sequence):
        if tuple(shape) != (count,):
            raise NotAReward(f"returned shape {tuple(shape)} for {count} completions; ({count},) is needed")
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise NotAReward(f"returned {_seen(values)} for {count} completions; a list of {count} numbers is needed")
    if len(values) != count:
        raise NotAReward(f"returned {len(values)} values for {count} completions; one for each is needed, in order")
    return [as_reward(value) for value in values]


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _seen(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException as error:  # SystemExit too
        text = f"(its repr raises {type(error).__name__})"
    return f"{type(value).__name__} {text[:80]}"
