"""The worker of `benchmarks/rpc.py`: answers with what it was sent. With an address as argument: a bare ZeroMQ echo."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
import numpy as np
import zmq

from offbeat.rpc.messages import Arguments, Nothing
from offbeat.rpc.server import Method, WorkerContext, serve


class Echo(Arguments, frozen=True):
    array: np.ndarray


class Echoed(msgspec.Struct, frozen=True):
    array: np.ndarray


def build(_: WorkerContext) -> Mapping[str, Method]:
    return {
        "nothing": Method(Nothing, lambda _: None),
        "urgent": Method(Nothing, lambda _: None, urgent=True),
        "echo": Method(Echo, lambda call: Echoed(call.array)),
    }


def raw_echo(address: str) -> None:
    """Ends at an empty message."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(b"ready")
        while len(frame := socket.recv(copy=False)):
            socket.send(frame, copy=False)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raw_echo(sys.argv[1])
    else:
        serve(build)
