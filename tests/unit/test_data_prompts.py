"""Batches of prompts: order, resume, sizes, filtering, held-out sets, warm-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_tokenizers import character_tokenizer

from offbeat.config import Config, parse_config
from offbeat.data.prompts import PromptStream, open_eval, open_train, own_problems
from offbeat.data.warmup import open_warmup
from offbeat.errors import ConfigError, DataError
from offbeat.showing import epochs


def _write(path: Path, prompts: list[str]) -> str:
    rows = [{"prompt": prompt, "answer": f"a{index}"} for index, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _config(
    folder: Path, *sizes: int, batch: int = 4, seed: int = 0, weights: tuple[float, ...] = (1, 1), **data: Any
) -> Config:
    sections = [
        {
            "name": f"s{index}",
            "source": _write(folder / f"s{index}.jsonl", [f"p{row}" for row in range(size)]),
            "answer": "answer",
            "format": "text",
            "rewards": {"exact_match": 1.0},
            "weight": weights[index],
            **data,
        }
        for index, size in enumerate(sizes)
    ]
    return parse_config({"model": "m", "steps": 1, "prompts_per_step": batch, "seed": seed, "data": sections})


def _stream(folder: Path, *sizes: int, **more: Any) -> PromptStream:
    return open_train(_config(folder, *sizes, **more), character_tokenizer())


def _ids(stream: PromptStream, *batches: int) -> list[tuple[str, int]]:
    return [(prompt.id, prompt.epoch) for index in batches for prompt in stream.batch(index)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own_B171(tmp_path: Path):
    ids = _ids(_stream(tmp_path, 12), *range(6))
    first, second = ids[:12], ids[12:]
    assert sorted(first) == sorted((f"s0/{row}", 0) for row in range(12))
    assert sorted(second) == sorted((f"s0/{row}", 1) for row in range(12))
    assert [name for name, _ in first] != [name for name, _ in second]
    other_seed = _ids(_stream(tmp_path, 12, seed=1), *range(3))
    assert other_seed != first


def test_a_batch_may_span_two_epochs_and_loses_nothing(tmp_path: Path):
    ids = _ids(_stream(tmp_path, 6), 0, 1, 2)
    assert sorted(ids) == sorted([(f"s0/{row}", epoch) for row in range(6) for epoch in (0, 1)])


def test_resume_in_a_new_process_at_any_step_continues_the_same_line_B044_B137(tmp_path: Path):
    config = _config(tmp_path, 12, 5, weights=(2, 1))
    whole = _ids(open_train(config, character_tokenizer()), *range(8))
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from data_tokenizers import character_tokenizer;"
        "from offbeat.config import Config; from offbeat.data.prompts import open_train;"
        "s = open_train(Config.model_validate_json(sys.argv[2]), character_tokenizer());"
        "print(json.dumps([[[p.id, p.epoch] for i in range(k, 8) for p in s.batch(i)] for k in range(8)]))"
    )
    arguments = [sys.executable, "-c", code, str(Path(__file__).parent), config.model_dump_json()]
    out = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout
    for k, rest in enumerate(json.loads(out)):
        assert [tuple(one) for one in rest] == whole[4 * k :]


def test_reading_batches_in_any_order_gives_the_same_prompts(tmp_path: Path):
    stream = _stream(tmp_path, 12)
    backwards = [_ids(stream, index) for index in (5, 3, 3, 0)]
    assert backwards == [_ids(stream, 5), _ids(stream, 3), _ids(stream, 3), _ids(stream, 0)]
    assert backwards[1] == backwards[2]


def test_sources_are_mixed_by_weight(tmp_path: Path):
    stream = _stream(tmp_path, 40, 40, batch=8, weights=(3, 1))
    for index in range(5):
        sources = [prompt.source for prompt in stream.batch(index)]
        assert (sources.count("s0"), sources.count("s1")) == (6, 2)


def test_an_epoch_of_a_source_lasts_as_many_steps_as_its_share_takes(tmp_path: Path):
    stream = _stream(tmp_path, 24, 8, batch=4, weights=(1, 1))
    assert stream.steps_per_epoch == {"s0": 12.0, "s1": 4.0}
    epoch_of = {name: [e for b in range(12) for i, e in _ids(stream, b) if i.startswith(name)] for name in ("s0", "s1")}
    assert (set(epoch_of["s0"]), set(epoch_of["s1"])) == ({0}, {0, 1, 2})  # 12 steps: one epoch, three epochs
    assert epochs(stream.steps_per_epoch) == "steps per epoch: s0 12, s1 4"
    assert epochs(_stream(tmp_path, 12, batch=4).steps_per_epoch) == "3 steps per epoch"
    assert epochs(_stream(tmp_path, 24, 8, batch=4, weights=(3, 1)).steps_per_epoch) == "8 steps per epoch"


def test_without_shuffle_rows_come_as_they_are(tmp_path: Path):
    assert _ids(_stream(tmp_path, 5, shuffle=False), 0, 1) == [
        ("s0/0", 0),
        ("s0/1", 0),
        ("s0/2", 0),
        ("s0/3", 0),
        ("s0/4", 0),
        ("s0/0", 1),
        ("s0/1", 1),
        ("s0/2", 1),
    ]  # fmt: skip -- one row of two epochs


def test_every_wrong_column_is_reported_and_an_inherited_one_once(tmp_path: Path):
    values = _config(tmp_path, 8, prompt="question", answer="solution").model_dump(mode="json")
    held = {"name": "held", "source": _write(tmp_path / "held.jsonl", ["p"])}
    config = parse_config({**values, "eval": [held, {**held, "name": "own", "answer": "gold"}]})
    with pytest.raises(DataError) as data:
        open_train(config, character_tokenizer())
    assert [problem.split(":")[0] for problem in data.value.problems] == [
        "data.s0.prompt = 'question'",
        "data.s0.answer = 'solution'",
    ]
    told: list[list[str]] = []
    for section in config.eval:
        with pytest.raises(DataError) as held_out:
            open_eval(config, section, character_tokenizer())
        assert len(held_out.value.problems) == 2
        told.append(own_problems(config, section, held_out.value, data.value.missing))
        assert own_problems(config, section, held_out.value, {}) == list(held_out.value.problems)
    assert told[0] == []
    assert [problem.split(":")[0] for problem in told[1]] == ["eval.own.answer = 'gold'"]


def test_a_set_smaller_than_a_batch_is_an_error_with_both_sizes_B067(tmp_path: Path):
    with pytest.raises(DataError, match=r"3 rows before filtering, 3 after, but a batch takes 8"):
        _stream(tmp_path, 3, batch=8)
    config = _config(tmp_path, 8, batch=8, max_prompt_tokens=10)
    _write(tmp_path / "s0.jsonl", ["short", "short", *["much too long a prompt"] * 6])
    with pytest.raises(
        DataError, match=r"8 rows before filtering, 2 after, but a batch takes 8.*raise max_prompt_tokens"
    ):
        open_train(config, character_tokenizer())
    _write(tmp_path / "s0.jsonl", ["much too long a prompt"] * 8)
    with pytest.raises(DataError, match="8 rows before filtering, 0 after"):
        open_train(config, character_tokenizer())
    _write(tmp_path / "s0.jsonl", [])
    with pytest.raises(DataError, match="no rows"):
        open_train(config, character_tokenizer())


def test_a_source_smaller_than_its_share_of_a_batch_is_an_error_too(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"s1: 2 rows .* takes 4 of them, its share of prompts_per_step = 8.*lower its weight"
    ):
        _stream(tmp_path, 10, 2, batch=8)
    _stream(tmp_path, 10, 2, batch=8, weights=(3, 1))


def test_over_long_prompts_are_dropped_and_counted_or_refused(tmp_path: Path):
    config = _config(tmp_path, 1, batch=2, max_prompt_tokens=5)
    _write(tmp_path / "s0.jsonl", ["12345", "123456", "1"])
    stream = open_train(config, character_tokenizer())
    assert (stream.rows, stream.sources[0].dropped) == (2, 1)
    assert {name for name, _ in _ids(stream, 0)} == {"s0/0", "s0/2"}
    strict = _config(tmp_path, 1, batch=2, max_prompt_tokens=5, over_long="error")
    _write(tmp_path / "s0.jsonl", ["12345", "123456", "1"])
    with pytest.raises(DataError, match=r"line 2 \(row 1\): the prompt has 6 tokens, more than"):
        open_train(strict, character_tokenizer())


def test_a_tool_schema_alone_can_make_a_prompt_too_long(tmp_path: Path):
    """B055: rows are measured by what renders them for use."""
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 300}}]
    config = _config(tmp_path, 4, batch=2, format="chat", max_prompt_tokens=200)
    assert open_train(config, character_tokenizer()).rows == 4
    with_tools = _with(config, sampling={"chat_template_kwargs": {"tools": tools}})
    with pytest.raises(DataError, match=r"4 rows before filtering, 0 after.*max_prompt_tokens = 200"):
        open_train(with_tools, character_tokenizer())
    roomy = config.data[0].model_copy(update={"max_prompt_tokens": 1000})
    (prompt, *_) = open_train(with_tools.model_copy(update={"data": (roomy,)}), character_tokenizer()).batch(0)
    assert 300 < len(prompt.token_ids) <= 1000
    assert "x" * 300 in prompt.text


def test_problems_of_all_sources_are_found_at_once(tmp_path: Path):
    config = _config(tmp_path, 4, 4)
    (tmp_path / "s0.jsonl").unlink()
    (tmp_path / "s1.jsonl").write_text('{"x": 1}\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        open_train(config, character_tokenizer())
    assert len(caught.value.problems) == 3  # both columns of the second


def test_a_fingerprint_notices_changed_data(tmp_path: Path):
    stream = _stream(tmp_path, 12)
    saved = stream.fingerprint()
    stream.check_unchanged(saved, 3)
    with pytest.raises(DataError, match="saved at batch 3"):
        _stream(tmp_path, 13).check_unchanged(saved, 3)
    with pytest.raises(DataError, match="saved at batch 3"):
        _stream(tmp_path, 12, seed=1).check_unchanged(saved, 3)


def test_prompts_carry_their_row_and_the_configured_answer(tmp_path: Path):
    config = _config(tmp_path, 4)
    path = tmp_path / "s0.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "gold": i}) + "\n" for i in range(4)), encoding="utf-8")
    config = config.model_copy(update={"data": (config.data[0].model_copy(update={"answer": "gold"}),)})
    prompt = open_train(config, character_tokenizer()).batch(0)[0]
    row = int(prompt.id.removeprefix("s0/"))
    assert prompt.columns == {"prompt": str(row), "gold": row, "answer": row}
    assert (prompt.text, prompt.source, prompt.token_ids.dtype.name) == (str(row), "s0", "int32")


def _with(config: Config, **raw: Any) -> Config:
    return parse_config({**json.loads(config.model_dump_json()), **raw})


def test_held_out_sets_take_what_they_leave_out_from_the_first_source(tmp_path: Path):
    held_out = _write(tmp_path / "held.jsonl", ["a", "b", "c"])
    config = _with(_config(tmp_path, 4), eval=[{"name": "held", "source": held_out, "max_prompts": 2}])
    found = open_eval(config, config.eval[0], character_tokenizer())
    assert [(prompt.id, prompt.epoch, prompt.text) for prompt in found.prompts] == [
        ("held/0", 0, "a"),
        ("held/1", 0, "b"),
    ]
    assert found.rewards == {"exact_match": 1.0}
    assert found.prompts[0].columns["answer"] == "a0"
    assert open_eval(config, config.eval[0], character_tokenizer()).digest() == found.digest()
    text = Path(held_out).read_text()
    Path(held_out).write_text(text.replace("a1", "other"))
    assert open_eval(config, config.eval[0], character_tokenizer()).digest() != found.digest()


def test_a_held_out_set_with_the_name_of_a_source_is_refused(tmp_path: Path):
    held_out = _write(tmp_path / "held.jsonl", ["a"])
    config = _with(_config(tmp_path, 4), eval=[{"name": "s0", "source": held_out}])
    with pytest.raises(ConfigError, match=r"eval\.s0.*another name"):
        open_eval(config, config.eval[0], character_tokenizer())


def test_warm_up_samples_end_with_the_end_id_and_render_the_prompt_the_same_way(tmp_path: Path):
    tokenizer = character_tokenizer(bos="<s>", adds_bos=True, adds_eos=True)
    config = _with(
        _config(tmp_path, 4, shuffle=False),
        warmup={
            "source": _write(tmp_path / "w.jsonl", ["x", "y"]),
            "format": "text",
            "steps": 1,
            "samples_per_step": 5,
        },
    )
    warmup = open_warmup(config, tokenizer)
    assert warmup is not None
    samples = warmup.batch(0)
    assert len(samples) == 5, "a small set is repeated"
    texts = {f"{tokenizer.decode(s.prompt_token_ids)}|{tokenizer.decode(s.token_ids)}" for s in samples}
    assert texts == {"<s>x|a0</s>", "<s>y|a1</s>"}
    assert [s.token_ids.tolist() for s in warmup.batch(0)] == [s.token_ids.tolist() for s in samples]
    assert open_warmup(_config(tmp_path, 4), tokenizer) is None
