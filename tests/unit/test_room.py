"""How long prompts may be for the positions of a model: of training, and of every held-out set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.config import Config, parse_config
from offbeat.errors import ConfigError
from offbeat.models import ModelFolder
from offbeat.room import fit_to_model


def model(**config: Any) -> ModelFolder:
    return ModelFolder("m", None, Path("m"), {"model_type": "x", **config}, {}, 78, 512, 0)


def config(evals: list[dict[str, Any]], *, new_tokens: int = 64, **data: Any) -> Config:
    return parse_config(
        {
            "model": "m",
            "steps": 1,
            "prompts_per_step": 1,
            "sampling": {"max_new_tokens": new_tokens},
            "data": [{"source": "train.jsonl", "rewards": {"exact_match": 1.0}, **data}],
            "eval": [{"name": f"set{i}", "source": "test.jsonl", **section} for i, section in enumerate(evals)],
        }
    )


def problems(config: Config, **model_config: Any) -> list[str]:
    return fit_to_model(config, model(**model_config))[1]


def test_a_set_with_room_enough_is_left_as_it_is() -> None:
    fitted, problems = fit_to_model(config([{}, {"max_new_tokens": 112, "max_prompt_tokens": 400}]), model())
    assert problems == []
    assert fitted.data[0].max_prompt_tokens == 512 - 64
    assert [section.max_prompt_tokens for section in fitted.eval] == [None, 400]


def test_a_limit_that_a_set_leaves_out_is_lowered_to_the_room_that_its_own_new_tokens_leave() -> None:
    fitted, problems = fit_to_model(config([{"max_new_tokens": 400}, {}], max_prompt_tokens=300), model())
    assert problems == []
    assert [section.max_prompt_tokens for section in fitted.eval] == [112, None]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"max_new_tokens": 400, "max_prompt_tokens": 2000},
            "eval.set0.max_prompt_tokens = 2000 and max_new_tokens = 400 make more than the model's 512 positions; "
            "set it to at most 112, or lower max_new_tokens.",
        ),
        (
            {"max_prompt_tokens": 449},
            "eval.set0.max_prompt_tokens = 449 and sampling.max_new_tokens = 64 make more than the model's 512 "
            "positions; set it to at most 448, or lower max_new_tokens.",
        ),
        (
            {"max_new_tokens": 512},
            "eval.set0.max_new_tokens = 512 leaves no room for a prompt: the model has 512 positions; set it to less.",
        ),
    ],
)
def test_a_limit_of_a_set_that_the_model_has_no_room_for_is_refused(section: dict[str, Any], says: str) -> None:
    assert problems(config([section])) == [says]


def test_no_room_for_training_is_told_once_and_hides_nothing_about_the_sets() -> None:
    found = problems(config([{}, {"max_new_tokens": 512}, {"max_new_tokens": 8}], new_tokens=600))
    assert [problem.split(" ")[0] for problem in found] == ["sampling.max_new_tokens", "eval.set1.max_new_tokens"]


@pytest.mark.parametrize(
    ("evals", "where"), [([], "448 of data.data"), ([{"max_new_tokens": 512 - 10}], "512 of eval.set0")]
)
def test_longrope_beyond_its_original_length_is_refused_in_sets_too(evals: list[dict[str, Any]], where: str) -> None:
    rope = {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 400}
    (said,) = problems(config(evals, max_prompt_tokens=384), **rope)
    assert where in said
    assert problems(config([], max_prompt_tokens=336), **rope) == []


def test_a_set_that_asks_for_more_than_the_model_has_is_found_before_a_process_starts(tmp_path: Path) -> None:
    from offbeat.prepare import prepare
    from offbeat.testing.tiny_model import tiny_qwen3
    from offbeat.testing.tiny_project import BASE, write_rows

    tiny_qwen3(tmp_path / "model", layers=1, weights=False)  # 256 positions
    write_rows(tmp_path / "train.jsonl", [{"prompt": f"{i}+1=", "answer": "1"} for i in range(4)])
    write_rows(tmp_path / "test.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 12, "answer": "1"}])
    (tmp_path / "rewards.py").write_text("def length(completion: str) -> float:\n    return 1.0\n")
    values = {**BASE, "init": "random"}
    section = {"name": "held", "source": "test.jsonl", "max_new_tokens": 246}
    prepared = prepare(parse_config({**values, "eval": [section]}, folder=tmp_path))
    assert [len(prompt.token_ids) for prompt in prepared.eval_sets[0].prompts] == [4]
    assert prepared.eval_data[0].source.dropped == 1
    with pytest.raises(ConfigError, match=r"eval\.held\.max_prompt_tokens = 16 and max_new_tokens = 246"):
        prepare(parse_config({**values, "eval": [{**section, "max_prompt_tokens": 16}]}, folder=tmp_path))
