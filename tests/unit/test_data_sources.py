"""Reading rows: JSONL, Parquet, saved data sets, reasoning-gym."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.data.columns import check_column, check_prompts, column_names
from offbeat.data.plain import from_wire, plain_value, to_wire
from offbeat.data.sources import Rows, load_rows
from offbeat.errors import DataError


def _jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_odd_but_right_jsonl_files_are_read_under_an_ascii_locale_B074(tmp_path: Path):
    lines = [
        '\ufeff{"prompt": "smile \N{GRINNING FACE}"}\r\n',
        '{"prompt": "你好"}\r\n',
        "\r\n",
        '{"prompt": "e\u0301"}\r\n',
        '{"prompt": "half \\ud83d pair"}\r\n',
        '{"prompt": "whole \\ud83d\\ude00"}\r\n',
        "  \n",
    ]
    (tmp_path / "d.jsonl").write_bytes("".join(lines).encode("utf-8"))
    code = (
        "import sys; from offbeat.data.sources import load_rows; r = load_rows(sys.argv[1]); "
        "print(ascii([row['prompt'] for row in r.rows]), list(r.lines))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "d.jsonl")],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    expected = ["smile \U0001f600", "你好", "e\u0301", "half \ufffd pair", "whole \U0001f600"]
    assert out.strip() == f"{expected!a} [1, 2, 4, 5, 6]"


def test_a_file_in_another_encoding_is_named_with_its_line_B074(tmp_path: Path):
    path = tmp_path / "gbk.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n' + '{"prompt": "你好"}\n'.encode("gbk"))
    with pytest.raises(DataError, match=r"gbk\.jsonl, line 2: byte 0xc4 .*not UTF-8"):
        load_rows(str(path))


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ',
        "[1, 2]",
        '"text"',
        '{"x": NaN}',
        '{"x": 1e999}',
        '{"x": -1e999}',
        '{"x": ' + "[" * 150 + "]" * 150 + "}",
    ],
)
def test_lines_that_are_no_objects_are_named_with_file_and_line(tmp_path: Path, line: str):
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"d\.jsonl, line 3"):
        load_rows(str(path))


def test_a_missing_file_names_the_nearest(tmp_path: Path):
    _jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl"):
        load_rows(str(tmp_path / "trian.jsonl"))
    (tmp_path / "x.csv").write_text("a", encoding="utf-8")
    with pytest.raises(DataError, match=r"unknown kind of file '\.csv'"):
        load_rows(str(tmp_path / "x.csv"))


def test_parquet_rows_hold_plain_values_nested_ones_too_B042(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": 4, "m": {"a": [1.5, 2.0]}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    loaded = load_rows(str(tmp_path / "d.parquet"))
    assert loaded.rows == rows
    check_prompts(loaded, "prompt", "data.prompt")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load_rows(str(tmp_path / "bad.parquet"))


def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "d.parquet").write_bytes(b"")
    for module in ("pyarrow.parquet", "datasets", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, module, None)
    for source in (str(tmp_path / "d.parquet"), "hf://owner/name/train", "reasoning_gym:chain_sum"):
        with pytest.raises(DataError, match=r"pip install -e .*\[tasks\]"):
            load_rows(source)


def test_a_saved_dataset_is_read_and_one_with_splits_says_how_to_name_one(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    datasets.DatasetDict(train=one, test=one).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"2 splits \(train, test\).*d/train"):
        load_rows(str(tmp_path / "d"))
    assert load_rows(str(tmp_path / "d" / "train")).rows == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    with pytest.raises(DataError, match=r"without state\.json"):
        load_rows(str(tmp_path))


@pytest.mark.parametrize("source", ["hf://gsm8k", "hf://a/b", "hf://a/b/c/d/e", "hf://a//train", "hf://a/b/train@"])
def test_hub_sources_are_written_one_way(source: str):
    with pytest.raises(DataError, match="write hf://owner/name"):
        load_rows(source)


def test_reasoning_gym_rows_are_the_same_every_time_and_take_options():
    pytest.importorskip("reasoning_gym")
    rows = load_rows("reasoning_gym:chain_sum", {"size": 5, "max_digits": 1}).rows
    again = load_rows("reasoning_gym:chain_sum", {"size": 5, "max_digits": 1}).rows
    other = load_rows("reasoning_gym:chain_sum", {"size": 5, "max_digits": 1, "seed": 1}).rows
    assert rows == again
    assert rows != other
    assert rows[0]["prompt"] == rows[0]["question"]
    assert rows[0]["reasoning_gym"] == {"task": "chain_sum", "options": {"seed": 0, "size": 5, "max_digits": 1}}


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        ("reasoning_gym:chain_sums", {}, "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, r"options\.min_term.*did you mean 'min_terms'"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, "refuses them"),
        ("reasoning_gym:composite", {}, r"one \[\[data\]\] section for each"),
        ("d.jsonl", {"size": 2}, "are for reasoning_gym"),
    ],
)
def test_wrong_tasks_and_options_are_named(source: str, options: dict[str, Any], text: str):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=text):
        load_rows(source, options)


def test_a_missing_column_names_those_present_B042():
    rows = Rows("d.jsonl", [{"question": "a", "solution": "b"}])
    with pytest.raises(DataError, match=r"data\.x\.answer = 'answer'.*only question, solution"):
        check_column(rows, "answer", "data.x.answer")
    with pytest.raises(DataError, match="did you mean 'question'"):
        check_column(rows, "questions", "data.x.prompt")


def test_nothing_in_row_500_is_found_with_its_number_B042():
    rows: list[dict[str, Any]] = [{"prompt": "a", "answer": index} for index in range(600)]
    rows[500] = {"prompt": "a", "answer": None}
    with pytest.raises(DataError, match=r"row 500: column 'answer'.*empty"):
        check_column(Rows("d", rows), "answer", "data.answer")
    del rows[500]["answer"]
    with pytest.raises(DataError, match="row 500: no column 'answer'"):
        check_column(Rows("d", rows), "answer", "data.answer")
    check_column(Rows("d", [{"answer": 1}, {"answer": "two"}]), "answer", "data.answer")
    assert column_names([{"a": 1}, {"b": 1, "a": 2}]) == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (5, "is int"),
        ("  ", "empty text"),
        ([], "empty list"),
        (["hi"], "each message is"),
        ([{"role": "usr", "content": "hi"}], "role 'usr'"),
        ([{"role": "user", "content": None}], "content is NoneType"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with an assistant message"),
    ],
)
def test_prompts_of_a_wrong_kind_are_named_with_their_line(prompt: Any, text: str):
    rows = Rows("d.jsonl", [{"prompt": "fine"}, {"prompt": prompt}], lines=[1, 7])
    with pytest.raises(DataError, match=rf"d\.jsonl, line 7 \(row 1\).*{text}"):
        check_prompts(rows, "prompt", "data.prompt")


def test_library_values_become_plain_ones():
    value = {"a": np.arange(2), "b": (np.float32(1.5), np.str_("x")), "c": np.bool_(True), np.int64(3): "\ud800"}
    plain = plain_value(value)
    assert plain == {"a": [0, 1], "b": (1.5, "x"), "c": True, 3: "\ufffd"}
    assert type(plain["b"][1]) is str


def test_rows_cross_the_wire_unchanged():
    import msgspec

    row = {
        "tuple": ((1, 2), [3]),
        "big": 10**40,
        "small": -(2**63) - 1,
        "keys": {1: "a", (2, 3): None},
        "set": {1, 2},
        "decimal": decimal.Decimal("1.10"),
        "when": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "plain": [True, 1.5, "x", b"y"],
    }
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(row)))
    assert from_wire(sent) == row
    with pytest.raises(TypeError, match="holds a object"):
        to_wire({"x": object()})


def test_a_data_set_out_of_reach_is_an_error_within_five_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import HfApi

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(HfApi, "dataset_info", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError, match=r"owner/name is not in the local cache.*\(no network\)"):
        load_rows("hf://owner/name/train@main")


@pytest.mark.parametrize("content", ["{", "[1]", '{"splits": 3}', "\xff"])
def test_a_folder_of_splits_that_is_damaged_is_named(tmp_path: Path, content: str):
    (tmp_path / "dataset_dict.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"dataset_dict\.json: is not what save_to_disk"):
        load_rows(str(tmp_path))


@pytest.mark.parametrize("source", ["n" * 300 + ".jsonl", "a\0b.jsonl", "file.jsonl/rows.jsonl"])
def test_a_source_that_cannot_be_a_path_is_a_data_error(tmp_path: Path, source: str):
    (tmp_path / "file.jsonl").touch()
    with pytest.raises(DataError, match="source = "):
        load_rows(str(tmp_path / source))


def test_a_pipe_is_no_source_nobody_waits_for_it(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is a pipe or a device"):
        load_rows(str(tmp_path / "pipe.jsonl"))


def test_a_row_may_have_any_key_on_its_way_to_a_reward():
    for row in ({"\0offbeat": "int", "value": "0x1"}, {"a": {"\0offbeat": 3}}, {"\0offbeat": {"\0offbeat": (1, 2)}}):
        assert from_wire(to_wire(row)) == row
