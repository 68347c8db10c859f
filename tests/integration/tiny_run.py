"""Ways to run the tiny project of `offbeat.testing.tiny_project`, whose builders are here as well.

command("train", path, …)             the command in this process: imports are paid once, workers are real
start_command("train", path, …)       the command in a process of its own: for signals and exit codes
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from offbeat import cli
from offbeat.testing.tiny_project import (
    BASE,
    REWARDS,
    merge,
    records,
    steps_of,
    toml,
    write_config,
    write_project,
    write_rows,
)

__all__ = [
    "BASE",
    "REWARDS",
    "Ended",
    "Started",
    "command",
    "merge",
    "records",
    "run_command",
    "start_command",
    "steps_of",
    "toml",
    "write_config",
    "write_project",
    "write_rows",
]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float
    cpu_s: float = 0.0
    """Of a process of its own, without those that it started."""

    @property
    def told(self) -> str:
        """Everything that a person saw, for the message of a failed assertion."""
        return f"exit {self.code} after {self.seconds:.1f} s\n--- out\n{self.out}\n--- err\n{self.err}"


def command(*words: str | Path, faults: str = "", cwd: Path | None = None) -> Ended:
    """`offbeat WORDS` in this process, with OFFBEAT_FAULTS set to `faults`."""
    out, err = io.StringIO(), io.StringIO()
    started = time.monotonic()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["offbeat", *map(str, words)]),
        mock.patch.dict(os.environ, {"OFFBEAT_FAULTS": faults}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, out.getvalue(), err.getvalue(), time.monotonic() - started)


class Started:
    """A command in a process of its own. Its output goes through pipes that `finish` reads to their end."""

    def __init__(self, *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self.started = time.monotonic()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.cli", *map(str, words)],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def wait_for_line(self, pattern: str) -> None:
        """Reads the output up to a line that matches; AssertionError when it ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen += line
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line with {pattern!r}\n{self.finish().told}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 60.0) -> Ended:
        before = _children_cpu_s()
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
        seconds = time.monotonic() - self.started
        return Ended(self.process.returncode, self.seen + out, err, seconds, _children_cpu_s() - before)


def _children_cpu_s() -> float:
    """Of all children that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def start_command(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Generator[Started]:
    started = Started(*words, cwd=cwd, env=env)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.finish(0.1)


def run_command(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """`offbeat WORDS` in a process of its own, to its end."""
    with start_command(*words, cwd=cwd, env=env) as started:
        return started.finish()
