"""The page of field failures: every test that it names exists, and every failure of its kinds has one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "field-failures.md").read_text(encoding="utf-8")
CASE = re.compile(r"B\d{3}")
CASES = {
    "Hangs and lifetimes": "B011 B020 B031 B038 B079 B122 B123 B125 B126",
    "Data": "B026 B042 B043 B044 B055 B067 B074 B137 B171",
    "Rewards": "B013 B027 B046 B087 B101 B138 B139 B140",
    "Checkpoints": "B016 B017 B028 B047 B088 B102 B142 B145",
    "Asynchrony": "B051 B068 B146 B147 B148 B173 B174",
    "Configuration": "B018 B019 B090 B150 B151 B152",
}
"""A case is named in the test's name or docstring."""


@cache
def cases_of_tests(path: str) -> dict[str, set[str]]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: set(CASE.findall(f"{node.name} {ast.get_docstring(node) or ''}")) for node in functions}


def cases_of_row(row: str) -> set[str]:
    """What all tests of a row have in common."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
    assert named, f"no test: {row}"
    assert row.count("::") == len(named), f"a test that cannot be read: {row}"
    for path, name in named:
        assert name in cases_of_tests(path), f"{path} has no {name}"
    return set.intersection(*(cases_of_tests(path)[name] for path, name in named))


@pytest.mark.parametrize("kind", CASES)
def test_every_failure_of_a_kind_has_a_row_whose_tests_are_about_it(kind: str) -> None:
    section = re.search(rf"^## {kind}$(.*?)^## ", PAGE, flags=re.M | re.S)
    assert section is not None
    rows = [line for line in section[1].splitlines() if line.startswith("| ")][1:]
    wanted = set(CASES[kind].split())
    assert len(rows) == len(wanted)
    assert set().union(*(cases_of_row(row) for row in rows)) & wanted == wanted
    for row in rows:
        assert row.count("|") == 4, row
        assert cases_of_row(row) & wanted, row


def test_the_page_has_these_kinds_and_one_word_on_what_is_not_shown() -> None:
    assert re.findall(r"^## (.*)$", PAGE, flags=re.M) == [*CASES, "What these tests do not show"]
    assert not CASE.search(re.sub(r"`[^`]*`", "", PAGE)), "case numbers mean nothing to readers"
