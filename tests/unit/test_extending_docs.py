"""The parts written in docs/extending.md conform, as the page says.

The script for engines is run by tests/integration/test_tutorial.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_reward_and_the_loss_of_the_page_pass_the_tests_of_the_page(tmp_path: Path) -> None:
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, text
        (tmp_path / name[1]).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rewards.py", "test_truncated.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout
