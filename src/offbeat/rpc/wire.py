"""What the hub and a worker say to each other besides calls. The services' own arguments and results: `messages`.

    stdin     hub → worker   Invitation as one JSON line; the pipe then stays open: its end means that the hub is gone
    hello     worker → hub   Hello, checked before anything else of this peer is looked at
    welcome / refused        the hub's answer
    ready                    `build` is done, calls may come
    call      hub → worker   envelope with id and method, body = Arguments
    reply / failure          envelope with the id, body = result or Failure
    cancel    hub → worker   Cancel: drop this call if it has not begun
    beat      worker → hub   I/O heartbeat with the latest progress
    fatal     worker → hub   the worker's last words before it ends by itself
    shutdown  hub → worker   finish the running call, then end

An unknown kind is ignored (a newer peer may say more).
"""

from __future__ import annotations

from typing import Any

import msgspec


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to come up. Secrets reach it through the pipe only: never argv, environment or a file."""

    protocol: str
    name: str
    address: str
    identity: str
    token: str
    settings: dict[str, Any]
    parent_pid: int
    parent_started: int | None
    """Start time of the parent in clock ticks since boot: a process id alone may have been used again."""
    beat_s: float
    max_message_bytes: int
    server_key: str = ""
    """CURVE keys in Z85; empty on `ipc`, where the folder's mode keeps others out."""
    public_key: str = ""
    secret_key: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    pid: int
    offbeat_version: str
    python_version: str


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as text. Every part is bounded and valid UTF-8."""

    type_name: str
    message: str
    traceback_text: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody waits for this call any more."""

    stacks: bool = False
    """It took too long: if it is running, write every thread's stack to the log."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """`age_s` and not a time: the two sides' clocks are never compared."""

    running: int = 0
    """Id of the call that the main thread works on; 0 when idle."""
    progress: int = 0
    """How often `Progress.advance` was called."""
    age_s: float = 0.0
    """Seconds since the latest of them."""
    note: str = ""
    counters: dict[str, float] = {}
