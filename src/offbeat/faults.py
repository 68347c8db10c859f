"""Named places where a test can make a process fail. A no-op unless the environment variable OFFBEAT_FAULTS says so.

    OFFBEAT_FAULTS="engine.generate=kill@2; engine-1/trainer.send=raise; x=stop; y=sleep:5; controller.save=enospc"

Entries are separated by `;`, each `[process/]point=action[@k]`: `process` limits it to the process of that name
(`controller`, `engine-0`, …), `@k` to the k-th time that the point is reached there (from 1). Actions:

    kill       SIGKILL to this process            raise      FaultInjected
    term       SIGTERM to this process            sleep:s    sleeps s seconds
    stop       SIGSTOP to this process            enospc     OSError "no space left on device"
    exit:n     ends with exit code n, without clean-up

The variable is inherited, so one setting reaches every process of a run.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

from offbeat.errors import ConfigError, RunError

VARIABLE = "OFFBEAT_FAULTS"
PROCESS_VARIABLE = "OFFBEAT_PROCESS"
_PLAIN = ("kill", "term", "stop", "raise", "enospc")
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


def point(name: str) -> None:
    """A place that a test may want to fail at.

    Raises:
        ConfigError: OFFBEAT_FAULTS cannot be read.
        FaultInjected, OSError: as it says.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    process = os.environ.get(PROCESS_VARIABLE, "controller")
    due = [f for f in parse_faults(text) if f.point == name and f.process in (None, process)]
    if not due:
        return
    with _lock:
        _reached[text, name] += 1
        count = _reached[text, name]
    for fault in due:
        if fault.at in (None, count):
            _act(fault)


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
    known = ", ".join([*_PLAIN, "exit:n", "sleep:s"])
    if action in _PLAIN and not colon:
        number = 0.0
    elif action in _WITH_VALUE and colon:
        number = float(value)
        if not 0 <= number < 1e6 or (action == "exit" and (number > 255 or number != int(number))):
            raise ValueError(f"value {value} is out of range")
    else:
        raise ValueError(f"unknown action {what!r}; known are {known}")
    return Fault(process or None, name, action, number, at or None)


def _act(fault: Fault) -> None:
    print(f"offbeat: fault injected at {fault.point}: {fault.action}", file=sys.stderr, flush=True)
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(int(fault.value))
        case "sleep":
            time.sleep(fault.value)
        case "enospc":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {fault.point})")
        case _:
            raise FaultInjected(f"fault injected at {fault.point}")
