"""Configured reward functions against the rows that they will see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import character_tokenizer

from offbeat.config import DataSection
from offbeat.data.prompts import PromptSource, open_source
from offbeat.errors import ConfigError
from offbeat.rewards.checks import check_rewards

ROWS: list[dict[str, Any]] = [{"prompt": "a", "gold": 1, "level": 2}, {"prompt": "b", "gold": 1}]


def _source(folder: Path, *rewards: str, **more: Any) -> PromptSource:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    section = DataSection(source=str(path), format="text", rewards=dict.fromkeys(rewards, 1.0), **more)
    return open_source(section, character_tokenizer())


def _functions(folder: Path) -> str:
    path = folder / "rewards.py"
    path.write_text(
        "def fits(completion, answer, gold, *, level=0): ...\n"
        "def wants_level(completion, level): ...\n"
        "def wants_sollution(completions, sollution): ...\n",
        encoding="utf-8",
    )
    return str(path)


def test_functions_whose_parameters_are_columns_pass(tmp_path: Path):
    check_rewards([_source(tmp_path, f"{_functions(tmp_path)}:fits", "exact_match", "math_verify", answer="gold")])


def test_every_wrong_function_is_reported_at_once_B042(tmp_path: Path):
    file = _functions(tmp_path)
    wrong = [f"{file}:wants_level", f"{file}:wants_sollution", f"{file}:fitz", "exact_match", "reasoning_gym"]
    with pytest.raises(ConfigError) as caught:
        check_rewards([_source(tmp_path, *wrong)])
    texts = [
        "'level', which every row",
        "'sollution', which every row",
        "did you mean 'fits'",
        'set answer = "<column>"',
        "grades rows of reasoning-gym tasks only",
    ]
    assert len(caught.value.problems) == len(texts)
    for text, problem in zip(texts, caught.value.problems, strict=True):
        assert text in problem


def test_columns_are_listed_in_the_order_of_the_row(tmp_path: Path):
    with pytest.raises(ConfigError, match="columns are prompt, gold"):
        check_rewards([_source(tmp_path, f"{_functions(tmp_path)}:wants_level")])
