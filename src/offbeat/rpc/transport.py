"""The hub's listening socket: a ZeroMQ ROUTER on `ipc` or on `tcp` with CURVE and an allow-list of client keys.

    ipc  a socket in a 0700 folder: the file system keeps other users out
    tcp  one address (loopback by default), a port that the bind chooses, a fresh server key; each worker gets a key
         pair of its own and the ZAP handler lets in exactly those (without a handler any key would be let in)

Both check the token at hello as well. The sockets are used from the event loop's thread only.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from offbeat.network import listen
from offbeat.rpc.codec import Frame
from offbeat.rpc.runtime import SOCKET

Transport = Literal["ipc", "tcp"]
HIGH_WATER = 256
"""Messages a peer may have waiting in each direction."""
_ZAP = "inproc://zeromq.zap.01"


class KeyPair:
    """A CURVE key pair in Z85."""

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self.public, self.secret = public.decode(), secret.decode()


def bound(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    """The limits that hub and workers share: nothing waits or grows without end."""
    socket.set(zmq.SNDHWM, HIGH_WATER)
    socket.set(zmq.RCVHWM, HIGH_WATER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, max_bytes)
    socket.set(zmq.HANDSHAKE_IVL, 10_000)


class Listener:
    """The bound ROUTER. `admit` a client's public key before it connects, `expel` it when it has ended."""

    def __init__(self, transport: Transport, host: str, folder: Path | None, max_bytes: int) -> None:
        """Binds at once.

        Raises:
            ConfigError: a wildcard, a name that does not resolve, or an address that is not this machine's.
        """
        self._allowed: dict[bytes, bytes] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap: zmq.Socket[bytes] | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self.server_key = ""
        try:
            bound(self._socket, max_bytes)
            self._socket.set(zmq.ROUTER_MANDATORY, 1)
            if transport == "ipc":
                assert folder is not None
                self.address = f"ipc://{folder / SOCKET}"
                self._socket.bind(self.address)
            else:
                self.address = self._bind_tcp(host)
        except BaseException:
            self.close()
            raise

    def _bind_tcp(self, host: str) -> str:
        self._zap = self._context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        keys = KeyPair()
        self.server_key = keys.public
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.set(zmq.ZAP_DOMAIN, b"offbeat")
        self._socket.set(zmq.IPV6, 1)
        # Bound by us and handed over, so that names, scopes and both address families behave as everywhere else.
        opened, endpoint = listen(host)
        self._socket.set(zmq.USE_FD, opened.detach())
        address = f"tcp://{endpoint}"
        self._socket.bind(address)
        return address

    def admit(self, public_key: str, identity: bytes) -> None:
        self._allowed[public_key.encode()] = identity

    def expel(self, public_key: str) -> None:
        self._allowed.pop(public_key.encode(), None)

    def descriptors(self) -> list[int]:
        """To watch for reading. Edge-triggered: call `receive` until it gives None after each event *and each send*."""
        sockets = [self._socket] if self._zap is None else [self._socket, self._zap]
        return [int(socket.get(zmq.FD)) for socket in sockets]

    def send(self, identity: bytes, frames: list[Frame]) -> bool:
        """Never blocks. False: the peer is not connected, or its queue is full."""
        try:
            self._socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def receive(self) -> tuple[bytes, list[Frame]] | None:
        """The next message as (identity, frames); None when there is none. Answers waiting key checks first.

        A peer whose key belongs to another identity is given the identity `b""`, which nobody has.
        """
        self._answer_zap()
        try:
            identity, *frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        name = identity.bytes
        if self._zap is not None and identity_of(frames) != name:
            name = b""
        return name, [frame.buffer for frame in frames]

    def _answer_zap(self) -> None:
        """ZeroMQ's authentication protocol (rfc.zeromq.org/spec/27): who has which key may come in."""
        while self._zap is not None:
            try:
                request = self._zap.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            user = b""
            if len(request) == 7 and request[2] == b"offbeat" and request[5] == b"CURVE":
                with suppress(ValueError):
                    user = self._allowed.get(z85.encode(request[6]), b"")
            code, text = (b"200", b"OK") if user else (b"400", b"unknown key")
            sequence = request[1] if len(request) > 1 else b""
            self._zap.send_multipart([b"1.0", sequence, code, text, user, b""])

    def close(self) -> None:
        for socket in (self._socket, self._zap):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()


def identity_of(frames: list[zmq.Frame]) -> bytes:
    """The identity that the ZAP handler found for the key of a message's sender."""
    try:
        user = frames[0].get("User-Id") if frames else ""
    except zmq.ZMQError:
        return b""
    return user.encode() if isinstance(user, str) else b""
