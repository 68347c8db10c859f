"""The snippets of docs/data-and-rewards.md run as they are written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from offbeat.config import parse_config
from offbeat.rewards.functions import inspect_function

TEXT = (Path(__file__).parents[2] / "docs" / "data-and-rewards.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_every_section_in_the_page_is_a_valid_configuration(tmp_path: Path):
    blocks = _blocks("toml")
    assert blocks
    for block in blocks:
        config = parse_config(
            {"model": "m", "steps": 1, "prompts_per_step": 1, **tomllib.loads(block)}, folder=tmp_path
        )
        assert len(config.data) == 1


def test_the_python_snippets_run(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1 + 1?", "result": 2}) + "\n", encoding="utf-8")
    rows, functions, names = _blocks("python")
    (tmp_path / "rewards.py").write_text(functions, encoding="utf-8")
    for name in ("correct", "short", "judged", "most_original"):
        assert inspect_function(f"{tmp_path / 'rewards.py'}:{name}") is not None
    (tmp_path / "snippet.py").write_text(f"{rows}\n{names}", encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert f"{tmp_path.resolve()}/rewards.py:correct" in run.stdout
