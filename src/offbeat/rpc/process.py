"""A child process of the hub: how it is started, watched, described when it ends, and ended.

    hub (main thread) ── Popen, own session ──▶ python -P -m module
                      ── stdin pipe ──────────▶ one JSON line, then open until the hub is gone (death pipe)
                      ◀── pidfd ─────────────── exit, noticed by the event loop

Each child leads a session of its own: its process group is the child and what it started, and is ours to end. A
child's exit is seen before it is reaped, so that its group can be ended while its number is still taken. What moved to
a session of its own is found by the marks in its environment. The log of a child cannot fill the disk: its middle is
dropped.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from offbeat.errors import ConfigError
from offbeat.rpc import guard
from offbeat.rpc.guard import RUN_VARIABLE, WORKER_VARIABLE, end_marked, end_session, stat_fields

TAIL_LINES = 20
TAIL_BYTES = 16_384
LOG_BYTES = 64 << 20
"""A log that is longer loses its middle (at the next look, so it may be longer for a moment)."""
_LOG_END_BYTES = 1 << 20
_DROPPED = re.compile(rb"\n\[offbeat: (\d+) bytes dropped")
_POLL_S = 0.05


@dataclass(frozen=True)
class ProcessSpec:
    """What to start. `python -P -m module`: the working directory is not on the module path."""

    name: str
    """Unique in the run: `engine-0`, `trainer-0`, `reward-0`."""
    module: str
    settings: Mapping[str, Any]
    """JSON-able; reaches `build` as `context.settings`."""
    log: Path
    """stdout and stderr of the process are appended to it; bounded (see `LOG_BYTES`)."""
    python: str | None = None
    """Another interpreter; None is this one."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the parent's environment."""


class Child:
    """A started process. Belongs to the event loop's thread, which must be the main thread."""

    def __init__(
        self,
        spec: ProcessSpec,
        on_exit: Callable[[int], None],
        *,
        run: str,
        identity: str,
        log_bytes: int = LOG_BYTES,
    ) -> None:
        """Starts it. `on_exit` is called once with the return code (negative: the signal), after the group was ended.

        `run` and `identity` (unique among all children ever started) mark it and whatever it starts.

        Raises:
            ConfigError: the interpreter cannot be run, or the log cannot be written.
        """
        # A parent-death signal follows the thread that started the child: a worker thread's end would kill it.
        assert threading.current_thread() is threading.main_thread(), "processes are started from the main thread"
        self.spec = spec
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = -1
        python = spec.python or sys.executable
        marks = {RUN_VARIABLE: run, WORKER_VARIABLE: identity}
        self._marks = [f"{name}={value}" for name, value in marks.items()]
        environment = {**os.environ, **spec.env, **marks, "OFFBEAT_PROCESS": spec.name, "PYTHONUNBUFFERED": "1"}
        self._log_bytes = log_bytes
        log, self._log_start = _open_log(spec)
        with log:
            try:
                self._popen = subprocess.Popen(
                    [python, "-P", "-m", spec.module],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                raise ConfigError(
                    f"{spec.name}: interpreter {python!r} cannot be run ({error.strerror or error}); "
                    "give the path of a Python 3.11 or newer that has offbeat installed"
                ) from error
        self.pid = self._popen.pid
        self._watch()

    def _watch(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            # Kernels and sandboxes without pidfd: look often instead.
            self._loop.call_later(_POLL_S, self._look)
        else:
            self._loop.add_reader(self._pidfd, self._look)

    def _look(self) -> None:
        if self.exited.done():
            return
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._pidfd < 0:
                self._loop.call_later(_POLL_S, self._look)
            return
        code = self._reap()
        self.exited.set_result(code)
        self._on_exit(code)

    def _reap(self) -> int:
        """After the process has ended, or to end it: its group first, while the number cannot be anybody else's.

        Then what it started in other sessions: now that it has ended, there will be no more of it.
        """
        if self._popen.returncode is None:
            end_session(self.pid)
        code = self._popen.wait()
        end_marked(*self._marks)
        self.bound_log()
        if self._pidfd >= 0:
            with suppress(RuntimeError, ValueError):
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self.close_pipe()
        return code

    def send_line(self, line: bytes) -> None:
        """Writes to its stdin; may block while the child does not read, so call it in a thread."""
        with suppress(BrokenPipeError, ValueError):
            view = memoryview(line + b"\n")
            while view:
                view = view[self._stdin().write(view) or 0 :]

    def close_pipe(self) -> None:
        with suppress(OSError):
            self._stdin().close()

    def _stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    def signal_group(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole session; the exit is noticed as usual. Harmless when it has ended."""
        if self._popen.returncode is None:
            end_session(self.pid)

    def kill_and_wait(self) -> int:
        """For when no event loop runs any more. SIGKILL cannot be refused, so the wait is short."""
        return self._reap() if self._popen.returncode is None else self._popen.returncode

    def state(self) -> str:
        """The kernel's letter for the process: R running, S sleeping, D waiting for a device, T stopped; "" if gone."""
        fields = stat_fields(self.pid)
        return fields[0] if fields else ""

    def log_tail(self) -> str:
        """The last lines that this process wrote (not those of earlier processes with the same log)."""
        try:
            with self.spec.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                # Shorter than at the start: its middle was dropped on behalf of a later process.
                start = self._log_start if self._log_start <= size else 0
                file.seek(max(start, size - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError as error:
            return f"({self.spec.log} cannot be read: {error.strerror or error})"
        lines = text.strip().splitlines()
        # A crash report begins with its reason and may be long: the reason counts, not its last lines.
        crashes = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
        first = max(0, crashes[-1] - 5) if crashes else 0
        return "\n".join(lines[first:][:TAIL_LINES] if crashes else lines[-TAIL_LINES:])

    def bound_log(self) -> None:
        """Drops the middle of a log that is over the limit; a line says how much. Cheap: one stat as a rule.

        The process goes on writing meanwhile: it appends, so its next line is at the new end. What it writes between
        the reading of the last part and the cut is lost with the middle.
        """
        limit = self._log_bytes
        with suppress(OSError):
            status = self.spec.log.stat()
            if status.st_size <= limit or not stat.S_ISREG(status.st_mode):
                return
            first, last = limit // 4, min(limit // 4, _LOG_END_BYTES)
            with self.spec.log.open("r+b") as file:
                file.seek(first)
                middle = file.read(80)
                file.seek(status.st_size - last)
                end = file.read(last)
                # Whole lines, unless it is all one.
                end = end[end.find(b"\n") + 1 :]
                file.truncate(first)
            self._log_start = min(self._log_start, first)
            # The line of an earlier cut, perhaps by a process before this one, is at the same place.
            before = _DROPPED.match(middle)
            dropped = status.st_size - first - len(end) + (int(before[1]) if before else 0)
            note = f"\n[offbeat: {dropped} bytes dropped here: a log has at most {limit}]\n"
            with self.spec.log.open("ab") as file:
                file.write(note.encode() + end)


class Guard:
    """The process that ends what is left when this one dies (see `guard`). Started again should it be gone itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: set[int] = set()
        self._start()

    def _start(self) -> None:
        # Where this process is itself part of a run, the end of that one must not take the guard of this one.
        marks = {RUN_VARIABLE, WORKER_VARIABLE}
        environment = {name: value for name, value in os.environ.items() if name not in marks}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guard.__file__), self._folder, *map(str, self._groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._tell(b"+ %d" % group)

    def discard(self, group: int) -> None:
        self._groups.discard(group)
        self._tell(b"- %d" % group)

    def check(self) -> None:
        """Starts another one if it has ended."""
        if self._popen.poll() is not None:
            self._close_pipe()
            self._start()

    def close(self) -> None:
        """Ends and reaps it. Groups still on its list are killed, the folder is removed."""
        self._close_pipe()
        try:
            self._popen.wait(2)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def _close_pipe(self) -> None:
        assert self._popen.stdin is not None
        with suppress(OSError):
            self._popen.stdin.close()

    def _tell(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        # It may have just ended: the next check starts another one with the whole list.
        with suppress(OSError, ValueError):
            self._popen.stdin.write(line + b"\n")


def describe_exit(code: int) -> str:
    """`killed by SIGKILL` or `exit code 1`, with a hint where the usual cause is known."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (by somebody, or by the kernel when memory ran out)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _open_log(spec: ProcessSpec) -> tuple[IO[bytes], int]:
    try:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        file = spec.log.open("ab")
    except OSError as error:
        raise ConfigError(f"{spec.name}: log {spec.log} cannot be written ({error.strerror or error})") from error
    return file, file.tell()
