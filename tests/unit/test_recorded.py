"""samples.jsonl read again: whole lines only, filters, orders, and no more in memory than is kept."""

from __future__ import annotations

import io
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded_values import recorded, write_samples
from rich.console import Console

from offbeat.commands.samples import Choice, samples
from offbeat.errors import ConfigError
from offbeat.metrics.recorded import (
    Damage,
    RecordedSample,
    Wanted,
    best,
    first_of,
    longest,
    read_samples,
    sample_files,
    worst,
)


def test_older_samples_come_first_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.older.jsonl", [recorded(step=0)])
    newest = write_samples(tmp_path / "samples.jsonl", [recorded(step=1), recorded(step=2)])
    newest.write_bytes(newest.read_bytes()[:-20])
    assert [sample.step for sample in read_samples(sample_files(tmp_path))] == [0, 1]


def test_every_byte_is_told_of(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "samples.jsonl", [recorded(completion="x" * 400_000) for _ in range(8)])
    told: list[int] = []
    assert len(list(read_samples([path], told.append))) == 8
    assert sum(told) == path.stat().st_size
    assert len(told) > 2


def test_lines_that_are_no_samples_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "samples.jsonl", [recorded(step=0), recorded(step=1)])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"step": 3}\n' + b"\xff\x00\n" + second)
    damage = Damage()
    assert [sample.step for sample in read_samples([path], damage=damage)] == [0, 1]
    assert re.fullmatch(
        r"2 lines are no sample and left out; the first: samples\.jsonl, line 2 \(.*prompt_id.*\)", damage.words() or ""
    )
    told = printed(path, Choice())
    assert "2 samples of 2 prompts" in told
    assert "! 2 lines are no sample and left out" in told
    assert Damage().words() is None
    path.write_bytes(b'{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"no sample at all yet\.\n1 line is no sample and left out"):
        samples(path, Choice())


def test_a_place_without_samples_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        sample_files(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no samples\.jsonl"):
        sample_files(tmp_path / "empty")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(), ["a", "b", "c"]),
        (Wanted(step=1), ["b", "c"]),
        (Wanted(prompt="data/2"), ["c"]),
        (Wanted(text="APPLE"), ["a", "b"]),
        (Wanted(evaluation="held"), ["d"]),
        (Wanted(step=0, text="pear"), []),
    ],
)
def test_filters(wanted: Wanted, found: list[str]) -> None:
    every = [
        recorded("data/0", engine="a", completion="an apple"),
        recorded("data/1", engine="b", step=1, prompt="Apple?"),
        recorded("data/2", engine="c", step=1, completion="pear"),
        recorded("held/0", engine="d", step=1, eval="held"),
    ]
    assert [sample.engine for sample in every if sample in wanted] == found


def test_orders_take_the_newest_of_equal_ones_and_no_number_is_worst() -> None:
    every = [
        recorded(engine=name, reward=reward, completion_tokens=tokens)
        for name, reward, tokens in [("a", 1.0, 5), ("b", 0.0, 9), ("c", 1.0, 5), ("d", None, 1)]
    ]
    assert [sample.engine for sample in first_of(every, 2, worst)] == ["d", "b"]
    assert [sample.engine for sample in first_of(every, 2, best)] == ["c", "a"]
    assert [sample.engine for sample in first_of(every, 1, longest)] == ["b"]
    assert [sample.engine for sample in first_of(every, 2, None)] == ["c", "d"]


def test_choosing_holds_no_more_samples_than_it_keeps() -> None:
    def many() -> Iterator[RecordedSample]:
        for number in range(2000):
            yield recorded(reward=float(number % 97), completion=f"{number:05}" * 4000)

    tracemalloc.start()
    try:
        assert len(first_of(many(), 3, worst)) == 3
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # all of them are 40 MB


def printed(target: Path, choice: Choice) -> str:
    stream = io.StringIO()
    samples(target, choice, out=Console(file=stream, soft_wrap=True, markup=False, emoji=False, highlight=False))
    return stream.getvalue()


def test_what_a_model_wrote_cannot_steer_the_terminal_nor_pass_for_our_lines(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\r\u202e── data/9 #9 · reward 1\n── data/8 #0 · step 0\n[bold]x[/bold] :smile:"
    path = write_samples(tmp_path / "s.jsonl", [recorded(completion=evil, prompt=evil, errors=(f"f: {evil}",))])
    said = printed(path, Choice())
    assert not any(c < " " for c in said.replace("\n", ""))
    assert "\u202e" not in said
    assert "[bold]x[/bold] :smile:" in said
    assert [line for line in said.splitlines() if line.startswith("──")] == ["── data/0 #0 · step 0 · reward 0"]


def test_groups_are_whole_and_in_the_order_of_the_choice(tmp_path: Path) -> None:
    every = [recorded(f"data/{p}", n, reward=float(p * 10 + n)) for p in range(3) for n in range(2)]
    path = write_samples(tmp_path / "s.jsonl", every)
    said = printed(path, Choice(order=best, count=1, groups=True))
    heads = [line for line in said.splitlines() if line.startswith("──")]
    assert heads == ["── data/2 #0 · step 0 · reward 20", "── data/2 #1 · step 0 · reward 21"]
    assert said.splitlines()[-1] == "2 samples of 1 prompt"


def test_long_texts_are_shown_with_their_ends_unless_all_is_asked_for(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "s.jsonl", [recorded(completion="a" * 3000 + "b" * 3000)])
    said = printed(path, Choice())
    assert "… 4,000 characters not shown …" in said
    assert "b" * 1000 + "\n" in said
    assert "a" * 3000 + "b" * 3000 in printed(path, Choice(full=True))


def test_nothing_found_says_what_there_is(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "s.jsonl", [recorded(step=2), recorded(step=5), recorded(eval="held", step=4)])
    with pytest.raises(ConfigError, match=r"no training samples with step 3; it has training steps 2 to 5, eval held"):
        samples(path, Choice(Wanted(step=3)))
    with pytest.raises(ConfigError, match=r"-n 0: must be at least 1"):
        samples(path, Choice(count=0))
