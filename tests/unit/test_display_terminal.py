"""The displays on streams that stand for a file, a pipe and a terminal."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_display_text import record, result

from offbeat.metrics.display import Display, PlainDisplay, SilentDisplay, make_display
from offbeat.metrics.live import LiveDisplay
from offbeat.metrics.status import Activity, Header
from offbeat.metrics.summary import Summary

HEADER = Header("sort", (("model", "[tiny] \x1b[31m· 0.44M"), ("batch", "x" * 150)), steps=30)
TERMINAL = {"TERM": "xterm-256color"}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Ascii(io.StringIO):
    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def session(display: Display, tmp_path: Path, steps: int = 30) -> None:
    display.begin(HEADER)
    for done in (0, 50, 100):
        display.phase("warm-up", done, 100, "loss .5")
    display.phase("first weight sync")
    display.evaluation(result(0, 0.2))
    display.phase("generating the first samples")
    display.activity(Activity(tokens=10))
    for step in range(steps):
        display.activity(Activity(tokens=12_345, note="training: update, micro-batch 1 of 2"))
        display.step(record(step, truncated_fraction=1.0, response_length_mean=32_768.0, logprob_gap_max=1e-5))
    display.warn("something [odd]")
    display.evaluation(result(steps, 0.6))
    display.finish(Summary("done", [record()], [result(0, 0.2)], 3.0, tmp_path))
    display.close()
    display.close()


def test_a_plain_display_writes_one_line_a_step_and_no_control_character(tmp_path: Path) -> None:
    stream = io.StringIO()
    session(PlainDisplay(stream), tmp_path)
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    lines = text.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [str(step) for step in range(30)]
    assert steps[3].startswith("step 3  reward .49 · spread 61 % · truncated 100 %")
    assert steps[3].endswith("│ gap 1e-05 │ ETA 4 min")
    assert "start     warm-up 0/100 · loss .5" in lines
    assert "start     warm-up 100/100 · loss .5" in lines
    assert "start     warm-up 50/100 · loss .5" not in lines  # in between, only every ten seconds
    assert "! something [odd]" in lines
    assert sum(line.startswith("! step") for line in lines) == 1


def test_an_evaluation_is_announced_at_the_start_and_later_when_it_takes_long(tmp_path: Path) -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, clock=lambda: now[0])
    display.begin(HEADER)

    def evaluate(seconds: int) -> None:
        display.phase("evaluating gsm8k: 200 prompts, 1 sample each")
        for _ in range(4 * seconds):
            display.activity(Activity(tokens=3))
            now[0] += 0.25
        display.evaluation(result(0, 0.2))

    evaluate(1)
    display.step(record(0))
    evaluate(1)
    display.activity(Activity())
    evaluate(60)
    now[0] += 60
    display.activity(Activity())
    evaluate(60)
    told = [line.split()[0] for line in stream.getvalue().splitlines()[3:]]
    assert told == ["start", "eval", "step", "eval", "now", "eval", "now", "eval"]
    assert "\nnow       evaluating gsm8k: 200 prompts, 1 sample each\neval 0 " in stream.getvalue()


def test_an_evaluation_tells_how_many_samples_are_finished_every_fifteen_seconds() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, clock=lambda: now[0])
    display.begin(HEADER)

    def evaluate(seconds: int) -> list[str]:
        before = len(stream.getvalue().splitlines())
        display.phase("evaluating heldout: 64 prompts, 8 samples each", total=512)
        for second in range(seconds):
            now[0] += 1.0
            display.activity(Activity(tokens=3, samples=10 * second))
        display.evaluation(result(0, 0.2))
        for _ in range(40):  # what the step samples is not the evaluation's
            now[0] += 1.0
            display.activity(Activity(tokens=3, samples=7))
        return stream.getvalue().splitlines()[before:-1]

    text = "evaluating heldout: 64 prompts, 8 samples each"
    assert evaluate(70) == [
        f"start     {text}",
        *(f"start     {text} · {done}/512 samples" for done in (140, 290, 440, 512)),
    ]
    display.step(record(0))
    assert evaluate(20) == [f"now       {text}", f"now       {text} · 140/512 samples"]
    display.phase("evaluating heldout: 64 prompts, 8 samples each", total=512)
    display.step(record(1))
    evaluate(1)
    assert "None" not in stream.getvalue()


def test_the_status_of_a_terminal_has_the_finished_samples_of_an_evaluation() -> None:
    display = LiveDisplay(io.StringIO(), width=100)

    def block() -> str:
        console = Console(file=io.StringIO(), width=100)
        with console.capture() as shown:
            console.print(display.renderable())
        return shown.get()

    display.phase("evaluating heldout: 64 prompts, 8 samples each", total=512)
    display.activity(Activity(tokens=1234, samples=130))
    assert "130/512 samples · generating 1,234 tokens" in block()
    display.evaluation(result(0, 0.2))
    display.step(record(0))
    display.activity(Activity(tokens=1234, samples=130))
    assert "samples" not in block()
    display.phase("evaluating heldout: 64 prompts, 8 samples each", total=512)
    assert "now        evaluating heldout: 64 prompts, 8 samples each · 130/512 samples" not in block()
    display.activity(Activity(tokens=10, samples=20))
    assert "now        evaluating heldout: 64 prompts, 8 samples each · 20/512 samples" in block()


def test_a_long_phase_reports_every_ten_seconds() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, clock=lambda: now[0])
    for done in range(31):
        now[0] = float(done)
        display.phase("warm-up", done, 30)
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["0/30", "10/30", "20/30", "30/30"]


def test_quiet_leaves_evaluations_warnings_and_the_summary(tmp_path: Path) -> None:
    stream = io.StringIO()
    session(PlainDisplay(stream, quiet=True), tmp_path)
    firsts = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert firsts == ["eval", "!", "!", "eval", "done", "reward", "eval", "time", "files", "metrics.jsonl"]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError

    session(PlainDisplay(Closed()), tmp_path)
    gone = io.StringIO()
    gone.close()
    session(PlainDisplay(gone), tmp_path)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_a_live_display_wraps_and_its_block_keeps_its_height(tmp_path: Path, width: int) -> None:
    stream = Terminal()
    display = LiveDisplay(stream, width=width)
    session(display, tmp_path)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = re.split(r"[\r\n]+", text)
    assert max(len(line) for line in lines) <= width
    for step in (0, 3, 29):  # milestones take one line each
        assert [line for line in lines if line.startswith(f"step {step} ") and "reward" in line and "10.0s" in line]


def test_an_evaluation_that_is_too_long_for_the_terminal_is_broken_between_its_parts() -> None:
    stream = Terminal()
    display = LiveDisplay(stream, width=80)
    display.begin(Header("sort", (), steps=80))
    display.evaluation(dataclasses.replace(result(20, 0.5), truncated_fraction=0.02, reward_errors=3))
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.split(r"[\r\n]+", text)[1:3] == [
        "eval 20    gsm8k avg@4 .500 ±.020 · pass@4 .750 ±.020 · version 20 ·",
        "           truncated 2 % · reward errors 3",
    ]


def block(display: LiveDisplay, width: int) -> list[str]:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(display.renderable())
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_block_is_five_lines_once_steps_run_whatever_is_going_on(width: int) -> None:
    display = LiveDisplay(Terminal(), width=width)
    display.begin(HEADER)
    try:
        for step in range(12):
            display.step(record(step, entropy=1.2, grad_norm=0.8, logprob_gap_max=1e-5, reward_mean=0.05 * step))
            for change in (
                Activity(),
                Activity(tokens=10**9, note="x" * 200),
            ):
                display.activity(change)
                lines = block(display, width)
                assert len(lines) == 5
                assert max(len(line) for line in lines) <= width
            display.phase("evaluating gsm8k", 3, 10, "x" * 200)
            assert len(block(display, width)) == 5
    finally:
        display.close()


def test_a_narrower_terminal_that_broke_the_blocks_lines_is_cleaned_of_all_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = [100]
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((size[0], 40)))
    stream = Terminal()
    display = LiveDisplay(stream)
    display.begin(Header("sort", (), steps=80))
    display.step(record(5))
    display.activity(Activity(note="x" * 200))

    def extra_rows() -> int:
        display.renderable()
        return len(re.findall(r"\r\x1b\[2K\x1b\[1A(?!\x1b\[2K)", stream.getvalue()))

    assert extra_rows() == 0
    lengths = [len(line) for line in block(display, 100)]
    size[0] = 45
    assert extra_rows() == sum((length - 1) // 45 for length in lengths if length) > 2
    size[0] = 100
    assert extra_rows() == sum((length - 1) // 45 for length in lengths if length)  # wider: nothing was broken
    display.close()


def test_the_block_shows_what_a_step_needs_to_show() -> None:
    display = LiveDisplay(Terminal(), width=80)
    display.begin(Header("sort", (), steps=80), [record(step, reward_mean=0.1 * step) for step in range(5)])
    display.step(record(5, reward_mean=0.5, logprob_gap_max=2e-3, entropy=1.2))
    display.activity(Activity(tokens=12_345, note="training: update, micro-batch 3 of 8"))
    display.close()
    assert block(display, 80) == [
        "step 5     " + "━" * 40 + " 8 % of 80 · ETA 12 min",
        "           reward .50 ▁▂▄▅▇█ · spread 61 % · truncated 2 % · length 231 · lag 1",
        "           generate 9.1s │ train 7.4s │ sync .2s   slower side: engines",
        "           gap .0020 · parity ok at step 5 · entropy 1.20",
        "now        generating 12,345 tokens · training: update, micro-batch 3 of 8",
    ]


def test_a_live_display_gives_the_terminal_and_the_streams_back() -> None:
    before = (sys.stdout, sys.stderr)
    stream = Terminal()
    display = LiveDisplay(stream)
    display.begin(HEADER)
    display.phase("starting engines")
    display.close()
    assert (sys.stdout, sys.stderr) == before
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is visible again


@pytest.mark.parametrize(
    ("stream", "environ", "kind"),
    [
        (Terminal(), TERMINAL, LiveDisplay),
        (Terminal(), {**TERMINAL, "CI": "false"}, LiveDisplay),
        (io.StringIO(), TERMINAL, PlainDisplay),
        (Terminal(), {**TERMINAL, "CI": "true"}, PlainDisplay),
        (Terminal(), {**TERMINAL, "NO_COLOR": "1"}, PlainDisplay),
        (Terminal(), {"TERM": "dumb"}, PlainDisplay),
        (Terminal(), {}, PlainDisplay),
        (Ascii(), TERMINAL, PlainDisplay),
    ],
    ids=["terminal", "CI=false", "pipe", "CI", "NO_COLOR", "dumb", "no TERM", "ascii"],
)
def test_the_display_follows_the_stream(stream: Any, environ: dict[str, str], kind: type) -> None:
    assert isinstance(make_display(stream=stream, environ=environ), kind)


def test_quiet_is_plain_also_on_a_terminal() -> None:
    assert isinstance(make_display(quiet=True, stream=Terminal(), environ=TERMINAL), PlainDisplay)


def test_a_silent_display_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session(SilentDisplay(), tmp_path)
    assert capsys.readouterr() == ("", "")
