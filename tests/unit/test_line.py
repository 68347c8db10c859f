"""A run that is continued leaves its other line behind: all of it or nothing, wherever it is cut short."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from fake_run import FakeRun

from offbeat import checkpoint, line, training
from offbeat.checkpoint import CheckpointStore
from offbeat.commands.audit import examine
from offbeat.errors import RunError
from offbeat.journal import writer as journal
from offbeat.line import lost_before, open_line
from offbeat.metrics import writer
from offbeat.metrics.display import SilentDisplay
from offbeat.testing.virtual_time import run_in_virtual_time

pytestmark = pytest.mark.slow

STEPS, GO_BACK_TO = 10, 4


def run_of(folder: Path) -> FakeRun:
    return FakeRun(folder, steps=STEPS, max_staleness=1, save_every=2)


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done, with checkpoints of steps 2, 4, …, 10."""
    run = run_of(tmp_path_factory.mktemp("line") / "run")
    run.config = run.config.model_copy(update={"checkpoint": run.config.checkpoint.model_copy(update={"keep_last": 9})})
    run.folder.write_config(run.config.model_dump(mode="json"))
    run_in_virtual_time(run.live())
    assert examine(run.folder).problems == []
    return run.path


def killed_at(line_number: int, work: Callable[[], object]) -> bool:
    """A process runs `work` and is killed at the n-th line of what opens a line of steps. False: it was done before."""
    child = os.fork()
    if child == 0:
        try:
            _work_up_to(line_number, work)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"the process ended with {status}"
    return status != 0


def _work_up_to(line_number: int, work: Callable[[], object]) -> None:
    files = {module.__file__ for module in (line, journal, writer, checkpoint)}
    names = {"open_line", "set_aside", "open_journal", "resumed", "_write", "_keep_before", "_replace", "__init__"}
    reached = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        code = frame.f_code
        if code.co_filename not in files or code.co_name not in names:
            return None
        if event == "line":
            reached += 1
            if reached == line_number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()


def test_killed_anywhere_a_run_that_goes_back_is_sound_and_can_be_continued(trained: Path, memory_path: Path) -> None:
    def go_back(run: FakeRun) -> None:
        back = CheckpointStore(run.folder.checkpoints).at(GO_BACK_TO)
        with open_line(run.folder, back, run.warned.append, max_staleness=1):
            pass

    lines, continued_from = 0, set[int]()
    while True:
        path = memory_path / "run"
        shutil.copytree(trained, path)
        run = run_of(path)
        lines += 1
        if not killed_at(lines, lambda run=run: go_back(run)):
            break
        assert examine(run.folder).problems == [], f"killed at line {lines}"
        if lines % 5 == 0:  # the rest takes long, and what it starts from has just been seen to be sound
            newest, _ = CheckpointStore(run.folder.checkpoints).latest()
            assert newest is not None
            continued_from.add(newest.step)
            run_in_virtual_time(run.live(newest.step if newest.step < STEPS else GO_BACK_TO))
            assert examine(run.folder).problems == [], f"killed at line {lines}, continued at step {newest.step}"
            assert [record["step"] for record in run.metrics()] == list(range(STEPS))
        shutil.rmtree(path)
    assert lines > 40, "or hardly anything was tried"
    assert {GO_BACK_TO, STEPS} <= continued_from


LOST = {
    "metrics.jsonl": (
        "metrics.jsonl lacks 4 of the 4 steps before",
        "metrics.jsonl has steps out of order: no 0, 1, 2, 3",
    ),
    "samples.jsonl": ("samples.jsonl is missing", "samples.jsonl lacks 32 samples that the journal has"),
    "journal.jsonl": ("journal.jsonl has 0 bytes", "what became of earlier samples is not known"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_file_that_was_taken_away_is_told_of_and_the_run_goes_on(trained: Path, memory_path: Path, name: str) -> None:
    shutil.copytree(trained, memory_path / "run")
    run = run_of(memory_path / "run")
    back = CheckpointStore(run.folder.checkpoints).at(GO_BACK_TO)
    assert lost_before(run.folder, back) == []
    (run.path / name).unlink()
    told, found = LOST[name]
    (sentence,) = lost_before(run.folder, back)
    assert sentence.startswith(told)
    run_in_virtual_time(run.live(GO_BACK_TO))
    (problem,) = examine(run.folder).problems
    assert found in problem
    assert [record["step"] for record in run.metrics()][-1] == STEPS - 1


@pytest.mark.parametrize("fails", [RunError("no port is free"), KeyboardInterrupt()], ids=["failed", "interrupted"])
def test_a_start_that_fails_leaves_the_run_as_it_was(
    trained: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch, fails: BaseException
) -> None:
    shutil.copytree(trained, memory_path / "run")
    run = run_of(memory_path / "run")

    @asynccontextmanager
    async def start(*_: object) -> AsyncGenerator[None]:
        await asyncio.sleep(0)
        raise fails
        yield

    def contents() -> dict[str, bytes]:
        files = (p for p in run.path.rglob("*") if p.is_file() and p.name != "trace.json")
        return {str(p.relative_to(run.path)): p.read_bytes() for p in files}

    before = contents()
    prepared: Any = SimpleNamespace(
        config=run.config,
        model_name="fake",
        model=SimpleNamespace(model_type="fake"),
        prompts=SimpleNamespace(sources=(), rows=8, steps_per_epoch={"short_sums": 2.0}),
    )
    monkeypatch.setattr(training, "start", start)
    back = CheckpointStore(run.folder.checkpoints).at(GO_BACK_TO)
    with pytest.raises(type(fails)):
        asyncio.run(training.train_part(prepared, run.folder, SilentDisplay(), back))
    assert contents() == before


def test_the_newest_checkpoint_is_set_aside_first_and_a_linked_one_too(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    for step in (2, 4, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    real.mkdir()
    (tmp_path / "checkpoints" / "step-9").symlink_to(real)
    aside = CheckpointStore(tmp_path / "checkpoints").set_aside(2)
    assert [path.name.split("-step-")[1] for path in aside] == ["10", "9", "4"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-2"]
    assert real.is_dir()
