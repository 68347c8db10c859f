"""What a model cannot do is said before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import write_config, write_project

from offbeat.config import load_config
from offbeat.errors import ConfigError
from offbeat.prepare import prepare

pytestmark = pytest.mark.integration


def edited(folder: Path, changes: dict[str, Any]) -> Path:
    project = write_project(folder / "project")
    path = project / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return project


def problem(project: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(load_config(write_config(project, **changes)))
    return str(caught.value)


def test_longrope_beyond_its_original_length_is_refused(tmp_path: Path) -> None:
    rope = {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}
    project = edited(tmp_path, rope | {"original_max_position_embeddings": 20})
    assert "longrope" in problem(project)


def test_an_architecture_that_the_engine_cannot_sample_is_refused_by_name(tmp_path: Path) -> None:
    assert "cannot sample a mamba" in problem(edited(tmp_path, {"model_type": "mamba"}))


def test_a_quantised_model_is_refused_B015_B062(tmp_path: Path) -> None:
    project = edited(tmp_path, {"quantization_config": {"quant_method": "fp8"}})
    assert "is quantised" in problem(project)


def test_a_prompt_limit_that_was_not_given_is_taken_from_the_model(tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    config = load_config(write_config(project))
    data = [{"source": "train.jsonl", "format": "text", "rewards": {"rewards.py:length": 1.0}}]
    prepared = prepare(load_config(write_config(project, data=data)))
    assert prepared.config.data[0].max_prompt_tokens == 256 - config.sampling.max_new_tokens
    assert "make more than the model's 256 positions" in problem(project, data=[{**data[0], "max_prompt_tokens": 256}])
    assert "leaves no room" in problem(project, data=data, sampling={"max_new_tokens": 300})
    assert "are not in the vocabulary of 78" in problem(project, sampling={"stop_token_ids": [5, 999]})
