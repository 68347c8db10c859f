"""Checkpoints that are whole or not there.

    checkpoints/superseded-…-step-9/ of a line that was given up for an earlier checkpoint; never read
    checkpoints/.writing-step-12/    being written: never read, removed by the next save
    checkpoints/.removing-step-3/    being removed: the same
    checkpoints/step-12/             complete: it has `complete.json`, written last, before the rename
        trainer-0/…                  the rank's own files
        state.json                   what the controller needs: step, version, data position
        complete.json                every file with its size and digest

The controller alone completes and prunes; trainer ranks only write into the folder they are given. Saving happens at
the end of a step, when nothing of that step is in flight. Older checkpoints are removed only after a newer one is
complete, and only folders that carry our completion record; which of them stay is the pure function `retained`. So
there must be room for one more than are kept, and a save that cannot fit is refused before anything is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offbeat.durable import sync_path, sync_tree
from offbeat.errors import ConfigError, RunError
from offbeat.faults import point
from offbeat.metrics.best import best
from offbeat.metrics.figures import size
from offbeat.weights.parity import Baseline

FORMAT = "offbeat-checkpoint/1"
_NAME = re.compile(r"^step-(\d+)$")


class FileRecord(msgspec.Struct, frozen=True):
    bytes: int
    digest: str


class Completion(msgspec.Struct, frozen=True):
    format: str
    files: dict[str, FileRecord]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's part."""

    next_step: int
    """First step not yet trained: also the position in the data, which is a function of (seed, step)."""
    weights_version: int
    seed: int
    data: str
    """Fingerprint of the prompts: resuming with other data would silently train other rows."""
    elapsed_s: float
    """Seconds of training so far, earlier parts of the run included."""
    journal: int | None = None
    """Bytes of the journal when it was made; None: of a run that kept none."""
    inputs: dict[str, str] = {}
    """Name → digest of what may change: files of reward functions, held-out rows. Empty: of a run that kept none."""
    parity: Baseline | None = None
    """What parity probes are held against; None: of a run that kept none."""


def changed_inputs(state: State, now: Mapping[str, str]) -> list[str]:
    """Names of those that are there still, with another content."""
    return [name for name, digest in state.inputs.items() if now.get(name, digest) != digest]


class Checkpoint(msgspec.Struct, frozen=True):
    folder: Path
    state: State

    @property
    def step(self) -> int:
        return self.state.next_step


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a newer one is complete."""

    last: int = 1
    """The newest so many."""
    every: int = 0
    """Those of a step that is a multiple of this; 0: none for that reason."""


def retained(steps: Collection[int], retention: Retention, scores: Mapping[int, float]) -> set[int]:
    """The steps of the checkpoints that stay: the last ones, every n-th, and the one with the highest score.

    `scores` has the evaluated steps only. Of equal scores the earlier one wins, so that a plateau copies nothing.
    """
    ordered = sorted(steps)
    kept = set(ordered[-retention.last :])
    kept |= {step for step in ordered if retention.every and step % retention.every == 0}
    winner = best({step: scores[step] for step in ordered if step in scores})
    return kept if winner is None else kept | {winner}


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, free_bytes: Callable[[Path], int] | None = None) -> None:
        """`free_bytes` says how much room is left where a folder is; default: what the file system says."""
        self._folder = folder
        self._free_bytes = free_bytes or _free_bytes

    @property
    def folder(self) -> Path:
        return self._folder

    def begin(self, step: int) -> Path:
        """An empty folder to write into. What an earlier, unfinished save left is removed.

        Raises `RunError` when the disk has less room than the newest checkpoint takes.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in [*self._folder.glob(".writing-step-*"), *self._folder.glob(".removing-step-*")]:
            shutil.rmtree(leftover)
        self._require_room(step)
        folder = self._folder / f".writing-step-{step}"
        folder.mkdir()
        return folder

    def commit(self, writing: Path, state: State) -> Checkpoint:
        """Make it visible: record every file, flush to disk, rename."""
        final = self._folder / f"step-{state.next_step}"
        with contextlib.suppress(RunError):
            saved = open_checkpoint(final)  # saved already: a state is a function of its step
            shutil.rmtree(writing)
            return saved
        (writing / "state.json").write_bytes(msgspec.json.encode(state))
        point("controller.save")
        files = {str(p.relative_to(writing)): _record(p) for p in sorted(writing.rglob("*")) if p.is_file()}
        (writing / "complete.json").write_bytes(msgspec.json.encode(Completion(FORMAT, files)))
        sync_tree(writing)
        point("controller.before_rename")
        if final.exists():
            shutil.rmtree(final)  # not complete, or the check above would have found it
        writing.rename(final)
        sync_path(self._folder)
        return Checkpoint(final, state)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and one sentence for each newer one that was skipped."""
        skipped: list[str] = []
        for folder in self._newest_first():
            try:
                return open_checkpoint(folder), skipped
            except RunError as error:
                skipped.append(f"skipped {folder.name}: {error}")
        return None, skipped

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises `ConfigError` when it is not there or not whole, with those there are."""
        path = self._folder / f"step-{step}"
        there = ", ".join(map(str, self.steps())) or "none"
        try:
            return open_checkpoint(path)
        except RunError as error:
            what = f"cannot be used: {error}" if path.exists() else f"is not in {self._folder}"
            raise ConfigError(f"the checkpoint of step {step} {what}; saved are {there}.") from error

    def newest_step(self) -> int | None:
        """Of the newest checkpoint that has a completion record; its files are not read."""
        return next((_step(path) for path in self._newest_first() if _has_record(path)), None)

    def steps(self) -> list[int]:
        """Of all checkpoints that have a completion record, in order; their files are not read."""
        return sorted(_step(path) for path in self._newest_first() if _has_record(path))

    def folders(self) -> list[Path]:
        """`step-<n>` folders, oldest first, whole or not."""
        return self._newest_first()[::-1]

    def set_aside(self, after: int) -> list[Path]:
        """Renames the folders of later steps to `superseded-<time>-step-<n>`: another line goes on from `after`.

        The newest comes first: cut short in between, the newest that is left is still of one line with all before it.
        """
        mark = time.strftime("superseded-%Y%m%d-%H%M%S")
        later = [folder for folder in self._newest_first() if _step(folder) > after]
        aside = [folder.rename(folder.with_name(f"{mark}-{folder.name}")) for folder in later]
        if aside:
            sync_path(self._folder)
        return aside

    def _require_room(self, step: int) -> None:
        newest = self.newest_step()
        if newest is None:
            return
        with contextlib.suppress(OSError):  # if it cannot be told, the save itself will tell
            files = [path.stat().st_size for path in (self._folder / f"step-{newest}").rglob("*") if path.is_file()]
            needed, free = sum(files), self._free_bytes(self._folder)
            if free < needed:
                raise RunError(
                    f"checkpoint of step {step} needs about {size(needed)}, as step-{newest} does, and {size(free)} "
                    f"are free in {self._folder}; make room, or lower checkpoint.keep_last."
                )

    def _newest_first(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        named = [(int(m[1]), p) for p in self._folder.iterdir() if (m := _NAME.match(p.name)) and p.is_dir()]
        return [folder for _, folder in sorted(named, reverse=True)]

    def prune(self, retention: Retention, scores: Mapping[int, float]) -> None:
        """Removes what is not `retained`. Call it after a commit: folders without our record are never touched."""
        ours = {_step(path): path for path in self._newest_first() if not path.is_symlink() and _has_record(path)}
        for step in ours.keys() - retained(ours.keys(), retention, scores):
            # By another name first: a removal that is cut short leaves no part of it for good, and none to be read.
            removing = self._folder / f".removing-step-{step}"
            shutil.rmtree(removing, ignore_errors=True)
            shutil.rmtree(ours[step].rename(removing))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _has_record(path: Path) -> bool:
    return (path / "complete.json").is_file()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every file against the completion record. Raises `RunError` that says what is wrong."""
    try:
        return _open_checkpoint(folder)
    except OSError as error:  # a bad disk, or a folder that is removed at this moment
        raise RunError(f"it cannot be read ({error})") from error


def _open_checkpoint(folder: Path) -> Checkpoint:
    try:
        completion = msgspec.json.decode((folder / "complete.json").read_bytes(), type=Completion)
    except FileNotFoundError:
        raise RunError("it has no completion record (the save was cut short)") from None
    except msgspec.DecodeError as error:
        raise RunError(f"its completion record cannot be read ({error})") from error
    if completion.format != FORMAT:
        raise RunError(f"its format is {completion.format!r}; this version reads {FORMAT!r}")
    for name, wanted in completion.files.items():
        path = folder / name
        if not path.is_file():
            raise RunError(f"{name} is missing")
        found = _record(path)
        if found.bytes != wanted.bytes:
            raise RunError(f"{name} has {found.bytes} bytes instead of {wanted.bytes}")
        if found.digest != wanted.digest:
            raise RunError(f"{name} is corrupted (its digest differs)")
    try:
        return Checkpoint(folder, msgspec.json.decode((folder / "state.json").read_bytes(), type=State))
    except msgspec.DecodeError as error:  # as it was saved, by another version or by hand
        raise RunError(f"state.json is not one of this version ({error})") from error


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _record(path: Path) -> FileRecord:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return FileRecord(path.stat().st_size, digest.hexdigest())
