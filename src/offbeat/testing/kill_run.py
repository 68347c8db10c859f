"""Runs one cell of the kill matrix with real processes and looks at all that it leaves.

    run with the fault ─▶ exit, words, left-overs ─▶ audit ─▶ resume ─▶ audit, equal to a run without a fault?

Everything of a cell carries a mark in its environment and has a temporary folder of its own, so that cells can run
side by side and what is left can be told apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.checkpoint import CheckpointStore
from offbeat.commands.audit import Audit, examine
from offbeat.errors import OffbeatError
from offbeat.metrics.writer import RunFolder, read_metrics
from offbeat.testing.kill_cells import NOTICE_S, SLEEP_S, STEPS, VANISH_S, Cell, settings
from offbeat.testing.tiny_project import steps_of, write_config

MARK = "OFFBEAT_TEST_CELL"
LIMIT_S = 180.0
"""A command that takes longer hangs."""
_POLL_S = 0.01
_FAULT_LINE = re.compile(r"^offbeat: fault injected at .*\n", re.MULTILINE)
"""A controller that hits itself says so on its own terminal: that is the test's voice, not the run's."""


@dataclass
class Report:
    """What a cell did. `problems` is empty when it did what it must."""

    cell: str
    outcome: str
    problems: list[str] = field(default_factory=list[str])
    exit_code: int | None = None
    seconds: float | None = None
    """From the fault to the end of the command; for a controller that was killed, to the end of all that it started."""
    error: str = ""
    """The first line of what it said."""
    left: list[str] = field(default_factory=list[str])
    lost: int = 0
    twice: int = 0
    resumed_at: int | None = None
    exact: bool | None = None
    """Equal to the uninterrupted run. None: not promised (one sample failed, or one step off-policy)."""
    took_s: float = 0.0


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"


class Bench:
    """Where cells run: a project, a folder for the runs, and uninterrupted runs to compare with."""

    def __init__(self, project: Path, folder: Path, *, patience: float = 1.0) -> None:
        """`project` is made by `write_project`; `folder` is for runs and kept.

        On a machine that is busy with other things as well, `NOTICE_S` is multiplied by `patience`.
        """
        self.project = project
        self.folder = folder
        self.patience = patience
        self._whole: dict[int, Path] = {}

    def whole(self, staleness: int) -> Path:
        """The run of this config that nothing happened to; made at the first call."""
        if staleness not in self._whole:
            work = self.folder / f"uninterrupted-{staleness}"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            config = self.config(work, staleness)
            with _Place() as place:
                ran = place.start("train", config, "--run-dir", work / "run", cwd=work).finish()
            if ran.code != 0:
                raise AssertionError(f"the run without a fault failed: {ran.told}")
            self._whole[staleness] = work / "run"
        return self._whole[staleness]

    def config(self, work: Path, staleness: int) -> Path:
        return write_config(self.project, work.name, **settings(staleness))

    def run(self, cell: Cell, number: int = 0) -> Report:
        """Whatever happens, a report comes back."""
        began = time.monotonic()
        report = Report(cell.name, cell.outcome)
        work = self.folder / f"{cell.name.replace(', ', '-').replace(' ', '-')}-{number}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            with _Place() as place:
                _Case(self, cell, report, place, work).run(self.config(work, cell.staleness))
        except Exception as error:
            report.problems.append(f"{type(error).__name__}: {error}")
        report.took_s = time.monotonic() - began
        return report


class _Place:
    """A temporary folder and a mark for all processes of a cell."""

    def __enter__(self) -> _Place:
        self.temporary = Path(tempfile.mkdtemp(prefix="km-", dir="/tmp"))
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def start(self, *words: str | Path, cwd: Path, faults: str = "", log: Path | None = None) -> _Started:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"},
            "TMPDIR": str(self.temporary),
            MARK: self.temporary.name,
            "OFFBEAT_FAULTS": faults,
            "OFFBEAT_FAULTS_LOG": str(log or ""),
        }
        return _Started([sys.executable, "-m", "offbeat.cli", *map(str, words)], cwd, environment)

    def alive(self) -> list[int]:
        """Processes with the mark, whatever session or parent they have. An ended one has no environment."""
        mark = f"{MARK}={self.temporary.name}".encode()
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def left(self) -> list[str]:
        """Processes (their sockets and memory go with them) and files outside the run's folder."""
        processes = [f"process {pid}: {_command_of(pid)}" for pid in self.alive()]
        # Unlike Path.rglob, walk does not mind a folder that goes while it looks.
        files = [os.path.join(folder, name) for folder, _, names in os.walk(self.temporary) for name in names]
        return processes + [f"file {path}" for path in sorted(files)]


class _Started:
    """A command whose output goes to files: nothing that it leaves behind can hold up the reader."""

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._out, self._err = (cwd / f"{command[3]}.{name}" for name in ("out", "err"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def finish(self, timeout_s: float = LIMIT_S) -> Ran:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"hung for {timeout_s:g} s\n{self._out.read_text()}\n{self._err.read_text()}"
            ) from None
        return Ran(code, self._out.read_text(), self._err.read_text())


@dataclass
class _Case:
    """One cell under way."""

    bench: Bench
    cell: Cell
    report: Report
    place: _Place
    work: Path

    @property
    def folder(self) -> Path:
        return self.work / "run"

    def run(self, config: Path) -> None:
        log = self.work / "faults"
        log.touch()
        started = self.place.start(
            "train", config, "--run-dir", self.folder, cwd=self.work, faults=self.cell.faults, log=log
        )
        fault_at = self._fault(started, log)
        if self.cell.target == "controller":
            fault_at = self._controller(started, fault_at)
        ran = started.finish()
        self._look_back(ran, fault_at)
        self._check_end(ran)
        self._audit()
        if ran.code == 0:
            self._compare()
        else:
            self._resume()

    def _fault(self, started: _Started, log: Path) -> float:
        """When it happened, on the wall clock."""
        wait_until(lambda: log.stat().st_size > 0 or started.process.poll() is not None, LIMIT_S, "the fault")
        lines = log.read_text().splitlines()
        if len(lines) != 1:
            raise AssertionError(f"{len(lines)} faults happened\n{started.finish().told}")
        return json.loads(lines[0])["time"]

    def _controller(self, started: _Started, fault_at: float) -> float:
        """What the runner does to a controller that was stopped. Returns the time that counts as the fault."""
        if not self.cell.signal.startswith("stop"):
            return fault_at
        pid = started.process.pid
        wait_until(lambda: _state(pid) == "T", VANISH_S, "the controller's stop")
        if self.cell.signal == "stop":
            time.sleep(SLEEP_S)
            started.process.send_signal(signal.SIGCONT)
        else:
            started.process.kill()
        return time.time()

    def _look_back(self, ran: Ran, fault_at: float) -> None:
        """What is there when the command has ended. Only a killed controller's children may take a moment."""
        report, cell = self.report, self.cell
        report.exit_code = ran.code
        report.error = next((line for line in ran.err.splitlines() if line.startswith("error: ")), "")
        if cell.outcome == "vanishes":
            with suppress(AssertionError):
                wait_until(lambda: not self.place.left(), VANISH_S, "the others")
        report.left = self.place.left()
        if report.left:
            report.problems.append(f"left behind: {'; '.join(report.left)}")
        if (self.folder / ".lock").exists() and not _free(self.folder / ".lock"):
            report.problems.append("the lock of the run folder is held")
        if cell.outcome in ("fails", "vanishes", "ends"):
            report.seconds = time.time() - fault_at
            allowed_s = NOTICE_S[cell.signal] * self.bench.patience
            if report.seconds > allowed_s:
                report.problems.append(f"took {report.seconds:.1f} s, allowed are {allowed_s:g} s")

    def _check_end(self, ran: Ran) -> None:
        expected = {"fails": 1, "vanishes": -signal.SIGKILL, "ends": 130, "saves and stops": 130}
        problems = self.report.problems
        if ran.code != expected.get(self.cell.outcome, 0):
            problems.append(f"another end than expected: {ran.told}")
            return
        if self.cell.outcome == "fails":
            if not re.match(f"error: {self.cell.culprit}", ran.err):
                problems.append(f"the error does not begin with {self.cell.culprit!r}: {ran.err}")
            if "Traceback" in ran.out + ran.err:
                problems.append(f"a traceback on the terminal: {ran.err}")
            own = self.cell.faults.startswith(self.cell.target)
            if own and "last lines of its log:\noffbeat: fault injected at" not in ran.err.replace("\r", ""):
                problems.append(f"the last lines of its log are not shown: {ran.err}")
        elif self.cell.outcome != "vanishes" and _FAULT_LINE.sub("", ran.err):
            problems.append(f"unexpected words: {ran.err}")
        if self.cell.outcome == "heals":
            failed = [one for one in _lines(self.folder / "samples.jsonl") if one["errors"]]
            if len(failed) != 1 or "its worker ended" not in failed[0]["errors"][0]:
                problems.append(f"{len(failed)} reward calls failed instead of 1")

    def _audit(self) -> Audit | None:
        if not (self.folder / "config.json").is_file():
            return None
        found = examine(RunFolder.open(self.folder))
        self.report.problems += [f"audit: {problem}" for problem in found.problems]
        account = found.account
        self.report.lost = account.lost
        self.report.twice = account.trained - len(account.trained_at)
        return found

    def _resume(self) -> None:
        if not (self.folder / "config.json").is_file():  # ended before there was anything
            self.report.problems.append("there is no run folder to say what happened")
            return
        ran = self.place.start("resume", self.folder, cwd=self.work).finish()
        if not self.cell.saved:
            if ran.code != 2 or "no complete checkpoint to continue from" not in ran.err:
                self.report.problems.append(f"resume without a checkpoint: {ran.told}")
            return
        if ran.code != 0:
            self.report.problems.append(f"resume failed: {ran.told}")
            return
        found = self._audit()
        assert found is not None
        self.report.resumed_at = found.account.resumes[-1]
        if found.account.unended or found.account.next_step != STEPS:
            self.report.problems.append(f"after the resume {found.account.next_step} steps, {found.account.unended}")
        if left := self.place.left() + [str(path) for path in self.folder.glob("checkpoints/.writing*")]:
            self.report.problems.append(f"left behind by the resume: {'; '.join(left)}")
        self._compare()

    def _compare(self) -> None:
        """With the run that nothing happened to, as far as that is promised."""
        report, cell = self.report, self.cell
        if steps_of(self.folder) != list(range(STEPS)):
            report.problems.append(f"metrics.jsonl has the steps {steps_of(self.folder)}")
        lags = [record["staleness_max"] for record in read_metrics(self.folder) if "staleness_max" in record]
        starts = {0, report.resumed_at}
        if lags != [0 if step in starts else cell.staleness for step in range(STEPS)]:
            report.problems.append(f"staleness by step {lags}, resumed at {report.resumed_at}")
        if cell.outcome == "heals" or (cell.staleness and report.resumed_at is not None):
            return
        different = differences(self.folder, self.bench.whole(cell.staleness))
        report.exact = not different
        report.problems += different


def differences(run: Path, other: Path) -> list[str]:
    """What is not equal to the last bit in two finished runs, but for measurements of time."""
    found = [
        f"{name} differs from that of the uninterrupted run"
        for name in ("metrics.jsonl", "samples.jsonl")
        if lasting(_lines(run / name)) != lasting(_lines(other / name))
    ]
    one, two = (_weights(path) for path in (run, other))
    return found + [f"{name} differs from that of the uninterrupted run" for name in one if one[name] != two.get(name)]


def lasting(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All that is no measurement of time, nor of the parity probe, which follows the first sync of a process."""
    timed = re.compile(r"time_|overlap|engine_seconds|logprob_gap_")
    return [{key: value for key, value in record.items() if not timed.match(key)} for record in records]


def wait_until(done: Callable[[], bool], timeout_s: float, what: str) -> None:
    """AssertionError when it did not come."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _weights(run: Path) -> dict[str, bytes]:
    """Weights, optimizer moments, counters and random states of the last checkpoint."""
    checkpoint, skipped = CheckpointStore(run / "checkpoints").latest()
    if checkpoint is None or skipped or checkpoint.step != STEPS:
        raise OffbeatError(f"{run} has no whole checkpoint of step {STEPS}: {skipped}")
    rank = checkpoint.folder / "trainer-0"
    files = [*(rank / "model").glob("*.safetensors"), *rank.glob("trainer-rank-*")]
    return {path.name: path.read_bytes() for path in files}


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "ended meanwhile"


def _free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
