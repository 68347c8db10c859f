"""Transfers that fail, over real gloo: what is refused, who is freed, what is left behind."""

from __future__ import annotations

import gc
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from weight_rig import (  # the fixtures are used by name
    Model,
    Rig,
    TimesFail,
    quick_names_fixture,
    rig_fixture,
)

from offbeat.errors import WeightSyncError
from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import (
    Manifest,
    TensorEntry,
    WeightsMove,
    WeightsOffer,
)
from offbeat.weights.manifest import manifest_hash
from offbeat.weights.session import first_difference

__all__ = ["quick_names_fixture", "rig_fixture"]
"""Fixtures that the tests below take by name."""
pytestmark = pytest.mark.integration


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


@pytest.mark.parametrize(("tensor", "value"), [("odd", float("nan")), ("scale", float("inf")), ("bias", float("nan"))])
def test_weights_of_the_trainer_that_are_no_numbers_are_named_and_never_served(
    rig: Callable[..., Rig], tensor: str, value: float
) -> None:
    trainer = Model(1)
    with torch.no_grad():
        trainer.state_dict()[tensor].view(-1)[-1] = value
    r = rig(trainer, [Model(2), Model(3)], bucket_bytes=256)
    r.prepare(r.offer())
    sender, *engines = r.move()
    assert re.match(rf"{tensor} \[.*\] float32 has values that are NaN or infinite in the trainer", str(sender))
    assert "offbeat resume RUN --step N" in str(sender)
    assert all(isinstance(engine, WeightSyncError) for engine in engines)
    assert [state.name for state in r.states] == ["stale", "stale"]


def test_a_number_that_an_engine_loses_after_the_load_is_found_by_its_digest(rig: Callable[..., Rig]) -> None:
    class Breaks(ModelWeightSink):
        def finish(self, manifest: Manifest) -> dict[str, Tensor]:
            memory = super().finish(manifest)
            memory["odd"][2, 1] = torch.nan
            return memory

    r = rig(Model(1), sinks=[Breaks(Model(2), torch.float32)])
    offered, moved = r.sync()
    found = first_difference(offered.manifest, moved[0].digests, moved[1].digests)
    assert found is not None
    assert found.startswith("odd [7, 3] float32: sent ")


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
