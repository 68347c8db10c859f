"""Round trips of the RPC between two processes, and as a share of bare ZeroMQ's in the same run.

    python benchmarks/rpc.py [ipc|tcp]

Both sides use two processes and one message in flight. Read the ratios: absolute numbers depend on the machine and on
what else runs there. The bare echo decodes nothing, has no threads to wake and no encryption.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import zmq
from rpc_echo import Echo, Echoed

from offbeat.rpc.client import Hub, ProcessSpec, Worker
from offbeat.rpc.messages import Nothing
from offbeat.rpc.transport import Transport

SIZES = {"no-op": 1, "1 MB": 1_000_000, "16 MB": 16_000_000}
SECONDS = 2.0
ROUNDS = 3


def main() -> None:
    transport: Transport = "tcp" if sys.argv[1:] == ["tcp"] else "ipc"
    with tempfile.TemporaryDirectory(prefix="rpc-") as name:
        folder = Path(name)
        raw = measure_raw(folder, transport)
        ours, start_s = asyncio.run(measure_ours(folder, transport))
    print(f"{transport}; start of a worker: {start_s:.2f} s")
    print(f"{'message':>14} {'round trips/s':>14} {'MB/s each way':>14} {'bare ZeroMQ/s':>14} {'ratio':>6}")
    for label, rate in ours.items():
        size = SIZES.get(label, 0)
        bare = raw[label if label in raw else "no-op"]
        moved = f"{rate * size / 1e6:.0f}" if size > 1 else "-"
        print(f"{label:>14} {rate:14.0f} {moved:>14} {bare:14.0f} {rate / bare:6.2f}")


def measure_raw(folder: Path, transport: Transport) -> dict[str, float]:
    """Best of some rounds, in round trips a second."""
    rates: dict[str, float] = {}
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.bind(f"ipc://{folder}/raw" if transport == "ipc" else "tcp://127.0.0.1:*")
        address = socket.get_string(zmq.LAST_ENDPOINT)
        peer = subprocess.Popen([sys.executable, str(Path(__file__).with_name("rpc_echo.py")), address])
        try:
            identity, _ = socket.recv_multipart()
            for label, size in SIZES.items():
                data = bytes(size)

                def once(data: bytes = data) -> None:
                    socket.send_multipart([identity, data], copy=False)
                    socket.recv_multipart(copy=False)

                rates[label] = max(rate_of(once) for _ in range(ROUNDS))
            socket.send_multipart([identity, b""])
            peer.wait(10)
        finally:
            peer.kill()
            peer.wait()
    return rates


def rate_of(once: Callable[[], None]) -> float:
    once()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS / ROUNDS:
        once()
        count += 1
    return count / (time.perf_counter() - started)


async def measure_ours(folder: Path, transport: Transport) -> tuple[dict[str, float], float]:
    here = str(Path(__file__).parent)
    spec = ProcessSpec("echo-0", "rpc_echo", {}, folder / "echo.log", env={"PYTHONPATH": here})
    async with Hub(transport) as hub:
        started = time.perf_counter()
        worker = await hub.start(spec, start_s=60)
        start_s = time.perf_counter() - started
        rates: dict[str, float] = {}
        for label in ("no-op", "no-op, urgent"):
            method = "urgent" if "urgent" in label else "nothing"
            rates[label] = await best(lambda m=method: worker.call(m, Nothing(), Nothing, timeout_s=60))
        for label in ("1 MB", "16 MB"):
            array = np.zeros(SIZES[label], np.uint8)
            rates[label] = await best(lambda a=array: echo(worker, a))
        return rates, start_s


async def echo(worker: Worker, array: np.ndarray) -> None:
    await worker.call("echo", Echo(array=array), Echoed, timeout_s=60)


async def best(once: Callable[[], Awaitable[object]]) -> float:
    rates: list[float] = []
    for _ in range(ROUNDS):
        await once()
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < SECONDS / ROUNDS:
            await once()
            count += 1
        rates.append(count / (time.perf_counter() - started))
    return max(rates)


if __name__ == "__main__":
    main()
