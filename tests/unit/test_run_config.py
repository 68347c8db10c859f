"""The config of a run, asked for later and from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.commands.rescore import rescore
from offbeat.commands.run_config import run_config
from offbeat.config import load_config
from offbeat.errors import ConfigError
from offbeat.metrics.writer import ORIGIN, RunFolder

OVERRIDE = 'data.0.rewards={"rewards.py:f"=1.0}'


@pytest.fixture(name="config")
def _config(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (project / "run.toml").write_text(
        'model = "m"\nsteps = 1\nprompts_per_step = 1\n'
        '[[data]]\nsource = "rows.jsonl"\nrewards = { exact_match = 1.0 }\n'
    )
    return project / "run.toml"


def run_of(config: Path) -> RunFolder:
    """As `offbeat train` writes it."""
    run = RunFolder.create("run", base=config.parents[1] / "runs")
    run.write_origin(config.parent)
    run.write_config(load_config(config).model_dump(mode="json"))
    return run


def test_a_path_given_beside_a_run_means_what_it_means_beside_its_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(config)
    for folder in (config.parent, run.path, config.parents[1]):
        monkeypatch.chdir(folder)
        assert run_config(run, [OVERRIDE]) == load_config(config, [OVERRIDE])
        assert list(run_config(run, [OVERRIDE]).data[0].rewards) == [f"{config.parent / 'rewards.py'}:f"]
        assert run_config(run) == load_config(config)


def test_a_file_that_is_not_there_is_named_with_the_place_looked_in(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(config)
    run.samples.write_text("")
    monkeypatch.chdir(run.path)
    with pytest.raises(ConfigError) as caught:
        rescore(run.path, [OVERRIDE])
    assert f"no such file {config.parent / 'rewards.py'}; paths are relative to the configuration" in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_a_run_that_kept_no_folder_takes_the_current_one(
    config: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(config)
    (run.path / ORIGIN).unlink()
    if text is not None:
        (run.path / ORIGIN).write_text(text)
    monkeypatch.chdir(run.path)
    assert list(run_config(run, [OVERRIDE]).data[0].rewards) == [f"{run.path / 'rewards.py'}:f"]
