"""Reward functions that come with offbeat; name them as they are: `rewards = { math_verify = 1.0 }`.

They run in reward workers, in the main thread (math-verify's own time-outs need that).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

MATH_TIMEOUT_S = 3
"""math-verify's own limit for parsing and for comparing; the pool's hard limit stands behind it."""


def exact_match(completion: str, answer: Any) -> float:
    """1 when the completion is the answer, white space around both left out. An empty answer is an error."""
    return float(completion.strip() == _gold(answer))


def math_verify(completion: str, answer: Any) -> float:
    """1 when the completion's mathematical value equals the answer's: texts first, then the math-verify library.

    Raises whatever the library cannot do (its time-out among it), so that it counts as an error and not as wrong.
    """
    gold = _gold(answer)
    if completion.strip() == gold:
        return 1.0
    from math_verify import parse, verify

    expected = _parsed_gold(gold)
    found = parse(completion, parsing_timeout=MATH_TIMEOUT_S, raise_on_error=True)
    return float(bool(found) and verify(expected, found, timeout_seconds=MATH_TIMEOUT_S, raise_on_error=True))


@lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> Any:
    from math_verify import parse

    for text in (gold, f"${gold}$"):
        parsed = parse(text, parsing_timeout=MATH_TIMEOUT_S, raise_on_error=True)
        if parsed:
            return parsed
    raise ValueError(f"math-verify finds no mathematical value in the answer {gold[:80]!r}; correct the data row")


def reasoning_gym(completion: str, row: dict[str, Any]) -> float:
    """The score that the row's reasoning-gym task gives, between 0 and 1; partly right answers get a part."""
    return float(_scorer(row).score_answer(completion.strip(), row))


def reasoning_gym_exact(completion: str, row: dict[str, Any]) -> float:
    """1 when the task's score is 1, else 0: some tasks give 0.01 and more for a wrong answer."""
    return float(reasoning_gym(completion, row) >= 1.0)


def _gold(answer: Any) -> str:
    if answer is None or isinstance(answer, dict | list | tuple):
        raise TypeError(f"the row's answer is {type(answer).__name__}; text or a number is needed")
    gold = str(answer).strip()
    if not gold:
        raise ValueError("the row's answer is empty; fill it or remove the row")
    return gold


_scorers: dict[str, Any] = {}


def _scorer(row: dict[str, Any]) -> Any:
    """The task object of a row, made once a process: scoring may depend on its options."""
    from offbeat.data.gym import gym_dataset

    metadata = row.get("metadata")
    origin: Any = row.get("reasoning_gym") or {
        "task": metadata.get("source_dataset") if isinstance(metadata, dict) else None,
        "options": {},
    }
    if not origin["task"]:
        raise ValueError("the row is not from reasoning-gym: it has no metadata.source_dataset")
    key = repr(origin)
    if key not in _scorers:
        # Only the scorer is used: whatever the size, nothing is generated.
        _scorers[key] = gym_dataset(str(origin["task"]), origin["options"])
    return _scorers[key]


FUNCTIONS = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_exact": reasoning_gym_exact,
}
