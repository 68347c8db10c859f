"""A run or a checkpoint as the model of another run: found, checked, kept as a path; or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.build import engine_specs
from offbeat.checkpoint import CheckpointStore, State
from offbeat.config import Config, parse_config
from offbeat.errors import ConfigError
from offbeat.metrics.writer import RunFolder
from offbeat.prepare import prepare
from offbeat.saved_models import lineage, model_at_hand, origin_of, resolve_model
from offbeat.testing.tiny_model import tiny_qwen3


def config(model: str | Path, **changes: Any) -> Config:
    data = [{"source": "train.jsonl", "rewards": {"exact_match": 1.0}}]
    return parse_config({"model": str(model), "steps": 3, "prompts_per_step": 2, "data": data, **changes})


def write_run(folder: Path, *steps: int, model: str | Path = "owner/base") -> Path:
    run = RunFolder.create("run", run_dir=folder)
    run.write_config(config(model).model_dump(mode="json"))
    store = CheckpointStore(run.checkpoints)
    for step in steps:
        writing = store.begin(step)
        (writing / "trainer-0" / "model").mkdir(parents=True)
        (writing / "trainer-0" / "model" / "config.json").write_text(json.dumps({"model_type": "x", "step": step}))
        store.commit(writing, State(next_step=step, weights_version=step, seed=0, data="", elapsed_s=0.0))
    return run.path


def model_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}" / "trainer-0" / "model"


def test_a_run_stands_for_its_newest_checkpoint_and_a_checkpoint_for_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 2)
    assert resolve_model(config(run)).model == str(model_of(run, 2))
    resolved = resolve_model(config(run / "checkpoints" / "step-1", revision="main"))
    assert resolved.model == str(model_of(run, 1))
    assert resolved.revision is None
    assert resolve_model(resolved) == resolved  # what config.json keeps is stable


def test_a_newer_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 2)
    (run / "checkpoints" / "step-2" / "complete.json").unlink()
    assert resolve_model(config(run)).model == str(model_of(run, 1))


def test_other_models_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "config.json").write_text('{"model_type": "llama"}')
    theirs = tmp_path / "checkpoints" / "step-100"  # of another framework
    theirs.mkdir(parents=True)
    (theirs / "config.json").write_text('{"model_type": "llama"}')
    for model in ("owner/name", str(tmp_path / "step-3"), str(tmp_path / "gone"), str(theirs)):
        assert resolve_model(config(model)).model == model


def test_what_cannot_be_started_from_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, 2)
    (run / "checkpoints" / "step-7").mkdir()
    with pytest.raises(ConfigError, match=r"the checkpoint of step 7 cannot be used: .*the save was cut short"):
        resolve_model(config(run / "checkpoints" / "step-7"))
    weights = model_of(run, 2) / "config.json"
    weights.write_text(weights.read_text().replace("2", "3"))
    with pytest.raises(ConfigError, match=r"step-2': the checkpoint of step 2 .*corrupted .*saved are 1, 2"):
        resolve_model(config(run / "checkpoints" / "step-2"))
    with pytest.raises(ConfigError, match=r"init = \"random\" takes no weights"):
        resolve_model(config(run, init="random"))
    empty = write_run(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty has no complete checkpoint: a run is saved at its end"):
        resolve_model(config(empty))
    (model_of(run, 1) / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"no complete checkpoint \(skipped step-7: .*step-2: .*corrupted.*step-1: .*missing"
    ):
        resolve_model(config(run))


def test_the_origin_is_told_from_the_path_alone() -> None:
    origin = origin_of("/runs/a/checkpoints/step-40/trainer-0/model")
    assert origin is not None
    assert (origin.run, origin.step) == (Path("/runs/a"), 40)
    assert str(origin) == "step 40 of /runs/a"
    for other in ("owner/name", "/models/trainer-0/model", "/runs/a/checkpoints/step-x/trainer-0/model", "model"):
        assert origin_of(other) is None


def test_a_lineage_goes_back_to_the_model_that_no_run_made(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", 1, model="owner/base")
    second = write_run(tmp_path / "second", 2, model=model_of(first, 1))
    base, revision, origins = lineage(config(model_of(second, 2)))
    assert (base, revision) == ("owner/base", None)
    assert [(origin.run.name, origin.step) for origin in origins] == [("second", 2), ("first", 1)]
    own = write_run(tmp_path / "own", 1, model=model_of(tmp_path / "own", 1))
    assert lineage(config(model_of(own, 1)))[0] == str(model_of(own, 1))


def test_a_run_goes_on_after_the_checkpoint_that_it_began_with_is_gone(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", 1)
    second = write_run(tmp_path / "second", 2)
    began = config(model_of(first, 1))
    store = CheckpointStore(second / "checkpoints")
    newest, _ = store.latest()
    assert newest is not None
    assert model_at_hand(began, newest) is None
    (model_of(first, 1) / "config.json").unlink()
    model_of(first, 1).rmdir()
    assert model_at_hand(began, newest) == str(model_of(second, 2))
    assert model_at_hand(config("owner/name"), newest) is None


def test_a_model_that_stands_in_is_loaded_and_the_config_keeps_where_the_run_comes_from(tmp_path: Path) -> None:
    """config.json is written anew by a resume: card, report and the dtype of an export follow what it names."""
    first = write_run(tmp_path / "first", 1, model="owner/base")
    gone = model_of(first, 1)
    (gone / "config.json").unlink()
    gone.rmdir()
    here = tiny_qwen3(tmp_path / "here", layers=1)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    data = [
        {
            "source": str(tmp_path / "train.jsonl"),
            "format": "text",
            "prompt": "prompt",
            "answer": "answer",
            "rewards": {"exact_match": 1.0},
        }
    ]
    prepared = prepare(config(gone, data=data, sampling={"max_new_tokens": 8}), at_hand=str(here))
    assert prepared.config.model == str(gone)
    assert lineage(prepared.config)[0] == "owner/base"
    (engine,) = engine_specs(prepared.loaded, RunFolder(tmp_path))
    assert engine.settings["model"] == str(here)
    assert prepared.tokenizer("1").input_ids
