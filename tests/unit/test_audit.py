"""`offbeat audit` says what holds of a run's files, and everything that does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat import cli
from offbeat.checkpoint import CheckpointStore, State
from offbeat.commands.audit import Audit, examine
from offbeat.config import parse_config
from offbeat.errors import RunError
from offbeat.metrics.writer import RunFolder

STEPS = 3


def write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """Three steps of two samples, one step off-policy, saved at the end."""
    config = parse_config(
        {
            "model": "m",
            "steps": STEPS,
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "data": [{"source": "rows.jsonl", "rewards": {"exact_match": 1.0}}],
        }
    )
    folder = RunFolder.create("run", run_dir=tmp_path / "run")
    folder.write_config(config.model_dump(mode="json"))
    journal: list[dict[str, Any]] = [{"event": "started", "step": 0, "time": 0.0}]
    for step in range(STEPS):
        journal += [
            {"event": "issued", "step": step, "time": 0.0, "samples": [[f"data/{step}", 0, [0, 1]]]},
            {"event": "generated", "step": step, "time": 0.0, "versions": {str(max(0, step - 1)): 2}},
            {"event": "rewarded", "step": step, "time": 0.0, "errors": 0},
            {"event": "trained", "step": step, "time": 0.0, "version": step + 1},
        ]
    write_lines(folder.journal, journal)
    write_lines(folder.metrics, [{"step": step, "reward_mean": 0.5} for step in range(STEPS)])
    samples = [
        {"step": step, "eval": None, "prompt_id": f"data/{step}", "epoch": 0, "sample_index": index}
        for step in range(STEPS)
        for index in range(2)
    ]
    heldout = [{"step": 0, "eval": "heldout", "prompt_id": "heldout/0", "epoch": 0, "sample_index": 0}]
    write_lines(folder.samples, heldout + samples)
    save(folder, STEPS)
    return folder.path


def save(folder: RunFolder, step: int) -> Path:
    store = CheckpointStore(folder.checkpoints)
    writing = store.begin(step)
    (writing / "model.bin").write_text("weights")
    size = folder.journal.stat().st_size
    return store.commit(
        writing, State(next_step=step, weights_version=step, seed=0, data="d", elapsed_s=1.0, journal=size)
    ).folder


def row(found: Audit, label: str) -> str:
    return next(text for name, text in found.rows if name == label)


def test_a_sound_run_is_called_sound(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = examine(RunFolder.open(run))
    assert found.problems == []
    assert row(found, "journal") == "6 samples issued = 6 trained + 0 dropped"
    assert row(found, "samples") == "lost 0 · trained twice 0"
    assert row(found, "staleness") == "0 to 1, max_staleness 1"
    assert row(found, "step-3") == "whole, version 3"
    assert command(run) == 0
    assert "every sample was trained once" in capsys.readouterr().out


def command(run: Path) -> int:
    try:
        cli.app(["audit", str(run)], standalone_mode=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def change(name: str, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        write_lines(run / name, edit(read_lines(run / name)))

    return apply


def shorten_the_journal(run: Path) -> None:
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (run / "journal.jsonl").write_bytes(b"".join(lines[:-1]))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a step missing in the metrics": (
        change("metrics.jsonl", lambda lines: lines[:1] + lines[2:]),
        "metrics.jsonl has steps out of order: no 1",
    ),
    "a step twice in the metrics": (
        change("metrics.jsonl", lambda lines: [*lines, lines[1]]),
        "metrics.jsonl has steps out of order: twice 1",
    ),
    "metrics that end early": (change("metrics.jsonl", lambda lines: lines[:1]), "metrics.jsonl ends at step 0"),
    "a sample twice": (change("samples.jsonl", lambda lines: [*lines, lines[-1]]), "1 samples twice"),
    "a sample of another step": (
        change("samples.jsonl", lambda lines: [*lines[:-1], {**lines[-1], "step": 0}]),
        "1 samples that the journal does not have at their step",
    ),
    "samples missing in the middle": (
        change("samples.jsonl", lambda lines: [one for one in lines if one["step"] != 1]),
        "samples.jsonl lacks 2 samples that the journal has, the first of step 1",
    ),
    "a step trained twice": (change("journal.jsonl", lambda lines: [*lines, lines[-1]]), "where step 3 was due"),
    "a step too stale": (
        change("journal.jsonl", lambda lines: [{**e, "versions": {"0": 2}} if "versions" in e else e for e in lines]),
        "step 2 trained on samples 2 to 2 versions behind; max_staleness is 1",
    ),
    "a journal that lost its end": (shorten_the_journal, "bytes of journal.jsonl, which has only"),
    "no journal any more": (
        lambda run: (run / "journal.jsonl").unlink(),
        "bytes of journal.jsonl, which has only 0",
    ),
    "no metrics any more": (
        lambda run: (run / "metrics.jsonl").unlink(),
        "metrics.jsonl is missing; the journal ends at step 2",
    ),
    "no samples any more": (lambda run: (run / "samples.jsonl").unlink(), "samples.jsonl lacks 4 samples"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_hold_is_said_and_is_the_exit_code(run: Path, name: str) -> None:
    damage, says = DAMAGE[name]
    damage(run)
    problems = examine(RunFolder.open(run)).problems
    assert any(says in problem for problem in problems), problems
    assert command(run) == 1


def test_a_damaged_checkpoint_is_named_and_what_a_resume_does_about_it(run: Path) -> None:
    (run / "checkpoints" / "step-3" / "model.bin").write_text("wEights")
    assert row(examine(RunFolder.open(run)), "step-3") == (
        "unusable: model.bin is corrupted (its digest differs) (nothing can be resumed)"
    )
    save(RunFolder.open(run), 2)
    assert "a resume skips it" in row(examine(RunFolder.open(run)), "step-3")


def test_half_a_line_of_a_killed_process_is_no_problem(run: Path) -> None:
    for name in ("journal.jsonl", "samples.jsonl", "metrics.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"event":"issued","st')
    assert examine(RunFolder.open(run)).problems == []


@pytest.mark.parametrize("half", [b'{"prompt": "\xe5\x8d', b"3", b'{"step": 2, "event": "\xc3'])
def test_half_a_line_may_end_within_a_character(run: Path, half: bytes) -> None:
    for name in ("journal.jsonl", "samples.jsonl", "metrics.jsonl"):
        with (run / name).open("ab") as file:
            file.write(half)
    assert examine(RunFolder.open(run)).problems == []


def test_what_a_run_writes_while_it_is_examined_is_no_problem(run: Path) -> None:
    """The journal is read first: metrics and samples may be steps ahead of it by then."""
    change("metrics.jsonl", lambda lines: [*lines, *({"step": step, "reward_mean": 0.5} for step in (3, 4))])(run)
    new = [
        {"step": step, "eval": None, "prompt_id": f"data/{step}", "epoch": 0, "sample_index": 0} for step in (3, 3, 4)
    ]
    change("samples.jsonl", lambda lines: [*lines, *new])(run)
    assert examine(RunFolder.open(run)).problems == []


def test_a_checkpoint_that_is_removed_while_it_is_read_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one is pruned between the list of folders and the last of its files."""
    save(RunFolder.open(run), 2)
    folder = run / "checkpoints" / "step-2"
    is_file = Path.is_file

    def pruned_after(self: Path, **options: Any) -> bool:
        found = is_file(self, **options)
        if self == folder / "model.bin":
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(Path, "is_file", pruned_after)
    found = examine(RunFolder.open(run))
    assert found.problems == []
    assert [name for name, _ in found.rows if name.startswith("step-")] == ["step-3"]


def test_a_file_that_the_disk_does_not_give_makes_a_checkpoint_unusable_and_an_older_one_is_taken(run: Path) -> None:
    """A loop of links stands for it: reading gives an error that is no missing file."""
    save(RunFolder.open(run), 2)
    record = run / "checkpoints" / "step-3" / "complete.json"
    record.unlink()
    record.symlink_to(record)
    newest, skipped = CheckpointStore(run / "checkpoints").latest()
    assert (newest and newest.step, len(skipped)) == (2, 1)
    assert "step-3: it cannot be read" in skipped[0]
    assert "a resume skips it" in row(examine(RunFolder.open(run)), "step-3")


def test_samples_of_the_last_step_may_be_missing_and_of_older_ones_once_the_file_has_moved(run: Path) -> None:
    change("samples.jsonl", lambda lines: lines[:-1])(run)
    assert examine(RunFolder.open(run)).problems == []
    change("samples.jsonl", lambda lines: lines[3:])(run)
    assert examine(RunFolder.open(run)).problems == [
        "samples.jsonl lacks 2 samples that the journal has, the first of step 0"
    ]
    write_lines(run / "samples.older.jsonl", [])
    assert examine(RunFolder.open(run)).problems == []


def test_samples_in_the_making_are_counted_and_no_problem(run: Path) -> None:
    issued = {"event": "issued", "step": 3, "time": 0.0, "samples": [["data/3", 0, [0, 1]]]}
    change("journal.jsonl", lambda lines: [*lines, issued])(run)
    found = examine(RunFolder.open(run))
    assert (found.problems, row(found, "journal").endswith("+ 2 not ended yet")) == ([], True)
    assert "resume" in row(found, "verdict")
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint is there" in row(examine(RunFolder.open(run)), "verdict"), "no advice that is refused"


def test_a_line_that_is_not_ours_is_named(run: Path) -> None:
    change("journal.jsonl", lambda lines: [lines[0], {"event": "what"}, *lines[1:]])(run)
    with pytest.raises(RunError, match="line 2"):
        examine(RunFolder.open(run))


def test_a_run_without_a_journal_is_examined_as_far_as_it_goes(run: Path) -> None:
    (run / "journal.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    found = examine(RunFolder.open(run))
    assert found.problems == []
    assert "none" in row(found, "journal")
    assert "nothing is proved" in row(found, "verdict")
