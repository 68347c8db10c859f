"""One sender and some receivers in threads of one process, over real gloo, with the calls that a controller makes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import (
    Manifest,
    WeightsAbandon,
    WeightsCommit,
    WeightsJoin,
    WeightsJoined,
    WeightsMove,
    WeightsMoved,
    WeightsOffer,
    WeightsOffered,
)
from offbeat.rpc.server import Progress
from offbeat.trainer.weight_source import ModelWeightSource
from offbeat.weights.receiver import WeightReceiver
from offbeat.weights.sender import WeightSender
from offbeat.weights.session import EngineState


class Model(nn.Module):
    """Parameters of several sizes, an empty one, a scalar, buffers of both kinds, and an optional tied head."""

    def __init__(self, seed: int, *, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(40, 24, generator=generator))
        self.scale = nn.Parameter(torch.randn((), generator=generator))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.odd = nn.Parameter(torch.randn(7, 3, generator=generator))
        self.head = self.embed if tied else nn.Parameter(torch.randn(40, 24, generator=generator))
        self.last = nn.Parameter(torch.zeros(2, 0))
        self.register_buffer("bias", torch.randn(5, generator=generator))
        self.register_buffer("count", torch.tensor([seed, 2, 3]))
        self.register_buffer("scratch", torch.full((4,), float(seed)), persistent=False)


@dataclass
class Rig:
    """One sender, some receivers, the calls that a controller makes."""

    source: Any
    sinks: list[Any]
    host: str = "127.0.0.1"
    bucket_bytes: int = 1024
    dtype: str | None = None
    backend: str = "gloo"
    timeout_s: float = 60.0
    stall_s: float = 30.0
    version: int = 1
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        self.sender = WeightSender(self.source, lambda: self.version, Progress())
        self.states = [EngineState() for _ in self.sinks]
        pairs = zip(self.sinks, self.states, strict=True)
        self.receivers = [WeightReceiver(sink, state, Progress()) for sink, state in pairs]

    def offer(self) -> WeightsOffered:
        return self.sender.offer(
            WeightsOffer(
                nonce=self.nonce, host=self.host, backend=self.backend, dtype=self.dtype,
                bucket_bytes=self.bucket_bytes,
                members=1 + len(self.sinks), timeout_s=self.timeout_s,
            )
        )  # fmt: skip

    def join(self, offered: WeightsOffered, rank: int, **changed: Any) -> WeightsJoin:
        values: dict[str, Any] = {
            "nonce": self.nonce, "host": offered.host, "port": offered.port, "rank": rank, "backend": self.backend,
            "members": 1 + len(self.sinks), "bucket_bytes": self.bucket_bytes, "manifest": offered.manifest,
            "manifest_hash": offered.manifest_hash, "timeout_s": self.timeout_s,
        }  # fmt: skip
        return WeightsJoin(**{**values, **changed})

    def prepare(self, offered: WeightsOffered) -> list[WeightsJoined]:
        return [r.prepare(self.join(offered, rank)) for rank, r in enumerate(self.receivers, start=1)]

    def move(self) -> list[WeightsMoved | BaseException]:
        """Results or errors: the sender's first."""
        call = WeightsMove(nonce=self.nonce, version=self.version, timeout_s=self.timeout_s, stall_s=self.stall_s)
        work: list[Callable[[WeightsMove], WeightsMoved]] = [self.sender.send, *(r.receive for r in self.receivers)]
        with ThreadPoolExecutor(len(work)) as pool:
            futures = [pool.submit(one, call) for one in work]
            return [future.exception() or future.result() for future in futures]

    def sync(self) -> tuple[WeightsOffered, list[WeightsMoved]]:
        offered = self.offer()
        self.prepare(offered)
        moved = self.move()
        for one in moved:
            if isinstance(one, BaseException):
                raise one
        return offered, [one for one in moved if isinstance(one, WeightsMoved)]

    def commit(self) -> None:
        for receiver in self.receivers:
            receiver.commit(WeightsCommit(version=self.version))

    def close(self) -> None:
        call = WeightsAbandon(nonce=self.nonce, reason="the test is over")
        for receiver in self.receivers:
            receiver.abandon(call)
        self.sender.close(call)


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


class TimesFail:
    """A sink that raises at one tensor."""

    def __init__(self, model: nn.Module, at: int) -> None:
        self.inner = ModelWeightSink(model, torch.float32)
        self.at = at

    def check(self, manifest: Manifest) -> None:
        self.inner.check(manifest)

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        def failing() -> Iterator[tuple[str, Tensor]]:
            for number, pair in enumerate(tensors):
                if number == self.at:
                    raise RuntimeError(f"no loader for {pair[0]}")
                yield pair

        self.inner.load(failing())

    def finish(self, manifest: Manifest) -> dict[str, Tensor]:
        return self.inner.finish(manifest)


@pytest.fixture(autouse=True, name="quick_names")
def quick_names_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store looks up a name for every peer address; some sandboxes' name servers lose requests."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(name="rig")
def rig_fixture() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(trainer: nn.Module | None = None, engines: list[nn.Module] | None = None, **options: Any) -> Rig:
        source = options.pop("source", None) or ModelWeightSource(trainer or Model(1))
        sinks = options.pop("sinks", None) or [ModelWeightSink(m, torch.float32) for m in engines or [Model(2)]]
        made.append(Rig(source, sinks, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
