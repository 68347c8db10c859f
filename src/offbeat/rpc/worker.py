"""One started worker as its owner sees it: calls, progress, death.

pending   call id → future, forgotten when the caller gives up: a late reply finds nobody and is ignored
ready     set when `build` is done, or failed with the worker's own error or its end
died      set once when it ends without having been asked to
"""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from offbeat.errors import CallTimeout, ProtocolError, RemoteError, WorkerDied
from offbeat.install import pip_install
from offbeat.rpc import codec
from offbeat.rpc.codec import Frame, Message
from offbeat.rpc.messages import Arguments, Nothing, Worked, WorkSpan
from offbeat.rpc.process import Child, ProcessSpec, describe_exit
from offbeat.rpc.wire import Beat, Cancel, Failure

R = TypeVar("R")
_LAST_WORDS_S = 0.03
"""After the exit of a process, for what it sent before: on one host it is in the socket already."""
_RETRY_S = 0.01
_TERM_S = 2.0
_KILL_S = 5.0


class Switchboard(Protocol):
    """What a worker needs of its hub."""

    heartbeat_s: float
    max_message_bytes: int
    log_bytes: int
    run: str
    worked: Callable[[str, Sequence[WorkSpan]], None]

    def send(self, identity: bytes, frames: list[Frame]) -> bool: ...
    def awake_s(self) -> float: ...
    def drain(self) -> None: ...
    def ended(self, worker: Worker) -> None: ...


@dataclass(frozen=True)
class ProgressSnapshot:
    """What the worker last said of its work."""

    count: int = 0
    note: str = ""
    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    changed: float = 0.0
    """When it last changed, on the hub's clock (`Hub.awake_s`)."""


def stalled(call: str, stall_s: float, progress: ProgressSnapshot, started: float, log: Path, if_slow: str) -> str:
    """Of a call since `started` that made no progress for `stall_s`. The worker's last progress may be of another."""
    note = f"; its last progress was {progress.note!r}" if progress.note else ""
    before = ", before this call" if note and progress.changed < started else ""
    advice = f"; if it is slow and not stuck, {if_slow}" if if_slow else ""
    return f"{call}: no progress for {stall_s:g} s{note}{before}; see {log}{advice}"


def may_go_unheard(future: asyncio.Future[Any]) -> None:
    """Its failure may come when nobody waits for it any more: that is no unhandled error to be printed."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


class Worker:
    """Made by `Hub.start`. All methods belong to the event loop's thread."""

    def __init__(self, spec: ProcessSpec, identity: bytes, token: str, hub: Switchboard) -> None:
        self.spec = spec
        self.name = spec.name
        self.identity = identity
        self.token = token
        self.public_key = ""
        self.welcomed = False
        self._hub = hub
        self.progress = ProgressSnapshot(changed=hub.awake_s())
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        may_go_unheard(self.ready)  # start may have given up
        self._died: asyncio.Future[WorkerDied] = self._loop.create_future()
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._ids = itertools.count(1)
        self._heard = self._hub.awake_s()
        self._asked = ""
        self._cause = ""
        self._last_words = ""
        self._end: WorkerDied | None = None
        self.child = Child(spec, self._on_exit, run=hub.run, identity=identity.decode(), log_bytes=hub.log_bytes)

    # --- calls --------------------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        arguments: Arguments,
        result: type[R],
        *,
        timeout_s: float,
        stall_s: float | None = None,
        if_slow: str = "",
    ) -> R:
        """Calls a method and waits for its result; arrays in it are read-only.

        Arrays in `arguments` must not be written to until the call is over. `if_slow` ends the message of a call that
        was given up for lack of progress: what to change where the work is slow and not stuck.

        Raises:
            RemoteError: the method raised; carries type, message and traceback as text.
            CallTimeout: no reply within `timeout_s`, or no progress within `stall_s`. The worker may still be at it:
                its owner decides whether to kill it. The stacks of its threads are in its log.
            WorkerDied: the process ended.
            ProtocolError: the arguments cannot travel, or the reply is not a `result`.
        """
        call = next(self._ids)
        frames = codec.encode("call", arguments, id=call, method=method, max_bytes=self._hub.max_message_bytes)
        if self._end is not None:
            raise self._end
        started = self._hub.awake_s()
        future: asyncio.Future[Message] = self._loop.create_future()
        may_go_unheard(future)  # the end of the process is also what cancels the caller
        self._pending[call] = future
        slow = False
        try:
            await self._send(frames, future, method, started + timeout_s)
            del frames
            message = await self._reply(future, method, started, timeout_s, stall_s, if_slow)
        except CallTimeout:
            slow = True
            raise
        finally:
            if self._pending.pop(call, None) is not None and not future.done():
                self._hub.send(self.identity, codec.encode("cancel", Cancel(stacks=slow), id=call))
        answer = self._result(method, message, result)
        if isinstance(answer, Worked) and answer.spans:
            self._hub.worked(self.name, answer.spans)
        return answer

    def awake_s(self) -> float:
        """The hub's clock, by which all limits go."""
        return self._hub.awake_s()

    @property
    def progress_age_s(self) -> float:
        """Seconds since the progress last changed."""
        return self._hub.awake_s() - self.progress.changed

    @property
    def pending_calls(self) -> int:
        """Calls that somebody waits for."""
        return len(self._pending)

    async def _send(self, frames: list[Frame], future: asyncio.Future[Message], method: str, deadline: float) -> None:
        """Hands the frames to the socket; while the peer's queue is full, tries again until the deadline."""
        while not self._hub.send(self.identity, frames):
            if future.done():
                return
            if self._hub.awake_s() > deadline:
                raise CallTimeout(f"{self.name}.{method}: the worker took no more messages before the deadline")
            await asyncio.sleep(_RETRY_S)

    async def _reply(
        self,
        future: asyncio.Future[Message],
        method: str,
        started: float,
        timeout_s: float,
        stall_s: float | None,
        if_slow: str,
    ) -> Message:
        while True:
            now = self._hub.awake_s()
            stall_at = float("inf")
            if stall_s is not None:
                # A heartbeat reports progress up to one beat late.
                stall_at = max(started, self.progress.changed) + stall_s + min(1.0, self._hub.heartbeat_s / 5)
            if now >= started + timeout_s:
                raise CallTimeout(
                    f"{self.name}.{method}: no reply after {timeout_s:g} s{self._last_progress()}; see {self.spec.log}"
                )
            if now >= stall_at:
                call = f"{self.name}.{method}"
                raise CallTimeout(stalled(call, stall_s or 0.0, self.progress, started, self.spec.log, if_slow))
            await asyncio.wait([future], timeout=min(started + timeout_s, stall_at) - now)
            if future.done():
                return future.result()

    def _last_progress(self) -> str:
        note = f" was {self.progress.note!r}," if self.progress.note else ""
        return f"; its last progress{note} {self.progress_age_s:.1f} s ago"

    def _result(self, method: str, message: Message, result: type[R]) -> R:
        if message.envelope.kind == "failure":
            failure = message.body(Failure)
            raise RemoteError(self.name, method, failure.type_name, failure.message, failure.traceback_text)
        if result is Nothing:
            # A newer worker may have something to say where this version expects nothing.
            return cast(R, Nothing())
        try:
            return message.body(result)
        except ProtocolError as error:
            raise ProtocolError(f"{self.name}.{method}: reply refused: {error}") from error

    # --- death --------------------------------------------------------------------------------------------------

    async def wait_died(self) -> WorkerDied:
        """Returns when the process has ended without being asked to. Waits for ever otherwise: run it in a task."""
        return await asyncio.shield(self._died)

    async def close(self, grace_s: float = 5.0) -> None:
        """Asks it to end after the running call, then SIGTERM, then SIGKILL to its group. Returns when it is reaped."""
        self._asked = self._asked or "closed by the controller"
        try:
            self._hub.send(self.identity, codec.encode("shutdown", None))
            if await self._exited(grace_s):
                return
            self.child.signal_group(signal.SIGTERM)
            if await self._exited(min(grace_s, _TERM_S)):
                return
        finally:
            self.child.kill()
        if not await self._exited(_KILL_S):
            raise WorkerDied(self.name, f"process {self.child.pid} cannot be ended (state {self.child.state()})")

    def kill(self) -> None:
        """Ends its process group now. Pending calls fail; it is not reported as a death."""
        self._asked = self._asked or "killed by the controller"
        self.child.kill()

    def abandon(self) -> None:
        """Ends and reaps it without the event loop."""
        self._asked = self._asked or "killed by the controller"
        code = self.child.kill_and_wait()
        # At interpreter exit the loop is closed, and nobody waits.
        with suppress(RuntimeError):
            self._conclude(code)

    async def _exited(self, timeout_s: float) -> bool:
        await asyncio.wait([self.child.exited], timeout=timeout_s)
        return self.child.exited.done()

    def check_heartbeat(self, now: float) -> None:
        """`now` is on the hub's clock."""
        limit = self._hub.heartbeat_s
        if self._cause or now - self._heard <= limit:
            return
        state = self.child.state()
        if not self.welcomed and state not in {"T", "t"}:
            self._heard = now  # it still starts: only a stopped one says nothing for ever
            return
        why = "process is stopped or its host is gone"
        if state not in {"", "T", "t"}:
            why = (
                f"process lives, state {state}, but its I/O thread gets no time: native code holds the interpreter lock"
            )
        self._cause = f"no heartbeat for {limit:g} s ({why})"
        self.child.kill()

    def _on_exit(self, code: int) -> None:
        self._hub.drain()
        if self._asked or self._last_words:
            self._conclude(code)
        else:
            self._loop.call_later(_LAST_WORDS_S, self._conclude, code)

    def _conclude(self, code: int) -> None:
        """The end, told once to everybody who waits."""
        if self._end is not None:
            return
        self._hub.drain()
        self._hub.ended(self)
        cause = self._asked or self._cause or describe_exit(code)
        if self._last_words:
            cause = f"{cause}; it said: {self._last_words}"
        end = WorkerDied(self.name, cause, "" if self._asked else self.child.log_tail())
        self._end = end
        for future in self._pending.values():
            if not future.done():
                future.set_exception(end)
        self._pending.clear()
        if not self.ready.done():
            self.ready.set_exception(end)
        if not self._asked and not self._died.done():
            self._died.set_result(end)

    # --- what the hub hands in ----------------------------------------------------------------------------------

    def welcome(self) -> None:
        self.welcomed = True
        self._heard = self._hub.awake_s()

    def refuse(self, error: ProtocolError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)

    def handle(self, message: Message) -> None:
        """A message of this worker after its hello."""
        self._heard = self._hub.awake_s()
        envelope = message.envelope
        if envelope.kind in {"reply", "failure"}:
            future = self._pending.get(envelope.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif envelope.kind == "beat":
            self._take_beat(message.body(Beat))
        elif envelope.kind == "ready":
            if not self.ready.done():
                self.ready.set_result(None)
        elif envelope.kind == "fatal":
            failure = message.body(Failure)
            self._last_words = f"{failure.type_name}: {failure.message}"
            if not self.ready.done():
                self.ready.set_exception(
                    RemoteError(self.name, "build", failure.type_name, failure.message, failure.traceback_text)
                )

    def _take_beat(self, beat: Beat) -> None:
        count, changed = self.progress.count, self.progress.changed
        if beat.progress != count:
            count, changed = beat.progress, self._hub.awake_s() - max(0.0, beat.age_s)
        self.progress = ProgressSnapshot(count, beat.note, beat.counters, changed)


def start_advice(error: BaseException, spec: ProcessSpec, tail: str) -> BaseException:
    """A failed start whose usual cause is another interpreter without a fitting offbeat: says what to do."""
    python = spec.python or sys.executable
    remedy = f"run '{pip_install(python=python)}'"
    cause = ""
    missing = re.search(r"No module named '?([\w.]+)", tail)
    if isinstance(error, ProtocolError):
        return ProtocolError(f"{spec.name}: {error}; {remedy}")
    if not isinstance(error, WorkerDied):
        return error
    if missing and missing.group(1).partition(".")[0] in {"offbeat", "msgspec", "zmq", "numpy"}:
        cause = f"its interpreter {python} has no module {missing.group(1)}: {remedy}"
    elif re.search(r"[Uu]nknown option:? -?-?P", tail):
        cause = f"its interpreter {python} is older than Python 3.11, which offbeat needs"
    elif "speaks protocol" in tail:
        cause = f"its interpreter {python} has another offbeat: {remedy}"
    return WorkerDied(spec.name, cause, tail) if cause else error
