"""The reward conformance suite against the built-in functions, and functions that break one promise each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from offbeat.testing.conformance import CheckResult
from offbeat.testing.reward_conformance import REWARD_CHECKS, check_reward

ROWS: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "?", "answer": "3", "parts": [1]}]
calls: list[str] = []


def failed(results: Sequence[CheckResult]) -> dict[str, str]:
    return {result.name: result.problem for result in results if result.problem}


def test_exact_match_keeps_every_promise() -> None:
    results = check_reward("exact_match", ROWS, completions=["2", " 2", "3"])
    assert failed(results) == {}
    assert len(results) == len(REWARD_CHECKS) + 1


def shares(completions: list[str], prompts: list[str]) -> list[float]:
    return [1 / completions.count(text) for text in completions]


async def later(completion: str) -> float | None:
    return None if not completion else 1.0


@pytest.mark.parametrize("function", [shares, later])
def test_group_functions_and_coroutines_keep_every_promise(function: Callable[..., Any]) -> None:
    assert failed(check_reward(function, ROWS)) == {}


def parses(completion: str) -> float:
    return float(int(completion) == 2)


def overflows(completion: str) -> float:
    return float("inf") if len(completion) > 1000 else 0.0


def remembers(completion: str) -> float:
    calls.append(completion)
    return float(len(calls))


def first(completions: list[str]) -> list[float]:
    return [float(place == 0) for place in range(len(completions))]


def one_for_all(completions: list[str]) -> list[float]:
    return [1.0]


def writes(completion: str, row: dict[str, Any]) -> float:
    row.get("parts", []).append(2)
    return 0.0


def fails_backwards(completions: list[str]) -> list[float]:
    if completions[0] != completions[-1] and completions[0] == "42":
        raise RuntimeError("in reverse order only")
    return [0.0] * len(completions)


def exits(completion: str) -> float:
    raise SystemExit(completion)


def asks(completion: str, gold: str) -> float:
    return float(completion == gold)


BREAKS: dict[Callable[..., Any], str] = {
    parses: "any text gets a finite number or none",
    overflows: "any text gets a finite number or none",
    remembers: "the same sample gets the same value",
    first: "the same sample gets the same value",
    one_for_all: "each completion of a group gets a value",
    writes: "what it is given stays as it was",
    fails_backwards: "the same sample gets the same value",
    exits: "any text gets a finite number or none",
    asks: "its parameters are columns",
    lambda completion: 1.0: "another process can import it",
}


@pytest.mark.parametrize("function", BREAKS, ids=lambda function: function.__name__)
def test_a_function_that_breaks_a_promise_is_named(function: Callable[..., Any]) -> None:
    assert BREAKS[function] in failed(check_reward(function, ROWS))


def test_a_slow_call_is_named_and_no_rows_are_refused() -> None:
    assert "the limit is 0 s" in failed(check_reward(shares, ROWS, timeout_s=0.0))["no call is over the limit"]
    with pytest.raises(ValueError, match="at least one row"):
        check_reward(shares, [])
