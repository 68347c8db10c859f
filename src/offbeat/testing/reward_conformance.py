"""What every reward function must do, as checks to run against one: offbeat's own, or yours.

    results = check_reward(correct, rows)            # or check_reward("rewards.py:correct", rows)
    assert not [r for r in results if r.problem]

The function is called in this process, with arguments by name as a reward worker calls it. Nothing ends a call that
hangs: run it under a test's own time limit. Whether it likes what you like is not checked: `offbeat try` shows that.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from offbeat.errors import ConfigError
from offbeat.rewards.functions import function_spec, load_function
from offbeat.rewards.signature import signature_of
from offbeat.rewards.values import NotAReward, as_group_rewards, as_reward
from offbeat.testing.conformance import CheckResult, checking

Row: TypeAlias = Mapping[str, Any]

ODD = (
    "",
    " \n\t",
    "42",
    "-1,234.5e99999",
    "\\boxed{" + "{" * 50,
    "<think>" * 20,
    "\x00\x1b[2J\u202e\ud7ff\ufffd",
    "語🙂é",
    "1" * 5000,
    "(" * 20_000,
)
"""Texts as models write them: nothing, white space, numbers that overflow, unclosed brackets, control characters."""


class _Grader:
    """Calls the function as a worker does and judges what it returns as the pool does."""

    def __init__(self, function: Callable[..., Any], rows: Sequence[Row], completions: Sequence[str]) -> None:
        self.function = function
        self.signature = signature_of(function)
        self.rows = rows
        self.completions = completions
        self.slowest_s = 0.0

    def group(self, row: Row, completions: Sequence[str]) -> list[float | None]:
        """One value for each completion; raises `NotAReward`, or what the function raises."""
        each = [self.signature.arguments(text, str(row.get("prompt", "")), dict(row)) for text in completions]
        if self.signature.group:
            together = {name: [one[name] for one in each] for name in each[0]}
            return as_group_rewards(self._call(together), len(each))
        return [as_reward(self._call(one)) for one in each]

    def _call(self, arguments: dict[str, Any]) -> Any:
        started = time.monotonic()
        value = self.function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        return value

    def grade(self, row: Row, completions: Sequence[str] | None = None) -> list[float | None] | str:
        """The values of all completions (or of these), or what went wrong."""
        try:
            return self.group(row, completions or self.completions)
        except NotAReward as error:
            return f"on {_short(row)}: it {error}"
        except Exception as error:
            return f"on {_short(row)}: {type(error).__name__}: {error}"


async def _awaited(value: Any) -> Any:
    return await value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def another_process_can_import_it(grader: _Grader) -> str | None:
    """By file or module, as a worker does."""
    try:
        load_function(function_spec(grader.function))
    except ConfigError as error:
        return str(error)
    return None


def its_parameters_are_columns(grader: _Grader) -> str | None:
    if problem := grader.signature.problem():
        return f"it {problem}"
    for row in grader.rows:
        if missing := grader.signature.unfilled(row):
            return f"parameter {missing[0]!r} is no column of {_short(row)}; rename it, or give it a default"
    return None


def any_text_gets_a_finite_number_or_none(grader: _Grader) -> str | None:
    for row in grader.rows:
        for text in grader.completions:
            try:
                grader.group(row, [text])
            except NotAReward as error:
                return f"on the completion {_short(text)}: it {error}"
            except Exception as error:
                return f"on the completion {_short(text)}: {type(error).__name__}: {error}"
    return None


def each_completion_of_a_group_gets_a_value(grader: _Grader) -> str | None:
    """Also where texts repeat."""
    for row in grader.rows:
        values = grader.grade(row)
        if isinstance(values, str):
            return values
    return None


def the_same_sample_gets_the_same_value(grader: _Grader) -> str | None:
    """Twice, with other samples in between, and in reverse order: no randomness, no memory, no place in the group."""
    for row in grader.rows:
        first = grader.grade(row)
        again = grader.grade(row)
        backwards = grader.grade(row, grader.completions[::-1])
        if isinstance(first, str) or isinstance(again, str) or isinstance(backwards, str):
            return next(found for found in (first, again, backwards) if isinstance(found, str))
        for text, one, two, three in zip(grader.completions, first, again, backwards[::-1], strict=True):
            if not one == two == three:
                return f"the completion {_short(text)} got {one}, then {two}, then {three} in reverse order"
    return None


def what_it_is_given_stays_as_it_was(grader: _Grader) -> str | None:
    for row in grader.rows:
        before = copy.deepcopy(dict(row))
        grader.grade(row)
        if dict(row) != before:
            return f"the row {_short(before)} became {_short(dict(row))}: work on a copy"
    return None


REWARD_CHECKS: tuple[Callable[[_Grader], str | None], ...] = (
    another_process_can_import_it,
    its_parameters_are_columns,
    any_text_gets_a_finite_number_or_none,
    each_completion_of_a_group_gets_a_value,
    the_same_sample_gets_the_same_value,
    what_it_is_given_stays_as_it_was,
)


def check_reward(
    function: Callable[..., Any] | str,
    rows: Sequence[Row],
    *,
    completions: Sequence[str] = (),
    timeout_s: float = 10.0,
) -> list[CheckResult]:
    """Run every check. An error of the function is a failed check, not the end.

    Args:
        function: or its spec, as in a config: `"rewards.py:correct"`.
        rows: rows of the data, at least one; where the config names an `answer` column, with a column `answer`.
        completions: texts to grade besides the odd ones, such as right and wrong answers.
        timeout_s: `rewards.timeout_s` of the run; no single call may take longer.

    Raises:
        ConfigError: a spec that names nothing.
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("check_reward needs at least one row of the data to grade with")
    loaded = load_function(function) if isinstance(function, str) else function
    grader = _Grader(loaded, rows, [*completions, *ODD, ODD[2]])
    results: list[CheckResult] = []
    for check in REWARD_CHECKS:
        with checking(results, check) as found:
            found(check(grader))
    slow = f"a call took {grader.slowest_s:.1f} s; the limit is {timeout_s:g} s"
    results.append(CheckResult("no call is over the limit", slow if grader.slowest_s > timeout_s else None))
    return results
