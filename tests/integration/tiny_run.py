"""A run that is over in seconds: a project folder with a tiny model, twelve rows and a reward, and ways to run it.

write_project(folder)                 model/ train.jsonl rewards.py
write_config(folder, steps=3)         run.toml, on top of `BASE`
command("train", path, …)             the command in this process: imports are paid once, workers are real
start_command("train", path, …)       the command in a process of its own: for signals and exit codes
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from offbeat import cli
from offbeat.testing.tiny_model import tiny_qwen3

BASE: dict[str, Any] = {
    "model": "model",
    "steps": 3,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "sampling": {"max_new_tokens": 6},
    "data": [
        {
            "source": "train.jsonl",
            "format": "text",
            "answer": "answer",
            "max_prompt_tokens": 16,
            "rewards": {"rewards.py:length": 1.0},
        }
    ],
    "rollout": {"threads": 1, "device": "cpu"},
    "trainer": {"threads": 1, "device": "cpu", "dtype": "float32", "lr": 1e-3, "warmup_steps": 0},
    "checkpoint": {"every_steps": 1},
}
REWARDS = """
def length(completion: str) -> float:
    return float(len(completion) % 5)


def broken(completion: str) -> float:
    raise LookupError("no such key in the answer sheet")
"""


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


def write_project(folder: Path) -> Path:
    """What a config of `write_config` refers to."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers draws a progress bar
        tiny_qwen3(folder / "model", layers=1)
    write_rows(folder / "train.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)])
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, name: str = "run", **changes: Any) -> Path:
    """`changes` are merged into `BASE`, section by section; None removes a key."""
    path = folder / f"{name}.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in merge(BASE, changes).items()))
    return path


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(inner) for inner in value) + "]"
    return json.dumps(value)


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


def records(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[int]:
    """The steps that metrics.jsonl has, in order; the line of a last evaluation left out."""
    return [record["step"] for record in records(run) if "reward_mean" in record]
