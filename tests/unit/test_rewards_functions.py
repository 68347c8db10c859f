"""Naming, finding and checking reward functions; what they may return."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import ConfigError
from offbeat.rewards.builtin import exact_match, math_verify, reasoning_gym, reasoning_gym_exact
from offbeat.rewards.functions import (
    check_columns,
    file_digests,
    function_spec,
    inspect_function,
    load_function,
    short_names,
)
from offbeat.rewards.signature import FunctionSignature, signature_of
from offbeat.rewards.values import NotAReward, as_group_rewards, as_reward


def _file(folder: Path, text: str, name: str = "rewards.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _torch_scalar() -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(0.5, requires_grad=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (None, None),
    ],
)
def test_numbers_of_every_kind_are_rewards_and_none_abstains_B046(value: Any, expected: float | None):
    assert as_reward(value) == expected
    assert type(as_reward(value)) in (float, type(None))


def test_arrays_and_tensors_without_dimensions_are_numbers_B046():
    assert as_reward(np.array(0.25)) == 0.25
    assert as_reward(_torch_scalar()) == 0.5


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        10**400,
        np.float64("nan"),
        "1",
        b"1",
        [1.0],
        (1.0,),
        {"r": 1},
        1j,
        np.complex64(1),
        np.array([1.0]),
        np.array("1"),
        decimal.Decimal(1),
        fractions.Fraction(1),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip -- one list
def test_anything_else_breaks_the_contract_B046(value: Any):
    with pytest.raises(NotAReward, match="returned"):
        as_reward(value)


def _three() -> Any:
    yield from (1, 1, 1)


@pytest.mark.parametrize(
    "values",
    [1.0, None, [1.0], [1.0] * 2, [1.0] * 4, [], _three(), np.ones((3, 1)), np.ones(4), "abc", {0: 1, 1: 1, 2: 1}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip -- one list
def test_a_group_function_returns_one_value_for_each_completion_B140(values: Any):
    with pytest.raises(NotAReward, match="3 completions"):
        as_group_rewards(values, 3)


def test_group_values_may_be_lists_tuples_or_arrays():
    assert as_group_rewards([1, None, 0.5], 3) == [1.0, None, 0.5]
    assert as_group_rewards(np.ones(3), 3) == as_group_rewards((1, 1, 1), 3) == [1.0, 1.0, 1.0]
    with pytest.raises(NotAReward, match="finite"):
        as_group_rewards([1, float("nan"), 1], 3)


def test_a_function_is_inspected_without_running_its_file(tmp_path: Path):
    path = _file(
        tmp_path,
        "raise SystemExit('ran')\n"
        "async def score(completion, answer, *, strict=True, **more): ...\n"
        "def group(completions, prompts): ...\n",
    )
    score = inspect_function(f"{path}:score")
    assert score == FunctionSignature(
        parameters=("completion", "answer", "strict"), required=("completion", "answer"), open=True
    )
    group = inspect_function(f"{path}:group")
    assert group is not None
    assert group.group


def test_the_source_and_the_loaded_function_tell_the_same(tmp_path: Path):
    path = _file(
        tmp_path,
        "def a(completion, answer=1, *, b, c=2): ...\ndef d(completions, **more): ...\n"
        "async def e(x=0, /, *, completion): ...\n",
    )
    for name in "ade":
        spec = f"{path}:{name}"
        assert inspect_function(spec) == signature_of(load_function(spec))


def test_names_that_the_source_does_not_explain_are_left_to_the_worker(tmp_path: Path):
    path = _file(tmp_path, "from x import *\nimport functools\n@functools.cache\ndef f(completion): ...\ng = f\n")
    assert inspect_function(f"{path}:f") is None
    assert inspect_function(f"{path}:g") is None
    assert inspect_function(f"{path}:from_the_star") is None


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("math_verfy", "did you mean 'math_verify'"),
        ("rewards.py", r"write file\.py:function"),
        ("{folder}/rewrds.py:score", r"no such file .*did you mean .*rewards\.py"),
        ("{folder}/rewards.py:scoer", "did you mean 'score'"),
        ("{folder}/rewards.py:only", r"takes answer; it needs 'completion'"),
        ("{folder}/rewards.py:both", "takes both"),
        ("{folder}/rewards.py:first", "positional-only"),
        ("{folder}/broken.py:score", r"broken\.py, line 1"),
        ("no_such_package.rewards:score", "no module 'no_such_package'"),
        ("json.decoder.deeper:score", "is a module, not a package"),
        ("math:sqrt", "no Python source"),
        ("json.decoder:no_function", "has no function 'no_function'"),
    ],
)
def test_a_spec_that_names_nothing_usable_is_refused_with_the_next_step(tmp_path: Path, spec: str, text: str):
    _file(
        tmp_path,
        "def score(completion): ...\ndef only(answer): ...\ndef both(completion, completions): ...\n"
        "def first(completion, /): ...\n",
    )
    _file(tmp_path, "def (", "broken.py")
    with pytest.raises(ConfigError, match=text):
        inspect_function(spec.replace("{folder}", str(tmp_path)))


def test_a_parameter_that_is_no_column_is_refused_and_the_columns_are_listed_B042():
    signature = FunctionSignature(parameters=("completion", "solution", "row"), required=("completion", "solution"))
    with pytest.raises(ConfigError, match=r"'solution'.*columns are question, solutions: did you mean 'solutions'"):
        check_columns("r.py:f", signature, ["question", "solutions"], "gsm8k")
    check_columns("r.py:f", signature, ["question", "solution"], "gsm8k")
    answer = FunctionSignature(parameters=("completion", "answer"), required=("completion", "answer"))
    with pytest.raises(ConfigError, match=r'set answer = "<column>"'):
        check_columns("r.py:f", answer, ["question"], "gsm8k")


def test_arguments_are_given_by_name_and_defaults_are_left_alone():
    row = {"answer": 4, "level": "hard"}

    def plain(completion: str, answer: int, other: int = 7) -> None: ...
    def everything(completion: str, **rest: Any) -> None: ...
    def group(completions: list[str], answers: list[int], prompts: list[str], rows: list[Any]) -> None: ...

    assert signature_of(plain).arguments("c", "p", row) == {"completion": "c", "answer": 4}
    assert signature_of(everything).arguments("c", "p", row) == {**row, "prompt": "p", "row": row, "completion": "c"}
    assert signature_of(group).arguments("c", "p", row) == {
        "completions": "c",
        "answers": 4,
        "prompts": "p",
        "rows": row,
    }


def top_level(completion: str) -> float:
    return float(bool(completion))


def test_a_function_has_a_spec_unless_no_other_process_can_import_it():
    spec = function_spec(top_level)
    assert spec == f"{Path(__file__).resolve()}:top_level"
    assert load_function(spec)("x") == 1.0
    assert function_spec(exact_match) == "exact_match"

    def closure(completion: str) -> float:
        return float(spec in completion)

    typed: dict[str, Any] = {}
    exec("def typed_in(completion): return 1.0", typed)  # as an interactive session does
    bad = [closure, lambda completion: 1.0, Path.exists, len, typed["typed_in"]]  # pyright: ignore[reportUnknownLambdaType] -- part of the test
    for function in bad:
        with pytest.raises(ConfigError, match=r"move it to the top level of a \.py file"):
            function_spec(function)


def test_a_file_finds_its_neighbours_and_is_loaded_once(tmp_path: Path):
    _file(tmp_path, "VALUE = 3.0\n", "neighbour_of_rewards.py")
    path = _file(
        tmp_path,
        "from neighbour_of_rewards import VALUE\nloads = []\ndef f(completion): loads.append(1); return VALUE\n",
    )
    assert load_function(f"{path}:f")("x") == 3.0
    assert load_function(f"{path}:f") is load_function(f"{path}:f")


def test_reported_names_are_short_and_unique():
    assert short_names(["a.py:f", "b.py:g", "exact_match"]) == {
        "a.py:f": "f",
        "b.py:g": "g",
        "exact_match": "exact_match",
    }
    assert short_names(["x/a.py:f", "p.q:f"]) == {"x/a.py:f": "a.f", "p.q:f": "p.q.f"}
    assert set(short_names(["x/a.py:f", "y/a.py:f"]).values()) == {"x/a.py:f", "y/a.py:f"}


def test_exact_match_compares_whole_texts():
    assert exact_match(" 1\n", 1) == 1.0
    for wrong in ("10", "1.5", "100", "the answer is 1", "0 1 2 3", ""):
        assert exact_match(wrong, "1") == 0.0
    with pytest.raises(ValueError, match="empty"):
        exact_match("", " ")
    with pytest.raises(TypeError, match="NoneType"):
        exact_match("", None)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("1", "1", 1.0),
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("10", "1", 0.0),
        ("100", "1", 0.0),
        ("1.5", "1", 0.0),
        (" ".join(str(n) for n in range(101)), "1", 0.0),
        (r"\boxed{1} or \boxed{2}", "1", 0.0),
        ("You asked for 1. I say 3", "1", 0.0),
        ("", "1", 0.0),
        ("no idea", "1", 0.0),
    ],
)
def test_math_verify_parses_then_compares_B087(completion: str, answer: str, expected: float):
    pytest.importorskip("math_verify")
    assert math_verify(completion, answer) == expected


def test_an_empty_gold_answer_is_an_error_and_never_right_B087():
    with pytest.raises(ValueError, match="empty"):
        math_verify("", "")


def test_off_the_main_thread_math_verify_fails_loudly_and_is_never_zero_B013():
    pytest.importorskip("math_verify")
    assert asyncio.run(asyncio.to_thread(math_verify, "42", "42")) == 1.0  # equal texts need no library
    outcome: list[Any] = []

    def grade() -> None:
        try:
            outcome.append(math_verify("0.50", "1/2"))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join(30)
    assert isinstance(outcome[0], ValueError)


@pytest.mark.parametrize("task", ["chain_sum", "arc_agi", "decimal_arithmetic", "knights_knaves", "graph_color"])
def test_reasoning_gym_scores_its_own_answers_after_the_wire(task: str):
    pytest.importorskip("reasoning_gym")
    import msgspec

    from offbeat.data.gym import load_gym
    from offbeat.data.plain import from_wire, to_wire

    for row in load_gym(task, {"size": 2}):
        sent = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(row))))
        assert sent == row
        if row["answer"] is not None:
            assert reasoning_gym(row["answer"], sent) == 1.0
            assert reasoning_gym_exact(row["answer"], sent) == 1.0
        assert reasoning_gym_exact("certainly wrong", sent) == 0.0


def test_rows_of_other_sources_cannot_be_graded_by_reasoning_gym():
    with pytest.raises(ValueError, match="not from reasoning-gym"):
        reasoning_gym("1", {"answer": "1"})


def test_files_of_functions_have_digests_modules_and_built_in_functions_have_none(tmp_path: Path) -> None:
    file = _file(tmp_path, "")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
    assert file_digests([f"{file}:f", f"{file}:g", "package.module:f", "exact_match"]) == {str(file): empty}
    _file(tmp_path, "# edited")
    assert file_digests([f"{file}:f"])[str(file)] != empty
