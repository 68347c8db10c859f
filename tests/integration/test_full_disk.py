"""A disk that is really full: a small file system of its own holds the run. Needs the right to mount one."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tiny_run import Ended, command, run_command, start_command, steps_of, write_config, write_project

from offbeat.checkpoint import CheckpointStore

pytestmark = pytest.mark.integration
FULL = r"\[Errno 28\] No space left on device"


@pytest.fixture(scope="module", name="project")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"))


@contextmanager
def small_disk(folder: Path, mib: float) -> Generator[Path]:
    """A file system of so many MiB at `folder`."""
    folder.mkdir()
    made = _mount("-t", "tmpfs", "-o", f"size={int(mib * 1024)}k", "tmpfs", folder)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*words: str | Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 1, "", "there is no command `mount`")


def assert_one_sentence(ended: Ended, words: str) -> None:
    assert ended.code == 1, ended.told
    assert re.match(f"error: {words}", ended.err), ended.told
    assert "Traceback" not in ended.out + ended.err, ended.told
    assert len(ended.err.splitlines()) <= 3, ended.told


def assert_goes_on(run: Path, at: int, *, resumed: bool) -> None:
    """The checkpoint of step `at` is whole; if `resumed`, the run goes on, and nothing is lost or trained twice."""
    found, skipped = CheckpointStore(run / "checkpoints").latest()
    assert skipped == []
    assert found is not None
    assert found.step == at
    if not resumed:
        return
    ended = command("resume", run)
    assert ended.code == 0, ended.told
    assert steps_of(run) == [0, 1, 2]
    audited = command("audit", run)
    assert audited.code == 0, audited.told
    assert "lost 0 · trained twice 0" in audited.out


ENDS = {
    "trainer.update": rf"the run cannot go on: {FULL}: '\S*/run/(journal|samples|metrics)\.jsonl'",
    "trainer.save": "trainer-0 failed in save: .*No space left on device",
}
"""Where the trainer is when the disk fills up → the error."""


@pytest.mark.parametrize("place", ENDS)
def test_a_disk_that_fills_up_leaves_the_last_checkpoint_whole_and_the_run_goes_on_when_there_is_room(
    project: Path, tmp_path: Path, place: str
) -> None:
    """B047, B102: by its own name, and what was half written is gone."""
    log = tmp_path / "faults"
    log.touch()
    env = {"OFFBEAT_FAULTS": f"{place}=sleep:3@2", "OFFBEAT_FAULTS_LOG": str(log)}
    with small_disk(tmp_path / "disk", 2) as disk:
        run = disk / "run"
        with start_command("train", write_config(project), "--run-dir", run, cwd=tmp_path, env=env) as started:
            started.wait_for_line("^step 0 ")
            while not log.read_text():  # the fault point: from here on the trainer takes three seconds
                assert started.process.poll() is None
                time.sleep(0.01)
            fill(disk)
            ended = started.finish()
        assert_one_sentence(ended, ENDS[place])
        assert re.search(r"^saved      step 1 of 3; continue with: ", ended.err, re.M), ended.told
        assert not list(run.glob("checkpoints/.writing*")), "a full disk is not left fuller"
        (disk / "ballast").unlink()
        assert_goes_on(run, at=1, resumed=place == "trainer.update")


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    assert shutil.disk_usage(disk).free == 0


def test_a_disk_that_is_full_at_the_start_is_told_in_one_sentence(project: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        run = disk / "run"
        run.mkdir()
        fill(disk)
        ended = run_command("train", write_config(project), "--run-dir", run, cwd=tmp_path)
        assert_one_sentence(ended, f"the run cannot begin: {FULL}")
