"""docs/tutorial.md from its first block to its last, as a reader goes through it, with runs made short.

Blocks whose first line names a file are written to it; each line of an `sh` block is run. What is shown as output
(`text`) is of longer runs and not compared.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
from tiny_run import Ended, command, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
"""The first test has all runs of the page in its set-up."""

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ["prompts_per_step=2", "samples_per_prompt=4", "steps=2"]
ADDED = {
    "examples/quickstart.toml": [*SHORT, "warmup.steps=4", "warmup.samples_per_step=8"],
    "try": ["-n", "2", *SHORT],
    "train": SHORT,
}
"""To a command that has this word; the first that fits."""
REPLACED = {"steps=60": "steps=4", "19": "1"}
"""Words that say how long the page's own runs are."""


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))


def in_folder(text: str, folder: Path) -> str:
    """A script in this process, where torch is loaded already; returns what it printed."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(text, run_name="__main__")
    return out.getvalue()


def words_of(line: str) -> list[str]:
    """The words of a line, with `make quickstart` as the recipe that the Makefile has for it."""
    words = shlex.split(line)
    if words[:2] == ["make", "quickstart"]:
        recipe = re.search(r"^quickstart:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert recipe is not None
        return shlex.split(recipe[1].replace("$(BIN)/", "").replace("$(ARGS)", words[2].removeprefix("ARGS=")))
    return words


def follow(line: str, folder: Path) -> Ended | None:
    """One line of the page; None for what the shell does."""
    words = [REPLACED.get(word, word) for word in words_of(line)]
    match words:
        case [".", ".venv/bin/activate"]:
            return None
        case ["mkdir", name]:
            (folder / name).mkdir()
            return None
        case ["python", script]:
            return Ended(0, in_folder(script, folder), "", 0.0)
        case ["offbeat", *rest]:
            added = next((more for word, more in ADDED.items() if word in rest), [])
            return command(*rest, *added, cwd=folder)
        case _:
            raise AssertionError(f"the test does not know how to run {line!r}")


@pytest.fixture(scope="module", name="followed")
def _followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """The folder in which the page was followed, and what each of its lines gave."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples" / "digits", folder / "examples" / "digits")
    for name in ("quickstart.toml", "quickstart_reward.py"):
        shutil.copy(ROOT / "examples" / name, folder / "examples")
    shorten(folder / "examples" / "digits" / "heldout.jsonl")
    ended: dict[str, Ended] = {}
    for language, text in blocks("tutorial.md"):
        if language == "sh":
            for line in text.splitlines():
                if (one := follow(line, folder)) is not None:
                    assert one.code == 0, f"{line}\n{one.told}"
                    ended[line] = one
                if line == "python unique/make_rows.py":
                    shorten(folder / "unique" / "heldout.jsonl")
        elif language in ("python", "toml"):
            named = re.match(r"# (\S+)\n", text)
            assert named is not None, f"the first line of a block names its file: {text}"
            (folder / named[1]).write_text(text, encoding="utf-8")
        else:
            assert language == "text", f"a block is sh, python, toml or text: {text}"
    return folder, ended


def shorten(rows: Path) -> None:
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:8]))


def told(ended: dict[str, Ended], start: str) -> str:
    return next(one.out for line, one in ended.items() if line.startswith(start))


def test_each_line_of_the_tutorial_does_what_the_page_says(followed: tuple[Path, dict[str, Ended]]) -> None:
    folder, ended = followed
    assert steps_of(folder / "runs" / "quickstart") == [0, 1]
    assert (folder / "runs" / "quickstart" / "report.html").is_file()
    assert len((folder / "unique" / "train.jsonl").read_text().splitlines()) == 2721
    assert "2,721 rows" in told(ended, "offbeat check")
    assert "partial" in told(ended, "offbeat try")
    assert steps_of(folder / "runs" / "unique") == [0, 1, 2, 3]
    assert "partial" in told(ended, "offbeat rescore")
    assert "every sample was trained once" in told(ended, "offbeat audit")
    assert [line.split()[0] for line in told(ended, "python unique/use.py").splitlines()] == [
        "4149=",
        "7777=",
        "3141592=",
    ]
