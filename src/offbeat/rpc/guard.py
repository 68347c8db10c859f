"""Ends the processes of a controller that is gone. Run as a script by the hub; standard library only.

    guard.py FOLDER [GROUP …]
    controller ── stdin ──▶ guard      "+ 4711" a group to end, "- 4711" already ended by the controller

When the pipe ends (the controller closed it, or died in any way), every group that is still on the list is killed,
then everything that carries the run's mark (the name of FOLDER) in its environment, and FOLDER is removed. The guard
lives in a session of its own, so that nothing meant for the controller reaches it. It is what ends the children of a
worker that was itself stopped or killed and cannot look after them any more.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

RUN_VARIABLE = "OFFBEAT_RUN"
"""In the environment of every child of a hub: the name of the hub's runtime folder, which no other run has."""
WORKER_VARIABLE = "OFFBEAT_WORKER"
"""As well: the identity of the one worker; a worker that is started again under the same name has another."""
_SCANS = 5
_EXEC_S = 0.2
"""How long a process may be between two programs; on a busy machine it may have to wait for a core meanwhile."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in the flags of /proc/<pid>/stat."""


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (index 0 is field 3 of proc(5)); None: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None if there is no such process or it has already ended (zombie)."""
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a process is there and was stopped, e.g. by Ctrl-Z."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] in "Tt"


def session_members(session: int) -> list[int]:
    """Live processes of a session."""
    members: list[int] = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                fields = stat_fields(int(name))
                if fields is not None and fields[0] not in "ZX" and int(fields[3]) == session:
                    members.append(int(name))
    return members


def end_session(leader: int) -> None:
    """Kills the session that `leader` was started in: its group, and members that moved to other groups.

    Safe against reuse of the number as long as the leader is not reaped, or a member of the group lives.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for pid in session_members(leader):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_marked(*marks: str) -> None:
    """Kills what was started with all `marks` (`NAME=value`) in its environment, whatever session it moved to.

    Only processes of this user, and never this one. A process that is started with another environment is not found.
    A killed process cannot fork any more, so a scan that meets nothing new is the proof that nothing is left. A
    process that ends under the scan may have left a child: a reason to look again. One that is just beginning a
    program has no environment for a moment, which is waited for.
    """
    wanted = {os.fsencode(mark) for mark in marks}
    known = {os.getpid()}
    deadline = time.monotonic() + _EXEC_S
    for _ in range(_SCANS):
        met, beginning = _scan(wanted, known)
        while beginning and time.monotonic() < deadline:
            time.sleep(0.001)
            more, beginning = _scan(wanted, known)
            met = met or more
        if not met:
            return


def _scan(wanted: set[bytes], known: set[int]) -> tuple[bool, bool]:
    """Whether something new was killed or had ended (it is then known), and whether something is in exec."""
    met = beginning = False
    for pid in _processes():
        if pid in known:
            continue
        environment = _environment(pid)
        if environment is None and _in_exec(pid):
            beginning = True
        elif environment is None or wanted <= environment:
            met = True
            known.add(pid)
            if environment is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
    return met, beginning


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _environment(pid: int) -> set[bytes] | None:
    """What a process was started with; empty if it is not ours to see; None: it has none, or is gone."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return set()
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read()
    except PermissionError:
        return set()
    except OSError:
        return None
    return set(text.split(b"\0")) if text else None


def _in_exec(pid: int) -> bool:
    """For a process without environment: it has no arguments either, and is neither ended nor the kernel's own."""
    fields = stat_fields(pid)
    if fields is None or fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
        return False
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return not file.read(1)
    except OSError:
        return False


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    groups = {int(group) for group in sys.argv[2:]}
    for line in sys.stdin:
        sign, _, group = line.strip().partition(" ")
        if sign == "+":
            groups.add(int(group))
        elif sign == "-":
            groups.discard(int(group))
    for group in groups:
        end_session(group)
    end_marked(f"{RUN_VARIABLE}={os.path.basename(folder)}")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
