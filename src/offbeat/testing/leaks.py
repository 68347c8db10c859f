"""Shows that a block of code left nothing behind: processes, listening sockets, runtime folders, file descriptors.

    with no_leaks():
        asyncio.run(main())

As a pytest fixture, in a conftest:

    @pytest.fixture(name="no_leaks")
    def _no_leaks():
        with no_leaks():
            yield

Needs psutil (in the extra `dev`), imported only when used.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from offbeat.rpc.runtime import own_folders

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class _Held:
    """What this process holds now, each with a text that tells people what it is."""

    children: dict[int, str]
    listening: dict[str, str]
    folders: dict[Path, str]
    descriptors: dict[int, str]


@contextmanager
def no_leaks(timeout_s: float = 5.0, *, adopt: bool = False) -> Generator[None]:
    """Fails with a list of what is still there `timeout_s` seconds after the block and was not there before it.

    The error of the block itself goes first.

    Args:
        timeout_s: what ends within it is no leak.
        adopt: during the block, descendants whose parent ends become children of this process (Linux "subreaper"),
            so that orphans are seen, e.g. those of a controller that the block kills. Ended children that nobody
            waited for are then reaped here and not reported.

    Raises:
        AssertionError: something leaked.
    """
    _warm_up()
    before = _look()
    if adopt:
        _subreaper(True)
    try:
        yield
        deadline = time.monotonic() + timeout_s
        while leaks := _difference(before, _look(reap=adopt)):
            if time.monotonic() > deadline:
                raise AssertionError("left behind:\n" + "\n".join(f"- {leak}" for leak in leaks))
            gc.collect()
            time.sleep(0.02)
    finally:
        if adopt:
            _subreaper(False)


def _subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _warm_up() -> None:
    """ZeroMQ's Python layer keeps a thread with sockets of its own from the first zero-copy send on: not a leak."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://warm-up")
        right.connect("inproc://warm-up")
        left.send(bytes(1 << 17), copy=False)
        right.recv()


def _look(reap: bool = False) -> _Held:
    import psutil

    me = psutil.Process()
    children: dict[int, str] = {}
    for child in me.children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ChildProcessError):
            if reap and child.status() == psutil.STATUS_ZOMBIE and os.waitpid(child.pid, os.WNOHANG)[0]:
                continue
            state = child.status()
            # An ended process has no command line, only a name.
            words = child.name() if state == psutil.STATUS_ZOMBIE else " ".join(child.cmdline()[:6])
            children[child.pid] = f"process {child.pid} ({state}): {words}"
    listening: dict[str, str] = {}
    for connection in me.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN:
            key = f"{connection.laddr}"
            listening[key] = f"listening socket {key}"
    folders = {folder: f"runtime folder {folder}" for folder in own_folders()}
    return _Held(children, listening, folders, _descriptors())


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _difference(before: _Held, after: _Held) -> list[str]:
    leaks = [text for pid, text in after.children.items() if pid not in before.children]
    leaks += [text for key, text in after.listening.items() if key not in before.listening]
    leaks += [text for folder, text in after.folders.items() if folder not in before.folders]
    extra = {fd: target for fd, target in after.descriptors.items() if fd not in before.descriptors}
    if len(after.descriptors) > len(before.descriptors):
        leaks += [f"file descriptor {fd}: {target}" for fd, target in extra.items()]
    return leaks
