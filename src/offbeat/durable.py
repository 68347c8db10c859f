"""Files that are whole whatever happens, and on the disk when a call returns, not only handed to the system.

write aside ──▶ fsync ──▶ rename ──▶ fsync of the folder      a reader sees the old file or the new one
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sync_path(path: Path) -> None:
    """The data of a file, or the entries of a folder, are safe on the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Everything below a folder, whoever wrote it, and the folder itself. Raises `OSError`."""
    for path in [*folder.rglob("*"), folder]:
        sync_path(path)


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Generator[BinaryIO]:
    """A file to write into; `path` is that file when the block has ended. An error leaves the old file and no other.

    `shared`: several processes may do so at once; each writes a file of its own aside, and the last one wins. Else
    what a killed process left aside is overwritten by the next. Raises `OSError`.
    """
    aside = path.with_name(f".{path.name}.writing" + (f"-{os.getpid()}" if shared else ""))
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a machine that stops can leave an empty file under the new name
        os.replace(aside, path)
    except BaseException:  # a full disk: the half of a copy would keep it full
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def replace_file(path: Path, chunks: Iterable[bytes], *, shared: bool = False) -> None:
    """`replacing`, with all that the file is to hold."""
    with replacing(path, shared=shared) as file:
        file.writelines(chunks)
