"""The leak check itself: it must find what it is for, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from offbeat.rpc.runtime import create_runtime_folder
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_clean_code_passes() -> None:
    with no_leaks(0.5):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True, timeout=30)
        with socket.create_server(("127.0.0.1", 0)), tempfile.TemporaryFile():
            pass


def test_a_child_process_is_found() -> None:
    child = None
    try:
        with pytest.raises(AssertionError, match=r"process \d+ \(\w+\): .*time.sleep"), no_leaks(0.3):
            child = subprocess.Popen(SLEEP)
    finally:
        assert child is not None
        child.kill()
        child.wait()


def test_an_ended_child_that_nobody_waited_for_is_found() -> None:
    pids: list[int] = []
    with pytest.raises(AssertionError, match=r"process \d+ \(zombie\)"), no_leaks(0.5):
        pids.append(os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], {}))
    os.waitpid(pids[0], 0)


def test_an_orphaned_grandchild_is_found_when_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import subprocess\np = subprocess.Popen({SLEEP!r}, start_new_session=True)\n"
    code += f"open({str(file)!r}, 'w').write(str(p.pid))"
    try:
        with pytest.raises(AssertionError, match=r"time\.sleep"), no_leaks(0.3, adopt=True):
            subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=30)
    finally:
        os.kill(int(file.read_text()), 9)
        os.waitpid(int(file.read_text()), 0)


def test_a_listening_socket_and_a_file_descriptor_are_found() -> None:
    opened: list[socket.socket] = []
    with pytest.raises(AssertionError, match=r"listening socket .*127\.0\.0\.1"), no_leaks(0.3):
        opened.append(socket.create_server(("127.0.0.1", 0)))
    opened[0].close()
    descriptors: list[int] = []
    with pytest.raises(AssertionError, match=r"file descriptor \d+: /dev/null"), no_leaks(0.3):
        descriptors.append(os.open(os.devnull, os.O_RDONLY))
    os.close(descriptors[0])


def test_a_runtime_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(AssertionError, match="runtime folder"), no_leaks(0.3):
        create_runtime_folder()


def test_an_error_of_the_block_goes_first() -> None:
    descriptors: list[int] = []

    def block() -> None:
        with no_leaks(0.3):
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()
    os.close(descriptors[0])
