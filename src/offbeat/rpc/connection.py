"""The worker's I/O thread: the only user of its socket, alive while the main thread computes.

main thread                              I/O thread
next_request() ◀── waiting (FIFO) ◀───── call          (urgent ones are answered here)
reply / failure / fatal ──▶ outbox ────▶ socket        (encoded by the caller; a byte wakes the poll)
                                         beat, every `beat_s`
"""

from __future__ import annotations

import faulthandler
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq

from offbeat import __version__
from offbeat.errors import ProtocolError
from offbeat.rpc import codec
from offbeat.rpc.codec import Frame, Message
from offbeat.rpc.failure import failure_of
from offbeat.rpc.transport import bound
from offbeat.rpc.wire import Beat, Cancel, Failure, Hello, Invitation, Refused

MAX_WAITING = 1024
_FLUSH_S = 2.0
_RECEIVE_AT_ONCE = 64


@dataclass(frozen=True)
class Request:
    """A call that waits for the main thread."""

    message: Message


class Connection:
    """Every method but `start` is thread-safe."""

    def __init__(self, invitation: Invitation, beat: Callable[[int], Beat]) -> None:
        self.refusal = ""
        self._invitation = invitation
        self._beat = beat
        self._waiting: SimpleQueue[Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued: set[int] = set()
        self._running = 0
        self._urgent: Callable[[Message], bool] | None = None
        self._outbox: deque[list[Frame]] = deque()
        self._answered = threading.Event()
        self._stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="offbeat i/o", daemon=True)

    # --- the main thread's side ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> bool:
        """False: no answer in time, or refused (`refusal` has the reason)."""
        return self._answered.wait(timeout_s) and not self.refusal

    def ready(self, urgent: Callable[[Message], bool]) -> None:
        """`build` is done. `urgent` is asked on the I/O thread; False sends the request to the main thread."""
        self._urgent = urgent
        self._post("ready", None)

    def next_request(self) -> Request | None:
        """Waits for the next request that is still wanted; None when the hub said shutdown."""
        with self._lock:
            self._running = 0
        while (request := self._waiting.get()) is not None:
            call = request.message.envelope.id
            with self._lock:
                if call in self._queued:
                    self._queued.discard(call)
                    self._running = call
                    return request
            # Cancelled while it waited: its arrays must not outlive it here either.
            del request
        return None

    def reply(self, call: int, result: Any) -> None:
        """Raises `ProtocolError` when the result cannot travel: nothing was sent then."""
        self._post("reply", result, call)

    def failure(self, call: int, failure: Failure) -> None:
        self._post("failure", failure, call)

    def fatal(self, failure: Failure) -> None:
        self._post("fatal", failure)

    def finish(self) -> None:
        """Sends what is waiting, then closes; bounded."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _FLUSH_S)

    def _post(self, kind: str, body: Any, call: int = 0) -> None:
        self._outbox.append(codec.encode(kind, body, id=call, max_bytes=self._invitation.max_message_bytes))
        self._wake()

    def _wake(self) -> None:
        # A full pipe means that the thread is being woken already.
        with suppress(BlockingIOError, OSError):
            self._wake_in.send(b"\0")

    # --- the I/O thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with zmq.Context() as context, self._connect(context) as dealer:
                self._loop(dealer)
                dealer.close(linger=int(_FLUSH_S * 1000))
        except BaseException:
            # A silent worker is worse than a dead one: end with the reason in the log.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        finally:
            self._waiting.put(None)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        invitation = self._invitation
        dealer = context.socket(zmq.DEALER)
        bound(dealer, invitation.max_message_bytes)
        dealer.set(zmq.ROUTING_ID, invitation.identity.encode())
        dealer.set(zmq.IPV6, 1)
        dealer.set(zmq.RECONNECT_IVL_MAX, 2000)
        if invitation.server_key:
            dealer.set(zmq.CURVE_SERVERKEY, invitation.server_key.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, invitation.public_key.encode())
            dealer.set(zmq.CURVE_SECRETKEY, invitation.secret_key.encode())
        dealer.connect(invitation.address)
        hello = Hello(
            token=invitation.token,
            pid=os.getpid(),
            offbeat_version=__version__,
            python_version=platform.python_version(),
        )
        dealer.send_multipart(codec.encode("hello", hello))
        return dealer

    def _loop(self, dealer: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        next_beat = time.monotonic() + self._invitation.beat_s
        give_up = float("inf")
        while True:
            flushed = self._flush(dealer)
            if self._stopping:
                give_up = min(give_up, time.monotonic() + _FLUSH_S)
                if flushed or time.monotonic() > give_up:
                    return
            poller.register(dealer, zmq.POLLIN if flushed else zmq.POLLIN | zmq.POLLOUT)
            poller.poll(int(max(0.0, next_beat - time.monotonic()) * 1000) + 1)
            self._drain_wake()
            self._receive(dealer)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self._invitation.beat_s
                if self._answered.is_set():
                    self._outbox.append(codec.encode("beat", self._beat(self._running)))

    def _flush(self, dealer: zmq.Socket[bytes]) -> bool:
        """Sends what is waiting; False when the socket takes no more for now."""
        while self._outbox:
            try:
                dealer.send_multipart(self._outbox[0], flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._outbox.popleft()
        return True

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        for _ in range(_RECEIVE_AT_ONCE):
            try:
                frames = dealer.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = codec.decode([frame.buffer for frame in frames], max_bytes=self._invitation.max_message_bytes)
                self._handle(message)
            except ProtocolError as error:
                print(f"offbeat: message dropped: {error}", file=sys.stderr, flush=True)

    def _handle(self, message: Message) -> None:
        envelope = message.envelope
        if envelope.kind == "call":
            self._accept(message)
        elif envelope.kind == "cancel":
            self._cancel(envelope.id, message.body(Cancel))
        elif envelope.kind == "shutdown":
            with self._lock:
                self._queued.clear()
            self._waiting.put(None)
        elif envelope.kind == "welcome":
            codec.check_protocol(envelope.protocol, "the controller")
            self._answered.set()
        elif envelope.kind == "refused":
            self.refusal = message.body(Refused).reason
            self._answered.set()

    def _accept(self, message: Message) -> None:
        call = message.envelope.id
        try:
            codec.check_protocol(message.envelope.protocol, "the controller")
            if self._urgent is None:
                raise ProtocolError("this worker is still starting")
            if self._urgent(message):
                return
            with self._lock:
                if len(self._queued) >= MAX_WAITING:
                    raise ProtocolError(f"{MAX_WAITING} calls are waiting already")
                self._queued.add(call)
            self._waiting.put(Request(message))
        except ProtocolError as error:
            self.failure(call, failure_of(error))

    def _cancel(self, call: int, cancel: Cancel) -> None:
        with self._lock:
            self._queued.discard(call)
            running = self._running == call
        if running and cancel.stacks:
            print(f"offbeat: call {call} took too long; stacks of all threads:", file=sys.stderr, flush=True)
            with suppress(Exception):
                faulthandler.dump_traceback(all_threads=True)
