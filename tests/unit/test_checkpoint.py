"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from offbeat import checkpoint as module
from offbeat.checkpoint import Checkpoint, CheckpointStore, Retention, State, changed_inputs, open_checkpoint, retained
from offbeat.config import CheckpointSection
from offbeat.errors import RunError
from offbeat.metrics import figures


def state(step: int) -> State:
    return State(next_step=step, weights_version=step, seed=0, data="d", elapsed_s=1.0)


def save(store: CheckpointStore, step: int, text: str = "weights", *, keep_last: int = 99) -> Checkpoint:
    writing = store.begin(step)
    (writing / "trainer-0").mkdir()
    (writing / "trainer-0" / "model.bin").write_text(f"{text} {step}")
    checkpoint = store.commit(writing, state(step))
    store.prune(Retention(keep_last), {})
    return checkpoint


def test_the_newest_complete_checkpoint_is_found_and_older_ones_are_pruned_after_it_B047(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 10):
        save(store, step, keep_last=2)
    found, skipped = store.latest()
    assert found is not None
    assert (found.step, skipped) == (10, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2"]
    assert (found.folder / "trainer-0" / "model.bin").read_text() == "weights 10"


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint_and_the_next_save_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    remove = shutil.rmtree

    def cut_short(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (path / "complete.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            save(store, 2, keep_last=1)
    assert remove is shutil.rmtree
    assert sorted(path.name for path in tmp_path.iterdir()) == [".removing-step-1", "step-2"]
    found, skipped = store.latest()
    assert (found and found.step, skipped) == (2, [])
    save(store, 3, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_foreign_folders_and_files_are_left_alone_B047(tmp_path: Path) -> None:
    (tmp_path / "step_10_backup").mkdir()
    (tmp_path / "step-9").mkdir()  # ours by name, but without our record
    (tmp_path / "step-8").symlink_to(tmp_path / "step_10_backup")
    (tmp_path / "notes.txt").write_text("mine")
    store = CheckpointStore(tmp_path)
    for step in (11, 12):
        save(store, step, keep_last=1)
    assert {p.name for p in tmp_path.iterdir()} == {"step_10_backup", "step-9", "step-8", "notes.txt", "step-12"}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "complete.json").unlink(), "no completion record"),
        (lambda f: (f / "complete.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "trainer-0" / "model.bin").unlink(), "is missing"),
        (lambda f: (f / "trainer-0" / "model.bin").write_text("short"), "bytes instead of"),
        (lambda f: (f / "trainer-0" / "model.bin").write_text("wEights 2"), "corrupted"),
        (lambda f: (f / "state.json").write_text("{}"), "state.json"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_one_before_is_used_B016(
    tmp_path: Path, damage: object, says: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    broken = save(store, 2).folder
    assert callable(damage)
    damage(broken)
    found, skipped = store.latest()
    assert found is not None
    assert found.step == 1
    assert len(skipped) == 1
    assert "step-2" in skipped[0]
    assert says in skipped[0]


@pytest.mark.parametrize("fault", ["controller.save", "controller.before_rename"])
def test_a_kill_while_saving_leaves_the_checkpoint_before_B016(tmp_path: Path, fault: str) -> None:
    """A process of its own saves step 1 and is killed while it completes step 2."""
    program = (
        "import sys; from pathlib import Path; from offbeat.checkpoint import CheckpointStore, State\n"
        "store = CheckpointStore(Path(sys.argv[1]))\n"
        "for step in (1, 2):\n"
        "    w = store.begin(step); (w / 'model.bin').write_text(f'weights {step}')\n"
        "    store.commit(w, State(next_step=step, weights_version=step, seed=0, data='d', elapsed_s=0.0))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "OFFBEAT_FAULTS": f"{fault}=kill@2"},
        check=False,
    )
    assert result.returncode == -9
    store = CheckpointStore(tmp_path)
    found, skipped = store.latest()
    assert found is not None
    assert (found.step, skipped) == (1, [])
    save(store, 2)
    found, _ = store.latest()
    assert found is not None
    assert found.step == 2
    assert not list(tmp_path.glob(".writing*"))


KILLED_ANYWHERE = """
import os, signal, sys
from pathlib import Path
from offbeat.checkpoint import CheckpointStore, Retention, State

top, keep = Path(sys.argv[1]), int(sys.argv[2])

def save(store, step):
    writing = store.begin(step)
    (writing / "trainer-0").mkdir()
    for name in ("model", "moments"):
        (writing / "trainer-0" / name).write_text(f"{name} of step {step}")
    store.commit(writing, State(next_step=step, weights_version=step, seed=0, data="d", elapsed_s=0.0))
    store.prune(Retention(keep), {})

def in_child(folder, kill_at):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    reached = 0
    def hook(event, arguments):
        nonlocal reached
        if event.startswith(("open", "os.", "shutil.")) and any(str(folder) in str(one) for one in arguments):
            reached += 1
            if reached == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(CheckpointStore(folder), 3)
    os._exit(0)

kill_at, code = 0, -9
while code == -9:
    kill_at += 1
    folder = top / str(kill_at)
    for step in (1, 2):
        save(CheckpointStore(folder), step)
    code = in_child(folder, kill_at)
print(kill_at, code)
"""


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_file_operation_of_a_save_leaves_the_state_before_or_after_it(
    memory_path: Path, keep: int
) -> None:
    """B016, B047: killed at the first, second, … call that opens, renames or removes something, until none is left."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_ANYWHERE, str(memory_path), str(keep)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kills, code = map(int, done.stdout.split())
    assert code == 0
    assert kills > 20
    found_steps: list[int] = []
    for number in range(1, kills + 1):
        store = CheckpointStore(memory_path / str(number))
        found, skipped = store.latest()
        assert found is not None, f"killed at operation {number}"
        assert skipped == []
        for record in (memory_path / str(number)).glob("step-*/complete.json"):
            open_checkpoint(record.parent)  # what looks complete is
        step = found.state.next_step
        found_steps.append(step)
        for name in ("model", "moments"):
            assert (found.folder / "trainer-0" / name).read_text() == f"{name} of step {step}"
        save(store, 4)
        assert not list((memory_path / str(number)).glob(".writing*"))
    assert found_steps == sorted(found_steps), "once it is there it stays"
    assert set(found_steps) == {2, 3}


def test_a_save_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """B102: with what it needs, what is there and what to do; the checkpoints before stay."""
    save(CheckpointStore(tmp_path), 1)
    needed = sum(path.stat().st_size for path in (tmp_path / "step-1").rglob("*") if path.is_file())
    needs = rf"step 2 needs about {re.escape(figures.size(needed))}, as step-1 does, and 99 bytes are free.*keep_last"
    with pytest.raises(RunError, match=needs):
        CheckpointStore(tmp_path, free_bytes=lambda _: 99).begin(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    save(CheckpointStore(tmp_path, free_bytes=lambda _: needed), 2)


def test_what_has_changed_is_told_by_digests_and_a_run_that_kept_none_has_changed_in_nothing() -> None:
    kept = msgspec.structs.replace(state(1), inputs={"a.py": "1", "b.py": "2", "gone.py": "3"})
    assert changed_inputs(kept, {"a.py": "1", "b.py": "x", "new.py": "4"}) == ["b.py"]
    older = msgspec.json.decode(msgspec.json.encode(state(1)).replace(b',"inputs":{}', b""), type=State)
    assert b"inputs" not in msgspec.json.encode(state(1)).replace(b',"inputs":{}', b"")
    assert changed_inputs(older, {"a.py": "1"}) == []


def test_few_checkpoints_are_kept_unless_more_are_asked_for(memory_path: Path) -> None:
    """B102, B047: a night of saves does not fill the disk, and keeping none is refused."""
    store = CheckpointStore(memory_path)
    for step in range(1, 31):
        save(store, step, keep_last=CheckpointSection().keep_last)
        assert len(list(memory_path.iterdir())) <= 2
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        CheckpointSection(keep_last=0)


def test_a_full_disk_leaves_the_checkpoint_before_B047(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save(store, 2)
    found, _ = store.latest()
    assert found is not None
    assert found.step == 1


def test_saving_the_same_step_again_keeps_what_is_there_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = save(store, 3)
    again = save(store, 3, text="other")
    assert again.folder == first.folder
    assert (open_checkpoint(again.folder).folder / "trainer-0" / "model.bin").read_text() == "weights 3"
    assert not list(tmp_path.glob(".writing*"))


def test_a_checkpoint_whose_state_is_of_another_shape_is_skipped_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    writing = store.begin(2)
    (writing / "trainer-0").mkdir()
    folder = store.commit(writing, state(2)).folder
    (folder / "state.json").write_bytes(b'{"next_step":2}')
    completion = msgspec.json.decode((folder / "complete.json").read_bytes())
    completion["files"]["state.json"] = msgspec.to_builtins(module._record(folder / "state.json"))  # pyright: ignore[reportPrivateUsage]  # as that other version would have written it
    (folder / "complete.json").write_bytes(msgspec.json.encode(completion))
    found, skipped = store.latest()
    assert found is not None
    assert found.step == 1
    (words,) = skipped
    assert "step-2" in words
    assert "state.json is not one of this version (Object missing required field" in words


def test_a_checkpoint_of_another_format_is_refused_with_both_names(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 1).folder
    record = (folder / "complete.json").read_text().replace("offbeat-checkpoint/1", "offbeat-checkpoint/9")
    (folder / "complete.json").write_text(record)
    with pytest.raises(RunError, match=r"offbeat-checkpoint/9.*offbeat-checkpoint/1"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("retention", "scores", "kept"),
    [
        (Retention(1), {}, {10}),
        (Retention(2), {}, {8, 10}),
        (Retention(99), {}, {2, 4, 6, 8, 10}),
        (Retention(1, every=4), {}, {4, 8, 10}),
        (Retention(1), {2: 0.1, 6: 0.9, 8: 0.5}, {6, 10}),
        (Retention(1), {4: 0.9, 6: 0.9}, {4, 10}),
        (Retention(1), {5: 2.0, 6: 0.9}, {6, 10}),
        (Retention(2, every=6), {2: 1.0}, {2, 6, 8, 10}),
    ],
)
def test_the_last_ones_every_nth_and_the_best_stay(
    retention: Retention, scores: dict[int, float], kept: set[int]
) -> None:
    assert retained([2, 4, 6, 8, 10], retention, scores) == kept


def test_the_best_checkpoint_outlives_newer_ones_until_a_better_one_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    scores: dict[int, float] = {}
    there: list[list[int]] = []
    for step, score in ((1, 0.2), (2, 0.5), (3, 0.4), (4, 0.3), (5, 0.7), (6, 0.1)):
        save(store, step)
        store.prune(Retention(1), scores)  # the score of a step is known after it was saved
        scores[step] = score
        there.append(store.steps())
    assert there == [[1], [1, 2], [2, 3], [2, 4], [2, 5], [5, 6]]
