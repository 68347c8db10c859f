"""A changed reward over recorded samples: what is graded by which row, and old against new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_values import recorded
from sample_values import scored

from offbeat.commands.rescore import Columns, blocks, open_sources, report, reported_names, rescore
from offbeat.config import Config, parse_config
from offbeat.data.prompts import columns_of
from offbeat.errors import ConfigError
from offbeat.metrics.recorded import RecordedSample
from offbeat.metrics.rescoring import Comparison, Score, comparison_lines
from offbeat.metrics.samples import bounded, sample_objects
from offbeat.rewards.pool import RewardPool
from offbeat.types import Prompt


def score(reward: float, *errors: str, **parts: float) -> Score:
    return Score(reward, parts, errors)


def test_old_and_new_are_compared_part_by_part() -> None:
    comparison = Comparison()
    old = [
        recorded("data/0", 0, reward=1.0, parts={"right": 1.0, "form": 1.0}),
        recorded("data/0", 1, reward=1.0, parts={"right": 1.0}),
        recorded("data/1", 0, reward=0.0, parts={"right": 0.0, "form": 0.0}, errors=("form: no",)),
        recorded("data/1", 1, reward=None, parts={"right": None}),
    ]
    new = [
        score(0.0, right=0.0, short=1.0),
        score(1.0, right=1.0, short=0.0),
        score(0.5, "short: ValueError: x", right=0.5, short=0.0),
        score(0.5, right=0.5, short=0.0),
    ]
    comparison.add(old[:2], new[:2])
    comparison.add(old[2:], new[2:])
    right = comparison.parts["right"]
    assert (right.old_mean, right.new_mean) == (2 / 3, 0.5)
    assert (right.both, right.up, right.down, right.agreement) == (3, 1, 1, pytest.approx(1 / 3))
    assert (comparison.spread_before, comparison.spread_after, comparison.groups) == (0, 1, 2)
    assert [(sample.prompt_id, sample.sample_index) for sample, _ in comparison.largest] == [
        ("data/0", 0),
        ("data/1", 0),
        ("data/1", 1),
    ]
    assert comparison_lines(comparison) == [
        "samples    4 samples of 2 groups, step 0",
        "reward     .667 → .500 · up 1 · down 1 · same 33 % · None before 1",
        "           right .667 → .500 · up 1 · down 1 · same 33 % · None before 1",
        "           form .500 → – · gone",
        "           short – → .250 · new",
        "spread     0 % → 50 % of groups have different rewards",
        "errors     1 → 1",
        "           the first: short: ValueError: x (sample data/1 #0)",
    ]


def test_only_the_largest_changes_are_kept_and_single_samples_have_no_spread() -> None:
    comparison = Comparison()
    for number in range(50):
        sample = recorded(f"data/{number}", reward=0.0, parts={"right": 0.0})
        comparison.add([sample], [score(float(number), right=float(number))])
    assert [new.reward for _, new in comparison.largest] == [49.0, 48.0, 47.0]
    assert not [line for line in comparison_lines(comparison) if line.startswith("spread")]
    heads = [text for _, text in report(comparison, Columns({})) if text.startswith("── ")]
    assert heads[0] == "── data/49 #0 · step 0 · reward 0 → 49"


def groups(*sizes: int, step: int = 0) -> list[RecordedSample]:
    return [recorded(f"data/{g}", n, step=step) for g, size in enumerate(sizes) for n in range(size)]


def test_a_block_is_a_step_and_a_limit_ends_with_a_whole_group() -> None:
    every = [*groups(4, 4), *groups(4, 4, step=1)]
    assert [len(block) for block in blocks(every, None)] == [8, 8]
    assert [len(block) for block in blocks(every, 8)] == [8]
    assert [len(block) for block in blocks(every, 9)] == [8, 4]
    assert [len(block) for block in blocks(every, 2)] == [4]


# --- rows -----------------------------------------------------------------------------------------------------------


def config(folder: Path, **changes: Any) -> Config:
    data = {"source": "train.jsonl", "answer": "sum", "rewards": {"rewards.py:right": 1.0}, **changes}
    return parse_config({"model": "m", "steps": 1, "prompts_per_step": 1, "data": [data]}, folder=folder)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text("def right(completion, answer):\n    return 1.0\n")
    write_rows(tmp_path, 3, 7)
    return tmp_path


def write_rows(folder: Path, *sums: int) -> None:
    rows = [{"prompt": f"p{n}", "sum": value, "other": "x"} for n, value in enumerate(sums)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample_of(folder: Path, number: int, **changes: Any) -> RecordedSample:
    """As a run records it."""
    section = config(folder).data[0]
    line = json.loads((folder / "train.jsonl").read_text().splitlines()[number])
    one = scored(f"data/{number}")
    prompt = Prompt(
        id=one.prompt.id,
        epoch=0,
        source="data",
        token_ids=one.prompt.token_ids,
        text="p",
        columns=columns_of(line, section),
    )
    values = sample_objects(0, [msgspec.structs.replace(one, prompt=prompt)])[0]
    return msgspec.convert({**values, **changes}, RecordedSample, strict=False)


def columns(folder: Path, now: Config | None = None, *, changed_rows: bool = False) -> Columns:
    before = config(folder)
    return Columns(open_sources(before, now or before, None), changed_rows=changed_rows)


def test_a_sample_gets_the_columns_that_it_was_graded_with(folder: Path) -> None:
    found = columns(folder)
    prompt = found.prompt(sample_of(folder, 1))
    assert prompt is not None
    assert prompt.columns == {"prompt": "p1", "sum": 7, "other": "x", "answer": 7}
    assert not found.left_out
    # Another answer column of the same, unchanged row.
    prompt = columns(folder, config(folder, answer="other")).prompt(sample_of(folder, 1))
    assert prompt is not None
    assert prompt.columns["answer"] == "x"


def test_a_row_that_has_changed_is_noticed_and_used_only_when_asked_for(folder: Path) -> None:
    sample, same = sample_of(folder, 1), sample_of(folder, 0)
    write_rows(folder, 3, 8)
    found = columns(folder)
    assert found.prompt(sample) is None
    assert found.prompt(same) is not None
    assert dict(found.left_out) == {"their row in the data has changed since": 1}
    told = [text for _, text in report(Comparison(), found)]
    assert any("1 sample left out: their row in the data has changed since (--changed-rows" in text for text in told)
    prompt = columns(folder, changed_rows=True).prompt(sample)
    assert prompt is not None
    assert prompt.columns["answer"] == 8


def test_what_cannot_be_graded_is_left_out_and_counted(folder: Path) -> None:
    sample = sample_of(folder, 1)
    long = sample_of(folder, 0, completion=bounded("x" * 300_000))
    write_rows(folder, 3)
    found = columns(folder)
    assert found.prompt(sample) is None
    assert found.prompt(long) is None
    assert found.prompt(recorded("elsewhere/0")) is None
    assert dict(found.left_out) == {
        "their row is not in the data any more": 2,
        "only the ends of their text were recorded": 1,
    }


def test_a_sample_without_a_digest_is_graded_and_said(folder: Path) -> None:
    found = columns(folder)
    assert found.prompt(sample_of(folder, 0, row=None)) is not None
    assert found.unchecked == 1
    found.damage.lines = 1
    assert any("1 line is no sample and left out" in text for _, text in report(Comparison(), found))
    assert any("without a digest" in text for _, text in report(Comparison(), found))


def test_functions_have_the_names_that_the_run_gave_them_whichever_samples_are_chosen(tmp_path: Path) -> None:
    """Training samples have one `right`, which the run called `a.right` beside that of its held-out set."""
    for file in ("a.py", "b.py"):
        (tmp_path / file).write_text("def right(completion):\n    return 1.0\n")
    write_rows(tmp_path, 3)
    values = config(tmp_path, rewards={"a.py:right": 1.0}).model_dump(mode="json")
    held = {"name": "held", "source": "train.jsonl", "rewards": {"b.py:right": 1.0}}
    both = parse_config({**values, "eval": [held]}, folder=tmp_path)
    sources = open_sources(both, both, None)
    functions = {name: source.now.rewards for name, source in sources.items()}
    names = RewardPool([], functions, None, both.rewards, reported_names(both)).names
    assert [names[spec] for spec in sources["data"].now.rewards] == ["a.right"]


def test_mistakes_are_found_before_a_process_starts(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no function 'wrong'"):
        columns(folder, config(folder, rewards={"rewards.py:wrong": 1.0}))
    with pytest.raises(ConfigError, match=r"a source 'data', the new config only other"):
        columns(folder, config(folder, name="other"))
    with pytest.raises(ConfigError, match=r"no such \[\[eval\]\] set; it has none"):
        open_sources(config(folder), config(folder), "held")
    with pytest.raises(ConfigError, match="--limit 0: must be at least 1"):
        rescore(folder, limit=0)
    lone = folder / "lone.jsonl"
    lone.write_text("")
    with pytest.raises(ConfigError, match="name the config of its data and rewards with --rewards"):
        rescore(lone)
