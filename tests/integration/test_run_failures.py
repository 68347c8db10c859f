"""Whatever ends a run: the message names the culprit, nothing is left behind, and what was saved can be continued.

`test_kill_matrix.py` has signals to each process in each phase; here is what else can go wrong.

The commands run in this process where only their workers matter, and in one of their own where signals do.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import Ended, command, start_command, steps_of, write_config, write_project

from offbeat.checkpoint import CheckpointStore
from offbeat.rpc.runtime import own_folders
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

BOUND_S = 30.0
"""From a failure to the end of the command, on a busy machine too."""
AT_ONCE_S = 15.0
"""The same for an end at once; who waits for what hangs would wait for a minute."""


@pytest.fixture(scope="module", name="project")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with no_leaks(timeout_s=10.0, adopt=True):
        yield


def saved_steps(run: Path) -> int:
    """Of the newest checkpoint, every file of which has been checked. 0: there is none."""
    checkpoint, skipped = CheckpointStore(run / "checkpoints").latest()
    assert skipped == []
    return checkpoint.step if checkpoint else 0


def resume(run: Path) -> str:
    """A pattern for the command that continues a run: it may be relative, and `offbeat` as it was called."""
    return rf"\S.* resume (\S*/)?{run.name}"


def assert_soon_over(log: Path) -> None:
    """The last words of the culprit's log are those of the fault: that was not long ago."""
    assert time.time() - log.stat().st_mtime < BOUND_S


def assert_failed(ended: Ended, words: str) -> None:
    """Exit 1, one short error that begins with `words` (a pattern), and no traceback anywhere on the terminal."""
    assert ended.code == 1, ended.told
    assert re.match(f"error: {words}", ended.err), ended.told
    assert "Traceback" not in ended.out + ended.err, ended.told
    assert len(ended.err.splitlines()) < 10, ended.told


# --- a process dies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "culprit", "replicas"),
    [
        ("engine-1/engine.receive=kill@2", "engine-1", 2),
        ("trainer.save=kill@2", "trainer-0", 1),
    ],
)
def test_a_killed_process_ends_the_run_by_its_name(
    project: Path, tmp_path: Path, faults: str, culprit: str, replicas: int
) -> None:
    """B038: while weights move, while it saves."""
    config = write_config(project, rollout={"replicas": replicas})
    run = tmp_path / "run"
    ended = command("train", config, "--run-dir", run, faults=faults)
    assert_soon_over(run / f"logs/{culprit}.log")
    assert_failed(ended, f"{culprit}: killed by SIGKILL")
    place = faults.split("=")[0].split("/")[-1]
    assert f"last lines of its log:\noffbeat: fault injected at {place}: kill\n" in ended.err
    assert re.search(r"^logs .*run/logs$", ended.err, re.M)
    assert saved_steps(run) == 1
    assert re.search(rf"^saved      step 1 of 3; continue with: {resume(run)}$", ended.err, re.M), ended.told


def test_a_hanging_process_is_found_by_its_lack_of_progress(project: Path, tmp_path: Path) -> None:
    """B038: it lives, answers and gets nowhere."""
    config = write_config(project, limits={"stall_s": 1.0})
    ended = command("train", config, "--run-dir", tmp_path / "run", faults="trainer.update=sleep:100@2")
    assert_failed(ended, r"trainer-0\.update: no progress for 1 s")
    assert "see " + str(tmp_path / "run/logs/trainer-0.log") in ended.err
    assert "if it is slow and not stuck, raise limits.stall_s, or lower trainer.micro_batch_tokens." in ended.err
    assert "in update" in (tmp_path / "run/logs/trainer-0.log").read_text()  # where it hung


# --- a process says what is wrong -----------------------------------------------------------------------------------


def test_an_exception_of_a_process_is_told_in_its_own_words(project: Path, tmp_path: Path) -> None:
    """B038: also while it starts."""
    run = tmp_path / "run"
    ended = command("train", write_config(project), "--run-dir", run, faults="trainer.init=raise")
    assert_failed(ended, "trainer-0 could not start: ")
    log = (run / "logs/controller.log").read_text()
    assert "in trainer-0:\nTraceback (most recent call last):" in log
    assert 'point("trainer.init")' in log


# --- rewards --------------------------------------------------------------------------------------------------------


def test_a_reward_file_that_cannot_be_loaded_ends_the_run_with_its_own_error(project: Path, tmp_path: Path) -> None:
    (project / "needy.py").write_text("import no_such_library\n\ndef fine(completion):\n    return 1.0\n")
    config = write_config(project, data=[{**DATA, "rewards": {"needy.py:fine": 1.0}}])
    ended = command("train", config, "--run-dir", tmp_path / "run")
    assert_failed(ended, "reward functions cannot be loaded: ModuleNotFoundError: No module named 'no_such_library'")
    assert "needy.py" in ended.err


# --- the controller -------------------------------------------------------------------------------------------------

DATA = {"source": "train.jsonl", "format": "text", "max_prompt_tokens": 16}
SLOW = {"OFFBEAT_FAULTS": "trainer.update=sleep:0.5"}
HANG = {"OFFBEAT_FAULTS": "engine.generate=sleep:60@4"}


def test_the_first_ctrl_c_finishes_the_step_and_saves(project: Path, tmp_path: Path) -> None:
    config, run = write_config(project, steps=6, checkpoint={"every_steps": 0}), tmp_path / "run"
    with start_command("train", config, "--run-dir", run, cwd=tmp_path, env=SLOW) as started:
        started.wait_for_line("^step 1 ")
        started.send(signal.SIGINT)
        ended = started.finish()
    assert ended.code == 130, ended.told
    assert ended.err == ""
    assert "! stopping: the step at hand is finished and saved first" in ended.out
    done = saved_steps(run)
    assert done in (2, 3)
    assert f"interrupted after {done} of 6 steps, saved" in ended.out
    assert re.search(rf"^continue   {resume(run)}$", ended.out, re.M), ended.told


def test_ctrl_c_twice_ends_at_once(project: Path, tmp_path: Path) -> None:
    config, run = write_config(project), tmp_path / "run"
    with start_command("train", config, "--run-dir", run, cwd=tmp_path, env=HANG) as started:
        started.wait_for_line("^step 1 ")
        while not (run / "checkpoints/step-2").exists():  # from here on it waits for an engine that hangs
            time.sleep(0.02)
        started.send(signal.SIGINT)
        started.wait_for_line("^! stopping")
        told = time.monotonic()
        started.send(signal.SIGINT)
        ended = started.finish()
    assert time.monotonic() - told < AT_ONCE_S
    assert ended.code == 130, ended.told
    assert ended.err == ""
    pattern = rf"^! ended at once; saved: step 2 of 3; continue with: {resume(run)}$"
    assert re.search(pattern, ended.out, re.M), ended.told
    assert saved_steps(run) == 2


def test_ctrl_c_while_processes_start_ends_at_once(project: Path, tmp_path: Path) -> None:
    with start_command("train", write_config(project), "--run-dir", tmp_path / "run", cwd=tmp_path) as started:
        started.wait_for_line("starting processes")
        told = time.monotonic()
        started.send(signal.SIGINT)
        ended = started.finish()
        assert own_folders(started.process.pid) == []
    assert time.monotonic() - told < AT_ONCE_S
    assert ended.code == 130, ended.told
    assert "! ended at once; saved: nothing" in ended.out
    assert ended.err == ""


def test_sigterm_ends_an_evaluation_and_its_folder_is_gone(project: Path, tmp_path: Path) -> None:
    config = write_config(project, eval=[{"source": "train.jsonl"}])
    (tmp_path / "tmp").mkdir()
    with start_command("eval", config, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}) as started:
        started.wait_for_line("starting processes")
        started.send(signal.SIGTERM)
        ended = started.finish()
    assert ended.code == 130, ended.told
    assert ended.err == ""
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_failed_evaluation_says_where_its_logs_are(project: Path, tmp_path: Path) -> None:
    config = write_config(project, eval=[{"source": "train.jsonl"}])
    ended = command("eval", config, faults="engine.generate=raise@2")
    assert_failed(ended, "engine-0 failed in generate: ")
    logs = Path(ended.err.split("logs       ")[1].strip())
    assert "in engine-0:\nTraceback" in (logs / "controller.log").read_text()
    shutil.rmtree(logs.parent)


def test_ctrl_c_before_the_first_step_keeps_the_warm_up(project: Path, tmp_path: Path) -> None:
    warmup = {"source": "train.jsonl", "format": "text", "steps": 2, "samples_per_step": 4}
    config, run = write_config(project, warmup=warmup), tmp_path / "run"
    with start_command(
        "train", config, "--run-dir", run, cwd=tmp_path, env={"OFFBEAT_FAULTS": "engine.receive=sleep:1@1"}
    ) as started:
        started.wait_for_line("first weight sync")
        started.send(signal.SIGINT)
        ended = started.finish()
    assert ended.code == 130, ended.told
    assert "interrupted after 0 of 3 steps, saved" in ended.out
    resumed = command("resume", run)
    assert resumed.code == 0, resumed.told
    assert not re.search(r"^start +warm-up", resumed.out, re.M)
    assert steps_of(run) == [0, 1, 2]
