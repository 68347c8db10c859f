"""Fixtures of more than one file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(name="memory_path")
def _memory_path(tmp_path: Path) -> Iterator[Path]:
    """Like `tmp_path`, in memory where there is such a place: thousands of flushed files take long on a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)
