"""Sender and receiver over real gloo, in threads of one process: what moves, what is refused, what is left behind."""

from __future__ import annotations

import gc
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.errors import WeightSyncError
from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import (
    Manifest,
    TensorEntry,
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
from offbeat.weights.manifest import manifest_hash
from offbeat.weights.receiver import WeightReceiver
from offbeat.weights.sender import WeightSender
from offbeat.weights.session import EngineState, first_difference

pytestmark = pytest.mark.integration


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
    timeout_s: float = 10.0
    stall_s: float = 5.0
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


@pytest.fixture(autouse=True)
def _a_silent_name_server_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # a fixture
    """torch's store looks up a name for every peer address; some sandboxes' name servers lose requests."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(trainer: nn.Module | None = None, engines: list[nn.Module] | None = None, **options: Any) -> Rig:
        source = options.pop("source", None) or ModelWeightSource(trainer or Model(1))
        sinks = options.pop("sinks", None) or [ModelWeightSink(m, torch.float32) for m in engines or [Model(2)]]
        made.append(Rig(source, sinks, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [64, 1024, 1 << 20])
def test_every_engine_holds_what_was_sent(rig: Callable[..., Rig], host: str, engines: int, bucket_bytes: int) -> None:
    trainer, receivers = Model(1), [Model(9) for _ in range(engines)]
    r = rig(trainer, receivers, host=host, bucket_bytes=bucket_bytes)
    offered, (sent, *held) = r.sync()
    assert offered.host == ("127.0.0.1" if host == "127.0.0.1" else offered.host)
    for state, engine, one in zip(r.states, receivers, held, strict=True):
        assert first_difference(offered.manifest, sent.digests, one.digests) is None
        assert one.bytes_moved == sent.bytes_moved
        assert (state.name, state.version) == ("probing", -1)
        assert_same(trainer, engine)
    r.commit()
    assert [(s.name, s.version) for s in r.states] == [("serving", 1)] * engines


def test_persistent_buffers_travel_and_others_do_not_B166(rig: Callable[..., Rig]) -> None:
    engine = Model(2)
    offered, _ = rig(Model(1), [engine]).sync()
    names = [entry.name for entry in offered.manifest.entries]
    assert "bias" in names
    assert "count" in names
    assert "scratch" not in names
    assert torch.equal(engine.get_buffer("scratch"), torch.full((4,), 2.0))


@pytest.mark.parametrize("own", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_cast_once_on_the_sending_side_B109(rig: Callable[..., Rig], own: torch.dtype) -> None:
    trainer, engine = Model(1).to(own), Model(2).to(torch.bfloat16)
    trainer.odd.data = trainer.odd.data.float()  # mixed
    sinks = [ModelWeightSink(engine, torch.bfloat16)]
    _, (sent, held) = rig(trainer, sinks=sinks, dtype="bfloat16").sync()
    assert sent.digests == held.digests
    for name, tensor in trainer.state_dict().items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(engine.state_dict()[name], wanted), name


def test_a_wider_parameter_in_the_engine_is_loaded_exactly_and_verified(rig: Callable[..., Rig]) -> None:
    engine = Model(2).to(torch.bfloat16)
    engine.odd.data = engine.odd.data.float()
    _, (sent, held) = rig(Model(1), sinks=[ModelWeightSink(engine, torch.bfloat16)], dtype="bfloat16").sync()
    assert sent.digests == held.digests


@pytest.mark.parametrize("trainer_tied", [True, False])
@pytest.mark.parametrize("engine_tied", [True, False])
def test_tied_heads_are_sent_once_and_conflicts_are_refused_B023(
    rig: Callable[..., Rig], trainer_tied: bool, engine_tied: bool
) -> None:
    trainer, engine = Model(1, tied=trainer_tied), Model(2, tied=engine_tied)
    r = rig(trainer, [engine])
    if engine_tied and not trainer_tied:
        with pytest.raises(WeightSyncError, match=r"head is a tensor of its own in the trainer.*ties it to embed"):
            r.sync()
        return
    offered, (sent, held) = r.sync()
    assert ("head" in [entry.name for entry in offered.manifest.entries]) is not trainer_tied
    assert offered.manifest.tied == ((("head", "embed"),) if trainer_tied else ())
    assert sent.digests == held.digests
    assert torch.equal(engine.head, trainer.head)
    assert torch.equal(engine.embed, trainer.embed)


def test_an_untied_head_that_is_not_sent_is_named_B023_B119(rig: Callable[..., Rig]) -> None:
    trainer = Model(1)
    del trainer.head
    trainer.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(WeightSyncError, match=r"missing from the transfer: head; unknown to this model: extra"):
        rig(trainer, [Model(2)]).sync()


def test_the_group_is_kept_and_parameters_allocated_anew_are_found_B003_B112(rig: Callable[..., Rig]) -> None:
    trainer, engine = Model(1), Model(2)
    r = rig(trainer, [engine])
    first, _ = r.sync()
    r.commit()
    with torch.no_grad():
        trainer.embed = nn.Parameter(trainer.embed + 1)
        engine.embed = nn.Parameter(torch.zeros_like(engine.embed))
    r.version = 2
    second, (sent, held) = r.sync()
    assert (second.host, second.port) == (first.host, first.port)
    assert sent.digests == held.digests
    assert_same(trainer, engine)


def test_derived_copies_are_refreshed_at_every_transfer_B167(rig: Callable[..., Rig]) -> None:
    trainer, engine = Model(1), Model(2)
    cached: list[Tensor] = []
    sink = ModelWeightSink(engine, torch.float32, refresh=[lambda: cached.append(engine.head.detach().double())])
    r = rig(trainer, sinks=[sink])
    for version in (1, 2):
        r.version = version
        trainer.head.data += 1
        r.sync()
        r.commit()
        assert torch.equal(cached[-1], trainer.head.double())
    assert len(cached) == 2


def test_a_reset_that_fails_leaves_the_engine_stale_B001(rig: Callable[..., Rig]) -> None:
    def reset() -> None:
        raise RuntimeError("3 requests still hold blocks")

    r = rig(Model(1), sinks=[ModelWeightSink(Model(2), torch.float32, refresh=[reset])])
    r.prepare(r.offer())
    _, failed = r.move()
    assert "3 requests still hold blocks" in str(failed)
    assert r.states[0].name == "stale"
    with pytest.raises(WeightSyncError, match="3 requests still hold blocks"):
        r.states[0].admit(probe=False)


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


@pytest.mark.parametrize("at", range(8))
def test_a_failure_at_any_tensor_frees_all_and_only_a_full_transfer_heals_B096(
    rig: Callable[..., Rig], at: int
) -> None:
    good, bad = Model(2), TimesFail(Model(3), at)
    r = rig(Model(1), sinks=[ModelWeightSink(good, torch.float32), bad], bucket_bytes=256)
    r.prepare(r.offer())
    started = time.monotonic()
    _, _, failed = r.move()
    assert time.monotonic() - started < 3
    assert "no loader for" in str(failed)
    assert r.states[1].name == "stale"
    r.close()
    assert r.states[0].name == "stale"
    with pytest.raises(WeightSyncError, match="no loader for"):
        r.states[1].admit(probe=False)
    bad.at = -1
    r.nonce, r.version = secrets.token_hex(4), 2
    r.sync()
    r.commit()
    assert [s.version for s in r.states] == [2, 2]


def test_the_first_error_reaches_the_others_in_its_own_words(rig: Callable[..., Rig]) -> None:
    r = rig(Model(1), sinks=[ModelWeightSink(Model(2), torch.float32), TimesFail(Model(3), 0)], bucket_bytes=64)
    r.prepare(r.offer())
    sender, other, _ = r.move()
    assert isinstance(sender, WeightSyncError)
    assert "no loader for embed" in str(sender)
    assert isinstance(other, WeightSyncError)


class LyingSource:
    """A source whose tensors do not follow its manifest."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def manifest(self, dtype: str | None) -> Manifest:
        return Manifest(entries=tuple(TensorEntry(n, (4, 8), "float32") for n in ("a", "b")))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, torch.ones(4, 8)


@pytest.mark.parametrize("names", [["b", "a"], ["a"], ["a", "b", "c"]])
def test_a_source_out_of_step_with_its_manifest_is_refused_B110(rig: Callable[..., Rig], names: list[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4, 8))

    r = rig(source=LyingSource(names), engines=[Two()])
    r.prepare(r.offer())
    sender, _ = r.move()
    assert "the source gave" in str(sender)
    assert r.states[0].name != "serving"


def test_an_unknown_dtype_is_refused_before_anything_moves_B058(rig: Callable[..., Rig]) -> None:
    r = rig()
    offered = r.offer()
    bad = Manifest(entries=(TensorEntry("embed", (40, 24), "torch.foo16"),))
    with pytest.raises(WeightSyncError, match=r"torch\.foo16.*known: "):
        r.receivers[0].prepare(r.join(offered, 1, manifest=bad, manifest_hash=manifest_hash(bad)))
    assert r.states[0].name == "stale"


def test_a_manifest_that_arrives_changed_is_refused(rig: Callable[..., Rig]) -> None:
    r = rig()
    offered = r.offer()
    with pytest.raises(WeightSyncError, match="arrived changed"):
        r.receivers[0].prepare(r.join(offered, 1, manifest_hash="0" * 32))


def test_a_member_that_comes_too_late_is_turned_away_B048(rig: Callable[..., Rig]) -> None:
    r = rig()
    old = r.join(r.offer(), 1)
    r.nonce = "next"
    offered = r.offer()
    with pytest.raises(WeightSyncError, match="nobody can be reached"):
        r.receivers[0].prepare(old)
    with pytest.raises(WeightSyncError, match="serves the group 'next', not 'late'"):
        r.receivers[0].prepare(r.join(offered, 1, nonce="late"))


def test_a_rank_is_given_once(rig: Callable[..., Rig]) -> None:
    r = rig(engines=[Model(2), Model(3)])
    offered = r.offer()
    r.receivers[0].prepare(r.join(offered, 1))
    with pytest.raises(WeightSyncError, match=r"rank 1 .* is taken"):
        r.receivers[1].prepare(r.join(offered, 1))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_wildcard_is_never_advertised_B061(rig: Callable[..., Rig], host: str) -> None:
    with pytest.raises(WeightSyncError, match="wildcard"):
        rig(host=host).offer()


def test_an_unknown_backend_names_those_that_exist(rig: Callable[..., Rig]) -> None:
    r = rig()
    call = WeightsOffer(
        nonce="n", host="127.0.0.1", backend="hccl", dtype=None, bucket_bytes=64, members=2, timeout_s=1.0
    )
    with pytest.raises(WeightSyncError, match=r"'hccl'.*Available here: gloo"):
        r.sender.offer(call)


def test_the_wrong_version_is_not_sent(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.prepare(r.offer())
    call = WeightsMove(nonce=r.nonce, version=7, timeout_s=1.0, stall_s=1.0)
    with pytest.raises(WeightSyncError, match="version 7, but the trainer is at 1"):
        r.sender.send(call)


def test_a_member_that_never_comes_ends_by_the_stall_limit(rig: Callable[..., Rig]) -> None:
    r = rig(engines=[Model(2), Model(3)], stall_s=0.6)
    r.prepare(r.offer())
    call = WeightsMove(nonce=r.nonce, version=1, timeout_s=10.0, stall_s=0.6)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"set-up of the group of 3 members: stalled"):
        r.sender.send(call)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_urgent_call_frees_whoever_waits(rig: Callable[..., Rig], side: str) -> None:
    r = rig(stall_s=30.0, timeout_s=30.0)
    r.prepare(r.offer())
    call = WeightsMove(nonce=r.nonce, version=1, timeout_s=30.0, stall_s=30.0)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            (r.sender.send if side == "sender" else r.receivers[0].receive)(call)
        except WeightSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)  # it waits for its peer by now; either way it must be freed
    started = time.monotonic()
    r.close()
    thread.join(10)
    assert time.monotonic() - started < 2
    assert "the test is over" in str(errors[0])


def test_groups_are_made_and_ended_fifty_times_without_a_trace_B078(rig: Callable[..., Rig]) -> None:
    r = rig()

    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        r.nonce, r.version = secrets.token_hex(4), r.version + 1
        r.sync()
        r.commit()

    for _ in range(3):
        once()
    before = count()
    for _ in range(50):
        once()
    assert _settled(count, before)


def _settled(count: Callable[[], tuple[int, int]], before: tuple[int, int]) -> bool:
    """Descriptors and threads are back, or fewer, within two seconds (a thread may be about to end)."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        now = count()
        if now[0] <= before[0] and now[1] <= before[1]:
            return True
        time.sleep(0.02)
    return False


def test_failed_groups_leave_nothing_either_B078(rig: Callable[..., Rig]) -> None:
    sink = TimesFail(Model(2), 1)
    r = rig(sinks=[sink], bucket_bytes=256)

    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once() -> None:
        r.nonce = secrets.token_hex(4)
        r.prepare(r.offer())
        r.move()

    once()
    once()
    before = count()
    for _ in range(5):
        once()
    assert _settled(count, before)


def test_groups_stand_beside_a_default_group_and_are_made_in_any_order_B070(rig: Callable[..., Rig]) -> None:
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # public, but not in torch's type information
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        one, two = rig(Model(1), [Model(3)]), rig(Model(2), [Model(4)])
        first, second = one.offer(), two.offer()
        two.prepare(second)
        one.prepare(first)
        with ThreadPoolExecutor(2) as pool:
            moves = [pool.submit(two.move), pool.submit(one.move)]
            for moved in (move.result() for move in moves):
                sent, held = moved
                assert isinstance(sent, WeightsMoved)
                assert isinstance(held, WeightsMoved)
                assert sent.digests == held.digests
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_a_backend_registered_with_torch_is_reached_by_its_name(rig: Callable[..., Rig]) -> None:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)

    torch.distributed.Backend.register_backend("toy", create, devices=["cpu"])
    r = rig(Model(1), [Model(2)], backend="toy")
    _, (sent, held) = r.sync()
    assert sent.digests == held.digests
