"""Files that commands write: refused before anything starts where they cannot be written, told of in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat import cli
from offbeat.commands.output_file import check_output
from offbeat.commands.trial import Outputs
from offbeat.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{here}", "--json {here}: is a folder; give the name of a file"),
        ("{here}/no/figures.json", "--json {here}/no/figures.json: there is no folder {here}/no; make it first"),
        ("/proc/figures.json", "--json /proc/figures.json: cannot be written ("),
        ("/proc/version", "--json /proc/version: cannot be written ("),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path, path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Outputs(figures=Path(path.format(here=tmp_path))).check()
    assert str(caught.value).startswith(says.format(here=tmp_path))


def test_a_check_leaves_nothing_behind_and_a_file_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    check_output("--json", tmp_path / "there")
    check_output("--json", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "kept"


def test_an_error_of_the_system_in_a_command_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the name of a file is taken by a folder."""
    data = [{"source": "rows.jsonl", "rewards": {"exact_match": 1.0}}]
    config = {"model": "m", "steps": 1, "prompts_per_step": 1, "data": data, "trackers": [{"kind": "tensorboard"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / ".lock").mkdir()
    monkeypatch.setattr("sys.argv", ["offbeat", "track", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: [Errno 21] Is a directory: '{tmp_path}/.lock'\n"
