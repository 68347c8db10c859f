"""The parts written in docs/extending.md conform, as the page says.

The script for engines is run by tests/integration/test_tutorial.py.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_reward_and_the_loss_of_the_page_pass_the_tests_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, text
        (tmp_path / name[1]).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tests = {
        name: value
        for file in ("test_rewards.py", "test_truncated.py")
        for name, value in runpy.run_path(file).items()
        if name.startswith("test_")
    }
    assert len(tests) == 2
    for test in tests.values():
        test()
