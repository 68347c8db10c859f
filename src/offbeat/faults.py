"""Named places where a test can make a process fail. A no-op unless the environment variable OFFBEAT_FAULTS says so.

    OFFBEAT_FAULTS="engine.generate=kill@2; engine-1/trainer.send=raise; x=stop; y=sleep:5; controller.save=enospc"

Entries are separated by `;`, each `[process/]point=action[@k]`: `process` limits it to the process of that name
(`controller`, `engine-0`, …), `@k` to the k-th time that the point is reached there (from 1). Actions:

    kill       SIGKILL to this process            raise      FaultInjected
    term       SIGTERM to this process            sleep:s    sleeps s seconds
    stop       SIGSTOP to this process            enospc     OSError "no space left on device"
    exit:n     ends with exit code n, without clean-up

`kill:engine-0`, `term:controller`, `stop:trainer-0`, …: the signal goes to that process of the run instead. So a
process can be hit while it is idle, at a moment that another one is known to be at.

The variable is inherited, so one setting reaches every process of a run. OFFBEAT_FAULTS_LOG names a file that gets a
line of JSON just before each fault: time, process, point, action, target. With it an entry that has `@k` acts once in
the whole run, also when a process that takes the place of another counts from 1 again.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError, RunError

VARIABLE = "OFFBEAT_FAULTS"
LOG_VARIABLE = "OFFBEAT_FAULTS_LOG"
PROCESS_VARIABLE = "OFFBEAT_PROCESS"
CONTROLLER = "controller"
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_PLAIN = (*_SIGNALS, "raise", "enospc")
_WITH_VALUE = ("exit", "sleep")

_lock = threading.Lock()
_reached: Counter[tuple[str, str]] = Counter()


class FaultInjected(RunError):
    """A fault point was told to raise."""


@dataclass(frozen=True)
class Fault:
    """One entry of the variable. `process` None: every process. `at` None: every time."""

    process: str | None
    point: str
    action: str
    value: float = 0.0
    at: int | None = None
    target: str | None = None
    """Who gets the signal; None: the process that reached the point."""


def point(name: str) -> None:
    """A place that a test may want to fail at.

    Raises:
        ConfigError: OFFBEAT_FAULTS cannot be read.
        FaultInjected, OSError: as it says.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    process = os.environ.get(PROCESS_VARIABLE, CONTROLLER)
    due = [f for f in parse_faults(text) if f.point == name and f.process in (None, process)]
    if not due:
        return
    with _lock:
        _reached[text, name] += 1
        count = _reached[text, name]
    for fault in due:
        if fault.at in (None, count):
            _act(fault, process)


@functools.lru_cache(maxsize=16)
def parse_faults(text: str) -> tuple[Fault, ...]:
    """The entries of OFFBEAT_FAULTS. ConfigError names every entry that is wrong."""
    faults: list[Fault] = []
    problems: list[str] = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        try:
            faults.append(_parse_entry(entry))
        except ValueError as error:
            problems.append(f"{VARIABLE}: {entry!r}: {error}; write e.g. engine-0/engine.generate=kill@2")
    if problems:
        raise ConfigError(*problems)
    return tuple(faults)


def _parse_entry(entry: str) -> Fault:
    place, equals, what = (part.strip() for part in entry.partition("="))
    process, slash, name = place.rpartition("/")
    if not equals or not name or (slash and not process):
        raise ValueError("not of the form [process/]point=action")
    what, at_sign, times = what.partition("@")
    at = int(times) if times.isascii() and times.isdigit() else 0
    if at_sign and at < 1:
        raise ValueError(f"@{times} is not a count from 1")
    action, colon, value = what.strip().partition(":")
    number, target = 0.0, None
    if action in _SIGNALS and value:
        target = value
    elif action in _WITH_VALUE and colon:
        number = float(value)
        if not 0 <= number < 1e6 or (action == "exit" and (number > 255 or number != int(number))):
            raise ValueError(f"value {value} is out of range")
    elif action not in _PLAIN or colon:
        known = ", ".join([*_PLAIN, "exit:n", "sleep:s"])
        raise ValueError(f"unknown action {what!r}; known are {known}")
    return Fault(process or None, name, action, number, at or None, target)


def _act(fault: Fault, process: str) -> None:
    pid = os.getpid() if fault.target in (None, process) else _pid_of(fault.target)
    if not _noted(fault, process):
        return
    to = f" to {fault.target}" if fault.target else ""
    print(f"offbeat: fault injected at {fault.point}: {fault.action}{to}", file=sys.stderr, flush=True)
    match fault.action:
        case "kill" | "term" | "stop":
            os.kill(pid, _SIGNALS[fault.action])
        case "exit":
            os._exit(int(fault.value))
        case "sleep":
            time.sleep(fault.value)
        case "enospc":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {fault.point})")
        case _:
            raise FaultInjected(f"fault injected at {fault.point}")


def _noted(fault: Fault, process: str) -> bool:
    """Writes the fault down where OFFBEAT_FAULTS_LOG says. False: it has `@k` and was there already."""
    path = os.environ.get(LOG_VARIABLE)
    if not path:
        return True
    entry = {"at": fault.at, "process": process, "point": fault.point, "action": fault.action, "target": fault.target}
    with open(path, "a+", encoding="utf-8") as file:
        file.seek(0)
        if fault.at is not None and any(entry.items() <= json.loads(line).items() for line in file):
            return False
        file.write(json.dumps({"time": time.time(), **entry}) + "\n")
    return True


def _pid_of(name: str | None) -> int:
    """Of a process of this run. FaultInjected when there is none: a fault must not pass for one that was survived."""
    controller = os.getppid() if PROCESS_VARIABLE in os.environ else os.getpid()
    if name == CONTROLLER:
        return controller
    mark = f"{PROCESS_VARIABLE}={name}".encode()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, IndexError):  # it may end meanwhile
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                if parent == controller:
                    return int(folder.name)
    raise FaultInjected(f"no process {name} to send a signal to")
