"""What the commands say to a folder that is no run, and to a run in which no step is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from offbeat import cli
from offbeat.config import parse_config
from offbeat.journal import open_journal
from offbeat.metrics.writer import RunFolder, metrics_file, samples_file

pytestmark = pytest.mark.slow

COMMANDS = ("samples", "audit", "report", "export", "rescore", "track", "resume", "eval")
Say: TypeAlias = Callable[[str, Path], tuple[int, str, str]]


@pytest.fixture(name="say")
def _say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    def say(command: str, folder: Path) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        monkeypatch.setattr("sys.argv", ["offbeat", command, str(folder)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return say


def run_in(folder: Path, *, begun: bool) -> Path:
    """A run of which no step is done: its files are there, and empty, once it has begun."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    data = {"source": str(rows), "answer": "answer", "rewards": {"exact_match": 1.0}}
    values = {"model": "m", "steps": 4, "prompts_per_step": 1, "data": [data], "eval": [{"source": str(rows)}]}
    run = RunFolder.create("run", run_dir=folder / "run")
    run.write_config(parse_config(values).model_dump(mode="json"))
    if begun:
        with metrics_file(run), samples_file(run), open_journal(run.journal):
            pass
    return run.path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no"),
        ("{", "cannot be read"),
        (json.dumps({"model_type": "qwen3"}), "has a config.json that is no run's"),
    ],
)
def test_a_folder_that_is_no_run_gets_one_error_and_no_file(
    command: str, config: str | None, says: str, tmp_path: Path, say: Say
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    code, out, err = say(command, tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert str(tmp_path) in err
    if command == "report":
        assert "is not the folder of a run: it has none of a run's files. Give a folder" in err
    elif command in ("samples", "rescore"):
        assert "has no samples.jsonl; give the folder of a run in which a step has finished" in err
    else:
        assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ([] if config is None else ["config.json"])


@pytest.mark.parametrize("command", ["audit", "export", "track", "resume", "eval"])
def test_a_run_of_another_version_is_told_what_does_not_fit(command: str, tmp_path: Path, say: Say) -> None:
    run = run_in(tmp_path, begun=False)
    values = RunFolder.open(run).read_config()
    RunFolder.open(run).write_config({**values, "later": 1})
    code, out, err = say(command, run)
    assert (code, out) == (2, "")
    assert "error: later: unknown key" in err
    assert f"error: {run}/config.json does not fit this version of offbeat: use the one that wrote it" in err


NO_CHECKPOINT = (
    "has no complete checkpoint: a run is saved at its end, and on the way if checkpoint.every_steps says so"
)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("samples", "has no samples.jsonl; give the folder of a run in which a step|it has no sample at all yet"),
        ("rescore", "has no samples.jsonl; give the folder of a run in which a step|has no such sample; 'offbeat"),
        ("export", NO_CHECKPOINT),
        ("eval", NO_CHECKPOINT),
        ("resume", "has no complete checkpoint to continue from; start it anew with offbeat train"),
        ("track", "the run has no trackers; add"),
    ],
)
def test_a_run_without_a_step_is_told_what_is_missing(
    command: str, says: str, begun: bool, tmp_path: Path, say: Say
) -> None:
    run = run_in(tmp_path, begun=begun)
    code, out, err = say(command, run)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(run) in err
    assert says.split("|")[-1 if begun else 0] in err


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_without_a_step_can_be_audited_and_reported(begun: bool, tmp_path: Path, say: Say) -> None:
    run = run_in(tmp_path, begun=begun)
    code, out, err = say("audit", run)
    assert (code, err) == (0, "")
    assert "verdict     nothing to prove yet: no sample was issued" in out
    code, out, err = say("report", run)
    assert (code, err) == (0, "")
    assert "· 0 steps · 0 samples ·" in out


@pytest.mark.parametrize("command", ["resume", "track"])
def test_a_run_that_is_training_is_left_alone(command: str, tmp_path: Path, say: Say) -> None:
    run = run_in(tmp_path, begun=True)
    with RunFolder.open(run).locked():
        code, _, err = say(command, run)
    assert code == 2
    assert "is in use by another offbeat" in err
