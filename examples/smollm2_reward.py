"""Rewards of the SmolLM2 example. A reply is read in one of two ways, which the data set decides.

A chat reply must end with its number: `7`, `The answer is -3.` A reply that runs into the token limit in the middle of
a sentence has not answered, whatever numbers it mentions on the way. A few-shot text goes on after its answer, with
further sums made up by the model: there the answer is what stands first on the first line.

`answered` is recorded only (weight 0), so that a gain can be told apart: more answers, or more right ones.
"""

from __future__ import annotations

import re

AT_END = re.compile(r"(?<![\w.,/-])(-?\d{1,9})[.!*$\s]*$")  # not the 5 of 3.5, nor the 1 of 4-1
FIRST_LINE = re.compile(r"[^\S\n]*(-?\d{1,9})[.!]?[^\S\n]*(?:\n|$)")


def number_at_end(completion: str) -> int | None:
    """The number that a chat reply ends with."""
    found = AT_END.search(completion)
    return int(found[1]) if found else None


def number_on_first_line(completion: str) -> int | None:
    """The number that the first line is."""
    found = FIRST_LINE.match(completion)
    return int(found[1]) if found else None


def correct(completion: str, answer: str) -> float:
    """1 when the reply ends with the right number."""
    return float(number_at_end(completion) == int(answer))


def answered(completion: str) -> float:
    """1 when the reply ends with a number."""
    return float(number_at_end(completion) is not None)


def line_correct(completion: str, answer: str) -> float:
    """1 when the first line is the right number."""
    return float(number_on_first_line(completion) == int(answer))


def line_answered(completion: str) -> float:
    """1 when the first line is a number."""
    return float(number_on_first_line(completion) is not None)


def mentions(completion: str, answer: str) -> float:
    """1 when the reply mentions the answer, whatever else it says."""
    return float(answer.lower() in completion.lower())
