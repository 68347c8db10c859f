"""Checkpoints that are whole or not there.

    checkpoints/.writing-step-12/    being written: never read, removed by the next save
    checkpoints/step-12/             complete: it has `complete.json`, written last, before the rename
        trainer-0/…                  the rank's own files
        state.json                   what the controller needs: step, version, data position
        complete.json                every file with its size and digest

The controller alone completes and prunes; trainer ranks only write into the folder they are given. Saving happens at
the end of a step, when nothing of that step is in flight. Older checkpoints are removed only after a newer one is
complete, and only folders that carry our completion record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from offbeat.errors import RunError
from offbeat.faults import point

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


class Checkpoint(msgspec.Struct, frozen=True):
    folder: Path
    state: State

    @property
    def step(self) -> int:
        return self.state.next_step


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self._folder = folder
        self._keep_last = keep_last

    def begin(self, step: int) -> Path:
        """An empty folder to write into. What an earlier, unfinished save left is removed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".writing-step-*"):
            shutil.rmtree(leftover)
        folder = self._folder / f".writing-step-{step}"
        folder.mkdir()
        return folder

    def commit(self, writing: Path, state: State) -> Checkpoint:
        """Make it visible: record every file, flush to disk, rename; then prune older ones."""
        final = self._folder / f"step-{state.next_step}"
        with contextlib.suppress(RunError):
            saved = open_checkpoint(final)  # saved already: a state is a function of its step
            shutil.rmtree(writing)
            return saved
        _write(writing / "state.json", msgspec.json.encode(state))
        point("controller.save")
        files = {str(p.relative_to(writing)): _record(p) for p in sorted(writing.rglob("*")) if p.is_file()}
        _write(writing / "complete.json", msgspec.json.encode(Completion(FORMAT, files)))
        _sync_folders(writing)
        point("controller.before_rename")
        if final.exists():
            shutil.rmtree(final)  # not complete, or the check above would have found it
        writing.rename(final)
        _sync_path(self._folder)
        self._prune(keep=final)
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

    def newest_step(self) -> int | None:
        """Of the newest checkpoint that has a completion record; its files are not read."""
        return next((int(p.name[5:]) for p in self._newest_first() if (p / "complete.json").is_file()), None)

    def _newest_first(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        named = [(int(m[1]), p) for p in self._folder.iterdir() if (m := _NAME.match(p.name)) and p.is_dir()]
        return [folder for _, folder in sorted(named, reverse=True)]

    def _prune(self, keep: Path) -> None:
        ours = [
            folder
            for folder in self._newest_first()
            if not folder.is_symlink() and (folder / "complete.json").is_file()
        ]
        for folder in ours[self._keep_last :]:
            if folder != keep:
                # The record goes first: a removal that is cut short leaves no folder that looks complete.
                (folder / "complete.json").unlink()
                shutil.rmtree(folder)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check every file against the completion record. Raises `RunError` that says what is wrong."""
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
    return Checkpoint(folder, msgspec.json.decode((folder / "state.json").read_bytes(), type=State))


def _record(path: Path) -> FileRecord:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folders(top: Path) -> None:
    """Flush what others wrote: every file's data, then every folder's entries."""
    for path in [*top.rglob("*"), top]:
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
