"""How fast weights move: the whole transfer beside a raw gloo broadcast of the same bytes, in one run.

    python benchmarks/weight_sync.py [--engines 1] [--repeats 5] [--sizes tiny,135m]

Sender and engines are processes on this machine, joined over loopback. Printed for each size: seconds and bytes a
second of the raw broadcast and of the transfer (cast, pack, send, load, both digests), their ratio, and the share that
the digest of the engine's memory takes. Absolute numbers depend on the machine; the ratios are what to look at.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import WeightsCommit, WeightsJoin, WeightsMove, WeightsOffer, WeightsOffered
from offbeat.rpc.server import Progress
from offbeat.trainer.weight_source import ModelWeightSource
from offbeat.weights.group import Group
from offbeat.weights.receiver import WeightReceiver
from offbeat.weights.rendezvous import Rendezvous, connect
from offbeat.weights.sender import WeightSender
from offbeat.weights.session import EngineState
from offbeat.weights.verify import digest

SHAPES = {"tiny": (78, 128, 384, 2), "135m": (49152, 576, 1536, 30)}
"""Size → vocabulary, hidden, feed-forward, layers of a decoder with tied embeddings."""
BUCKET = 64 << 20


class Decoder(nn.Module):
    """The tensors of a small decoder (full attention heads), without the arithmetic."""

    def __init__(self, vocab: int, hidden: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(hidden, hidden, bias=False) for name in "qkvo"},
                    "gate": nn.Linear(hidden, inner, bias=False),
                    "up": nn.Linear(hidden, inner, bias=False),
                    "down": nn.Linear(inner, hidden, bias=False),
                    "norm": nn.RMSNorm(hidden),
                }
            )
            for _ in range(layers)
        )


def engine(pipe: Connection, rank: int, members: int, shape: tuple[int, int, int, int]) -> None:
    torch.set_num_threads(1)
    model = Decoder(*shape)
    state = EngineState()
    receiver = WeightReceiver(ModelWeightSink(model, "float32"), state, Progress())
    while (message := pipe.recv()) is not None:
        kind, value = message
        if kind == "raw":
            broadcast(value, rank, members, pipe)
        elif kind == "join":
            pipe.send(receiver.prepare(value))
        elif kind == "move":
            pipe.send(receiver.receive(value))
            receiver.commit(WeightsCommit(version=value.version))
        elif kind == "digest":
            started = time.perf_counter()
            for tensor in model.state_dict().values():
                digest(tensor)
            pipe.send(time.perf_counter() - started)


def broadcast(value: tuple[Any, str, int, int], rank: int, members: int, pipe: Connection) -> None:
    endpoint, nonce, size, repeats = value
    store = connect(endpoint, nonce, rank, 30)
    group = Group("gloo", store, name="raw", rank=rank, members=members, address=endpoint.host, timeout_s=30)
    buffer = torch.zeros(min(size, BUCKET), dtype=torch.uint8)
    for _ in range(repeats):
        for start in range(0, size, BUCKET):
            group.broadcast(buffer[: min(BUCKET, size - start)], 60)
    group.close()
    pipe.send("done")


def raw_seconds(pipes: list[Connection], size: int, repeats: int) -> list[float]:
    members = 1 + len(pipes)
    server = Rendezvous("127.0.0.1", "raw", members, 30)
    for pipe in pipes:
        pipe.send(("raw", (server.endpoint, "raw", size, repeats)))
    store = connect(server.endpoint, "raw", 0, 30)
    group = Group("gloo", store, name="raw", rank=0, members=members, address=server.endpoint.host, timeout_s=30)
    buffer = torch.zeros(min(size, BUCKET), dtype=torch.uint8)
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        for start in range(0, size, BUCKET):
            group.broadcast(buffer[: min(BUCKET, size - start)], 60)
        times.append(time.perf_counter() - started)
    for pipe in pipes:
        pipe.recv()
    group.close()
    server.close()
    return times


def transfer_seconds(pipes: list[Connection], model: nn.Module, repeats: int) -> tuple[list[float], int]:
    version = 0
    sender = WeightSender(ModelWeightSource(model), lambda: version, Progress())
    times: list[float] = []
    size = 0
    for version in range(1, repeats + 2):
        started = time.perf_counter()
        call = WeightsOffer(
            nonce="transfer", host="127.0.0.1", backend="gloo", dtype="float32", bucket_bytes=BUCKET,
            members=1 + len(pipes), timeout_s=60,
        )  # fmt: skip
        offered = sender.offer(call)
        for rank, pipe in enumerate(pipes, start=1):
            pipe.send(("join", join(offered, call, rank)))
        for pipe in pipes:
            pipe.recv()
        move = WeightsMove(nonce="transfer", version=version, timeout_s=60, stall_s=60)
        for pipe in pipes:
            pipe.send(("move", move))
        sent = sender.send(move)
        for pipe in pipes:
            assert pipe.recv().digests == sent.digests
        times.append(time.perf_counter() - started)
        size = sent.bytes_moved
    return times[1:], size  # the first one makes the group


def join(offered: WeightsOffered, call: WeightsOffer, rank: int) -> WeightsJoin:
    return WeightsJoin(
        nonce=call.nonce, host=offered.host, port=offered.port, rank=rank, members=call.members, backend=call.backend,
        bucket_bytes=call.bucket_bytes, manifest=offered.manifest, manifest_hash=offered.manifest_hash, timeout_s=60,
    )  # fmt: skip


def measure(name: str, engines: int, repeats: int) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    model = Decoder(*SHAPES[name])
    pairs = [context.Pipe() for _ in range(engines)]
    processes = [
        context.Process(target=engine, args=(theirs, rank, 1 + engines, SHAPES[name]), daemon=True)
        for rank, (_, theirs) in enumerate(pairs, start=1)
    ]
    for process in processes:
        process.start()
    pipes = [ours for ours, _ in pairs]
    moved, size = transfer_seconds(pipes, model, repeats)
    raw = raw_seconds(pipes, size, repeats)
    pipes[0].send(("digest", None))
    digests = float(pipes[0].recv())
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(10)
    one, two = statistics.median(raw), statistics.median(moved)
    print(
        f"{name:>5} {size / 1e6:8.1f} MB, {engines} engine(s): raw {one * 1e3:8.1f} ms {size / one / 1e9:5.2f} GB/s, "
        f"transfer {two * 1e3:8.1f} ms {size / two / 1e9:5.2f} GB/s, ratio {two / one:4.1f}, "
        f"digest in the engine {digests / two:4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", default="tiny,135m")
    options = parser.parse_args()
    for name in options.sizes.split(","):
        measure(name, options.engines, options.repeats)


if __name__ == "__main__":
    main()
