"""The controller's side: starts workers, calls them, and knows at once when one is gone.

    async with Hub() as hub:
        worker = await hub.start(spec, start_s=60)
        answer = await worker.call("describe", Nothing(), EngineDescription, timeout_s=10)

Three signs of life are kept apart: the process (its exit is noticed at once and named), the I/O heartbeat (silence for
`heartbeat_s` ends the worker), and progress (a call whose worker reports none for `stall_s` is given up; the worker
lives on and its owner decides). Time in which this process itself was stopped counts for none of them. When a worker
dies, each of its pending calls fails with the same `WorkerDied`.

Everything runs in the event loop of the main thread. No tasks of its own: callbacks and timers only, so that nothing
is left behind when the owner is cancelled.
"""

from __future__ import annotations

import asyncio
import atexit
import hmac
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from offbeat.errors import ProtocolError, WorkerDied
from offbeat.rpc import codec, guard
from offbeat.rpc.codec import Frame, Message
from offbeat.rpc.messages import WorkSpan
from offbeat.rpc.process import LOG_BYTES, Guard, ProcessSpec
from offbeat.rpc.runtime import clear_stale_folders, create_runtime_folder
from offbeat.rpc.transport import KeyPair, Listener, Transport
from offbeat.rpc.wire import Hello, Invitation, Refused
from offbeat.rpc.worker import ProgressSnapshot, Worker, may_go_unheard, start_advice

__all__ = ["Hub", "ProcessSpec", "ProgressSnapshot", "Worker"]

_log = logging.getLogger("offbeat.rpc")
_RECEIVE_AT_ONCE = 128
_STRANGERS = ""
"""Stands for all peers that are no workers."""


class Complaints:
    """Warnings that anybody on the socket can cause: the first few of a source in a minute, then their number."""

    def __init__(self, few: int = 5, period_s: float = 60.0) -> None:
        self._few, self._period_s = few, period_s
        self._counts: dict[str, int] = {}
        self._since = time.monotonic()

    def add(self, source: str, text: str, *arguments: object) -> None:
        """`source` is a worker's name or all strangers together, so there are only so many."""
        self.tick()
        self._counts[source] = self._counts.get(source, 0) + 1
        if self._counts[source] <= self._few:
            _log.warning(text, *arguments)

    def tick(self) -> None:
        if time.monotonic() - self._since >= self._period_s:
            self.flush()

    def flush(self) -> None:
        """Says how many were kept back, and begins another period."""
        for source, count in self._counts.items():
            if count > self._few:
                who = source or "unknown peers"
                _log.warning("%d more messages from %s were dropped or refused", count - self._few, who)
        self._counts.clear()
        self._since = time.monotonic()


class Hub:
    """Owns the socket, the workers and the runtime folder; leaving it ends all of them.

    Args:
        transport: `ipc` on one host, `tcp` (CURVE, allow-listed keys) otherwise.
        host: the address that `tcp` listens on and workers connect to. IPv4, IPv6 or a name; no wildcard.
        heartbeat_s: silence of a worker's I/O thread after which it is taken for dead and ended.
        grace_s: how long each worker may take to end by itself when the hub is left.
        log_bytes: a process log that is longer loses its middle.
        worked: hears when a process worked on what, as its results tell, in the context of the call; also its start.
    """

    def __init__(
        self,
        transport: Transport = "ipc",
        host: str = "127.0.0.1",
        max_message_bytes: int = codec.MAX_MESSAGE_BYTES,
        heartbeat_s: float = 10.0,
        grace_s: float = 5.0,
        log_bytes: int = LOG_BYTES,
        worked: Callable[[str, Sequence[WorkSpan]], None] = lambda process, spans: None,
    ) -> None:
        self.heartbeat_s = heartbeat_s
        self.max_message_bytes = max_message_bytes
        self.log_bytes = log_bytes
        self.worked = worked
        self.run = ""
        self._complaints = Complaints()
        self._beat_s = min(1.0, heartbeat_s / 5)
        self._transport: Transport = transport
        self._host = host
        self._grace_s = grace_s
        self._workers: dict[bytes, Worker] = {}
        self._names: set[str] = set()
        self._folder: Path | None = None
        self._guard: Guard | None = None

    @property
    def address(self) -> str:
        """Where workers connect to, e.g. `tcp://[::1]:40123`."""
        return self._listener.address

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        for folder in clear_stale_folders():
            # Neither that controller nor its guard could do it.
            guard.end_marked(f"{guard.RUN_VARIABLE}={folder.name}")
        self._folder = create_runtime_folder()
        self.run = self._folder.name
        atexit.register(self._abandon)
        try:
            self._listener = Listener(self._transport, self._host, self._folder, self.max_message_bytes)
        except BaseException:
            self._abandon()
            raise
        self._descriptors = self._listener.descriptors()
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._receive)
        self._guard = Guard(self._folder)
        self._slept_s = 0.0
        self._ticked = time.monotonic()
        self._timer = self._loop.call_later(self._beat_s, self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.gather(*(worker.close(self._grace_s) for worker in list(self._workers.values())))
        finally:
            self._timer.cancel()
            for descriptor in self._descriptors:
                self._loop.remove_reader(descriptor)
            # Whoever is left (this exit was itself cancelled) is killed without further waiting.
            self._abandon()
            self._listener.close()

    def _abandon(self) -> None:
        """Ends everything without an event loop; also the safety net at interpreter exit. May be called again."""
        if os.getpid() != self._pid:
            return  # a fork of the controller: nothing here is its own
        for worker in list(self._workers.values()):
            worker.abandon()
        self._workers.clear()
        self._complaints.flush()
        if self._guard is not None:
            # It has nothing on its list any more but the folder, and looks once more for what carries the run's mark.
            self._guard.close()
            self._guard = None
        if self._folder is not None:
            guard.end_marked(f"{guard.RUN_VARIABLE}={self.run}")
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        atexit.unregister(self._abandon)

    async def start(self, spec: ProcessSpec, *, start_s: float) -> Worker:
        """Starts a worker and returns when its `build` is done. Several may be started at the same time.

        Raises:
            RemoteError: `build` raised; carries its own text.
            WorkerDied: it ended by itself, or was not ready after `start_s` seconds (then its group is ended).
            ProtocolError: it speaks another protocol.
            ConfigError: its interpreter or log cannot be used.
        """
        if spec.name in self._names:
            raise ValueError(f"a process named {spec.name!r} runs already")
        self._names.add(spec.name)
        worker, started = None, time.monotonic()
        try:
            worker, invitation = self._spawn(spec)
            await self._invite(worker, msgspec.json.encode(invitation), start_s)
        except BaseException as error:
            if worker is None:
                self._names.discard(spec.name)
                raise
            note = worker.progress.note
            tail = worker.child.log_tail()
            worker.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(worker.child.exited), 5)
            if isinstance(error, TimeoutError):
                last = f"; last progress: {note}" if note else ""
                cause = (
                    f"not ready after {start_s:g} s, so it was ended{last}; if that is too short, raise the start limit"
                )
                raise WorkerDied(spec.name, cause, tail) from None
            raise start_advice(error, spec, tail) from error.__cause__
        self.worked(spec.name, (WorkSpan("start", started, time.monotonic()),))
        return worker

    async def _invite(self, worker: Worker, line: bytes, start_s: float) -> None:
        """Returns when the worker is ready. TimeoutError after `start_s` seconds in which this process was awake."""
        end = self.awake_s() + start_s
        sending = asyncio.ensure_future(asyncio.to_thread(worker.child.send_line, line))
        may_go_unheard(sending)
        try:
            pending: set[asyncio.Future[None]] = {sending, worker.ready}
            while pending:
                left_s = end - self.awake_s()
                if left_s <= 0:
                    raise TimeoutError
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
        finally:
            sending.cancel()

    def _spawn(self, spec: ProcessSpec) -> tuple[Worker, Invitation]:
        keys = KeyPair() if self._transport == "tcp" else None
        identity = f"{spec.name}-{secrets.token_hex(6)}"
        token = secrets.token_hex(32)
        worker = Worker(spec, identity.encode(), token, self)
        if keys is not None:
            worker.public_key = keys.public
            self._listener.admit(keys.public, worker.identity)
        self._workers[worker.identity] = worker
        assert self._guard is not None, "the hub is not open"
        self._guard.add(worker.child.pid)
        invitation = Invitation(
            protocol=codec.PROTOCOL,
            name=spec.name,
            address=self._listener.address,
            identity=identity,
            token=token,
            settings=dict(spec.settings),
            parent_pid=os.getpid(),
            parent_started=guard.start_ticks(os.getpid()),
            beat_s=self._beat_s,
            max_message_bytes=self.max_message_bytes,
            server_key=self._listener.server_key,
            public_key=keys.public if keys else "",
            secret_key=keys.secret if keys else "",
        )
        return worker, invitation

    # --- for Worker ---------------------------------------------------------------------------------------------

    def send(self, identity: bytes, frames: list[Frame]) -> bool:
        """Never blocks; False when the peer is not connected or its queue is full."""
        if self._folder is None:
            return False
        sent = self._listener.send(identity, frames)
        # The descriptors are edge-triggered, and a send may have taken the edge.
        self._loop.call_soon(self._receive)
        return sent

    def awake_s(self) -> float:
        """A clock that stands still while this process is stopped, or too busy to listen: all limits go by it.

        What workers said meanwhile is still to be read. One reading of the clock decides, so that a stop at any place
        of the code is seen.
        """
        return self._awake_at(time.monotonic())

    def _awake_at(self, now: float) -> float:
        late_s = now - self._ticked - self._beat_s
        return now - self._slept_s - (late_s if late_s > self._beat_s else 0.0)

    def drain(self) -> None:
        """Handles what has arrived: a dead worker's last words may still be there."""
        self._receive()

    def ended(self, worker: Worker) -> None:
        """The worker is reaped and its group ended."""
        self._workers.pop(worker.identity, None)
        self._names.discard(worker.name)
        self._listener.expel(worker.public_key)
        if self._guard is not None:
            self._guard.discard(worker.child.pid)

    # --- receiving ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(_RECEIVE_AT_ONCE):
            # After the hub was left, callbacks may still be on their way.
            received = self._listener.receive() if self._folder is not None else None
            if received is None:
                return
            identity, frames = received
            try:
                self._dispatch(identity, codec.decode(frames, max_bytes=self.max_message_bytes))
            except ProtocolError as error:
                worker = self._workers.get(identity)
                source = worker.name if worker else _STRANGERS
                self._complaints.add(source, "message from %r dropped: %s", identity[:60], error)
        self._loop.call_soon(self._receive)

    def _dispatch(self, identity: bytes, message: Message) -> None:
        worker = self._workers.get(identity)
        if worker is None:
            self._refuse(identity, "this peer was not started by this controller")
        elif worker.welcomed:
            worker.handle(message)
        elif message.envelope.kind == "hello":
            self._greet(worker, message)

    def _greet(self, worker: Worker, message: Message) -> None:
        try:
            codec.check_protocol(message.envelope.protocol, f"{worker.name} ({worker.spec.python or sys.executable})")
            hello = message.body(Hello)
            if not hmac.compare_digest(hello.token.encode(), worker.token.encode()):
                raise ProtocolError(f"{worker.name}: wrong token")
        except ProtocolError as error:
            self._refuse(worker.identity, str(error))
            worker.refuse(error)
            return
        worker.welcome()
        self.send(worker.identity, codec.encode("welcome", None))

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._complaints.add(_STRANGERS, "peer %r refused: %s", identity[:60], reason)
        self.send(identity, codec.encode("refused", Refused(reason=reason)))

    def _tick(self) -> None:
        """Looks for silent workers; also drains, in case an edge was missed."""
        now = time.monotonic()
        awake_s = self._awake_at(now)
        self._slept_s, self._ticked = now - awake_s, now
        self._timer = self._loop.call_later(self._beat_s, self._tick)
        self._receive()
        self._complaints.tick()
        if self._guard is not None:
            self._guard.check()
        for worker in list(self._workers.values()):
            worker.child.bound_log()
            worker.check_heartbeat(awake_s)
