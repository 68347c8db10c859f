"""A file that is replaced is the old one or the new one, and what was synced is what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.durable import replace_file, replacing, sync_tree


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shared", [False, True])
def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path, shared=shared) as file:
        file.write(b"new" * 100_000)
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 2
    assert path.read_bytes() == b"new" * 100_000
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, error: BaseException, old: bytes | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise error

    with pytest.raises(type(error)):
        replace_file(path, chunks())
    assert (path.read_bytes() if old is not None else None) == old
    assert names(tmp_path) == ([] if old is None else ["file"])


def test_data_is_synced_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen: list[tuple[int, bytes]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append((os.fstat(descriptor).st_ino, path.read_bytes())))
    replace_file(path, [b"new"])
    assert seen == [(path.stat().st_ino, b"old"), (tmp_path.stat().st_ino, b"new")]


def test_what_a_killed_process_left_aside_is_overwritten_and_two_processes_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        (aside,) = names(tmp_path)
        with replacing(path, shared=True) as other:
            other.write(b"other")
        assert path.read_bytes() == b"other"
        file.write(b"one")
    (tmp_path / aside).write_bytes(b"left by a killed process, and longer")
    replace_file(path, [b"two"])
    assert path.read_bytes() == b"two"
    assert names(tmp_path) == ["file"]


def test_a_tree_is_synced_with_every_file_and_folder_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    seen: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.add(os.fstat(descriptor).st_ino))
    sync_tree(tmp_path)
    assert seen == {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]}
