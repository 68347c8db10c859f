"""Who is let in. Strangers, wrong keys, wrong tokens and hostile bytes change nothing for the run."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from rpc_harness import rss_bytes, with_worker
from rpc_worker import Fail, Text
from zmq.utils.monitor import recv_monitor_message

from offbeat.rpc import codec
from offbeat.rpc.client import Hub, Worker
from offbeat.rpc.transport import Listener
from offbeat.rpc.wire import Failure, Hello, Refused
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

MARKER_PICKLE = b"cposix\nsystem\n(S'touch %s'\ntR."


async def still_serves(worker: Worker) -> None:
    answer = await worker.call("fail", Fail(how="none"), Text, timeout_s=10)
    assert answer.value == "survived"


def dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.LINGER, 200)
    peer.set(zmq.IPV6, 1)
    if identity is not None:
        peer.set(zmq.ROUTING_ID, identity)
    peer.connect(address)
    return peer


async def answer_of(peer: zmq.Socket[bytes], timeout_s: float = 3.0) -> codec.Message | None:
    """What the hub says to this peer; None when it says nothing."""
    for _ in range(int(timeout_s / 0.02)):
        if peer.poll(0):
            return codec.decode(peer.recv_multipart())
        await asyncio.sleep(0.02)
    return None


def test_strangers_on_the_socket_are_refused_and_do_no_harm_B002(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    async def body(hub: Hub, worker: Worker) -> None:
        rng = np.random.default_rng(1)
        with zmq.Context() as context, dealer(context, hub.address, b"stranger") as peer:
            payloads = [b"", b"\x80", MARKER_PICKLE % bytes(marker), rng.bytes(10), rng.bytes(100_000)]
            for payload in payloads:
                peer.send(payload)
                peer.send_multipart([payload, payload])
            hello = Hello(token="0" * 64, pid=1, offbeat_version="0", python_version="0")
            peer.send_multipart(codec.encode("hello", hello))
            reply = await answer_of(peer)
            assert reply is not None
            assert reply.envelope.kind == "refused"
            assert "not started by this controller" in reply.body(Refused).reason
            peer.send_multipart(codec.encode("fatal", Failure(type_name="x", message="y", traceback_text="")))
            peer.send_multipart(codec.encode("call", Fail(how="sys.exit"), id=1, method="fail"))
            await asyncio.sleep(0.1)
            await still_serves(worker)

    with no_leaks():
        with_worker(tmp_path, body)
    assert not marker.exists()


def test_a_second_peer_cannot_take_over_the_name_of_a_worker(tmp_path: Path) -> None:
    async def body(hub: Hub, worker: Worker) -> None:
        with zmq.Context() as context, dealer(context, hub.address, worker.identity) as peer:
            peer.send_multipart(codec.encode("fatal", Failure(type_name="x", message="y", traceback_text="")))
            assert await answer_of(peer, 0.3) is None
            await still_serves(worker)

    with_worker(tmp_path, body)


def test_raw_bytes_and_absurd_lengths_do_not_end_or_fill_the_controller_B002(tmp_path: Path) -> None:
    async def body(hub: Hub, worker: Worker) -> None:
        before = rss_bytes(os.getpid())
        path = hub.address.removeprefix("ipc://")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        command = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        ready = bytes([4, len(command)]) + command
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", greeting, greeting + ready + b"\x02" + struct.pack(">Q", 1 << 40)):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(data)
                await asyncio.sleep(0.1)
                await still_serves(worker)
        assert rss_bytes(os.getpid()) - before < 64 << 20

    with_worker(tmp_path, body)


def with_tcp(folder: Path, body: Callable[[Hub, Worker], Awaitable[None]], host: str = "127.0.0.1") -> None:
    with no_leaks():
        with_worker(folder, body, transport="tcp", host=host)


def keyed(
    context: zmq.Context[zmq.Socket[bytes]], identity: bytes, server_key: bytes, keys: tuple[bytes, bytes]
) -> zmq.Socket[bytes]:
    """Not connected yet: a monitor must be there before, or it misses the connection."""
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.LINGER, 0)
    peer.set(zmq.IPV6, 1)
    peer.set(zmq.ROUTING_ID, identity)
    if server_key:
        peer.set(zmq.CURVE_SERVERKEY, server_key)
        peer.set(zmq.CURVE_PUBLICKEY, keys[0])
        peer.set(zmq.CURVE_SECRETKEY, keys[1])
    return peer


@pytest.mark.parametrize("keys", ["none", "own pair", "wrong server key"])
def test_tcp_lets_in_only_the_keys_that_it_gave_out_B002(tmp_path: Path, keys: str) -> None:
    async def body(hub: Hub, worker: Worker) -> None:
        right = listener_of(hub).server_key.encode()
        server_key = {"none": b"", "own pair": right, "wrong server key": zmq.curve_keypair()[0]}[keys]
        with zmq.Context() as context:
            peer = keyed(context, b"stranger", server_key, zmq.curve_keypair())
            with peer.get_monitor_socket() as monitor:
                peer.connect(hub.address)
                peer.send_multipart(codec.encode("call", Fail(how="sys.exit"), id=1, method="fail"))
                events = await events_of(monitor, 0.7)
                peer.disable_monitor()
            assert zmq.Event.CONNECTED in events
            assert zmq.Event.HANDSHAKE_SUCCEEDED not in events
            assert not peer.poll(0)
            peer.close(linger=0)
        await still_serves(worker)

    with_tcp(tmp_path, body)


async def events_of(monitor: zmq.Socket[bytes], seconds: float) -> set[int]:
    events: set[int] = set()
    for _ in range(int(seconds / 0.02)):
        while monitor.poll(0):
            events.add(int(recv_monitor_message(monitor)["event"]))
        await asyncio.sleep(0.02)
    return events


def test_a_peer_with_a_given_key_cannot_speak_for_another_worker(tmp_path: Path) -> None:
    async def body(hub: Hub, worker: Worker) -> None:
        listener = listener_of(hub)
        keys = zmq.curve_keypair()
        listener.admit(keys[0].decode(), b"engine-7")
        with zmq.Context() as context:
            for identity, heard in ((b"engine-7", True), (b"engine-8", False)):
                peer = keyed(context, identity, listener.server_key.encode(), keys)
                peer.connect(hub.address)
                peer.send_multipart(codec.encode("hello", None))
                # Both are unknown as workers; only the one with its own name is told so.
                assert (await answer_of(peer, 3 if heard else 0.7) is not None) == heard
                peer.close(linger=0)
        await still_serves(worker)

    with_tcp(tmp_path, body, "::1")


def listener_of(hub: Hub) -> Listener:
    return hub._listener  # pyright: ignore[reportPrivateUsage] its keys have no public use


def visible_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def test_the_runtime_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    folders: list[Path] = []

    async def body(hub: Hub, worker: Worker) -> None:
        folder = Path(hub.address.removeprefix("ipc://")).parent
        folders.append(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(hub.address.removeprefix("ipc://").encode()) <= 107
        assert worker.token.encode() not in visible_of(worker.child.pid), "a secret is visible to other users"

    with_worker(tmp_path, body)
    assert not folders[0].exists()
