"""The worker's side: a process that serves named methods to the hub that started it.

    I/O thread     owns the socket: heartbeats, `urgent` methods, replies; never computes
    main thread    `build`, then every other method, strictly first in, first out
    pipe thread    stdin ended = the hub is gone: kills this process and everything it started

A handler's exception becomes an error reply as text and the worker serves on; only SystemExit and KeyboardInterrupt
end it. A message that makes no sense gets an error reply, or a line in the log if it belongs to no call. Importing
this module loads neither torch nor pydantic, so that a worker is up (and answers) before its model loads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.rpc.codec import Message
from offbeat.rpc.connection import Connection, Request
from offbeat.rpc.failure import failure_of
from offbeat.rpc.guard import is_stopped
from offbeat.rpc.lifeline import accept_invitation
from offbeat.rpc.messages import Arguments, Nothing
from offbeat.rpc.wire import Beat

WELCOME_S = 30.0
MAX_NOTE = 200


@dataclass(frozen=True)
class Method:
    """One remote method: `handler(arguments) -> struct`, or None for `Nothing`."""

    arguments: type[Arguments]
    handler: Callable[[Any], Any]
    urgent: bool = False
    """Runs on the I/O thread at once, even while the main thread works: must be quick and thread-safe."""


class Progress:
    """Tells the hub that work goes on: a call without progress for its stall limit is given up. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._changed = time.monotonic()
        self._note = ""
        self._counters: dict[str, float] = {}

    def advance(self, note: str | None = None, **counters: float) -> None:
        """Cheap: call it at every decode step or micro-batch. Counters hold the latest value of each name."""
        with self._lock:
            self._count += 1
            self._changed = time.monotonic()
            if note is not None:
                self._note = note[:MAX_NOTE]
            self._counters.update(counters)

    def beat(self, running: int = 0) -> Beat:
        """What the next heartbeat says."""
        with self._lock:
            age_s = time.monotonic() - self._changed
            # Everything but text and numbers would fail in the I/O thread, where no caller can be told.
            counters = {name: float(value) for name, value in self._counters.items()}
            note = self._note.encode("utf-8", "backslashreplace").decode()
            return Beat(running=running, progress=self._count, age_s=age_s, note=note, counters=counters)


@dataclass(frozen=True)
class WorkerContext:
    """What `build` gets."""

    name: str
    settings: Mapping[str, Any]
    progress: Progress


def serve(build: Callable[[WorkerContext], Mapping[str, Method]]) -> None:
    """A worker's main: `if __name__ == "__main__": serve(build)`. Returns when the hub says so.

    `build` runs in the main thread when the connection is up; heartbeats are answered meanwhile. Its exception
    reaches the hub as text, and the process ends with exit code 1.
    """
    invitation = accept_invitation()
    progress = Progress()
    connection = Connection(invitation, progress.beat)
    connection.start()
    while not (welcome := connection.wait_welcome(WELCOME_S)) and is_stopped(invitation.parent_pid):
        pass  # the controller cannot answer until somebody lets it go on; the death pipe ends this if it dies
    if not welcome:
        sys.exit(f"offbeat: {connection.refusal or f'the controller gave no answer within {WELCOME_S:g} s'}")
    try:
        methods = dict(build(WorkerContext(invitation.name, invitation.settings, progress)))
        connection.ready(lambda message: _urgent(connection, methods, message))
        _work(connection, methods)
    except BaseException as error:
        connection.fatal(failure_of(error))
        connection.finish()
        raise
    connection.finish()


def _work(connection: Connection, methods: Mapping[str, Method]) -> None:
    """The main thread: one request after the other until the hub says shutdown."""
    while (request := connection.next_request()) is not None:
        _answer(connection, methods, request)
        # Without this the latest request and its arrays would live until the next one comes.
        del request


def _urgent(connection: Connection, methods: Mapping[str, Method], message: Message) -> bool:
    """On the I/O thread: True when the request was urgent (or unknown) and is answered."""
    method = methods.get(message.envelope.method)
    if method is not None and not method.urgent:
        return False
    _answer(connection, methods, Request(message), urgent=True)
    return True


def _answer(connection: Connection, methods: Mapping[str, Method], request: Request, *, urgent: bool = False) -> None:
    call = request.message.envelope.id
    try:
        result = _run(methods, request.message)
        connection.reply(call, Nothing() if result is None else result)
    except (SystemExit, KeyboardInterrupt) as error:
        if not urgent:
            raise
        connection.failure(call, failure_of(error))
    except BaseException as error:
        connection.failure(call, failure_of(error))


def _run(methods: Mapping[str, Method], message: Message) -> Any:
    name = message.envelope.method
    method = methods.get(name)
    if method is None:
        raise ProtocolError(f"no method {name[:80]!r}; this worker has {', '.join(sorted(methods)) or 'none'}")
    return method.handler(message.body(method.arguments))
