"""The folder that somebody meant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offbeat.config import parse_config
from offbeat.errors import ConfigError, ModelError
from offbeat.metrics.writer import RunFolder
from offbeat.models import inspect_model
from offbeat.nearest import nearest_folder, nearest_name, run_hint
from offbeat.training import next_commands

NAMES = ["quickstart-20261201-164818", "quickstart-20261202-090000", "reverse-20261201-101010", "sums"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for age, name in enumerate(NAMES):
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder, (1000 - age, 1000 - age))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("quickstrat", "quickstart-20261202-090000"),
        ("revers", "reverse-20261201-101010"),
        ("quickstart-20261201-164819", "quickstart-20261201-164818"),
        ("sum", "sums"),
        ("else", None),
        ("", None),
    ],
)
def test_runs_are_compared_without_their_time_and_the_newest_is_meant(wrong: str, meant: str | None) -> None:
    assert nearest_name(wrong, NAMES) == meant
    assert nearest_name(wrong, NAMES[::-1]) == meant


def test_every_part_of_a_path_may_be_wrong(runs: Path) -> None:
    assert nearest_folder(runs.parent / "rums" / "revers") == runs / "reverse-20261201-101010"
    assert nearest_folder(runs.parent / "rums" / "else") == runs


def test_a_run_that_is_not_there_is_answered_with_the_near_one_or_the_newest(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it does not exist\. Did you mean .*/reverse-20261201-101010\?"):
        RunFolder.open(runs / "revers")
    newest = ", ".join(str(runs / name) for name in NAMES[:3])
    assert run_hint(runs / "else") == f"The newest runs: {newest}."
    assert run_hint(tmp_path / "else") == f"The newest runs: {newest}."
    assert run_hint(runs / "sums" / "else") == "Give a folder such as runs/<name>-<time>."


def test_a_model_that_is_not_there_is_answered_likewise(runs: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean .*/quickstart-20261202-090000\?"):
        inspect_model(str(runs / "quickstrat"))
    with pytest.raises(
        ModelError, match=r"nothing like 'else' in .*; the newest runs there: quickstart-20261201-164818"
    ):
        inspect_model(str(runs / "else"))


def test_a_run_without_held_out_sets_is_not_told_to_evaluate() -> None:
    data = [{"source": "rows.jsonl", "rewards": {"rewards.py:f": 1.0}}]
    values = {"model": "m", "steps": 1, "prompts_per_step": 4, "data": data}
    plain, held_out = parse_config(values), parse_config({**values, "eval": [{"source": "held.jsonl"}]})

    def labels(*, interrupted: bool) -> list[list[str]]:
        run = Path("runs/x")
        return [[label for label, _ in next_commands(c, run, interrupted=interrupted)] for c in (plain, held_out)]

    assert labels(interrupted=False) == [["look at it"], ["evaluate", "look at it"]]
    assert labels(interrupted=True) == [["continue", "look at it"]] * 2
