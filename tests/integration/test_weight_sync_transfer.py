"""Sender and receiver over real gloo, in threads of one process: what moves, and beside what."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weight_rig import (  # the fixtures are used by name
    Model,
    Rig,
    assert_same,
    quick_names_fixture,
    rig_fixture,
)

from offbeat.errors import WeightSyncError
from offbeat.rollout.weight_sink import ModelWeightSink
from offbeat.rpc.messages import (
    WeightsMoved,
)
from offbeat.weights.session import first_difference

__all__ = ["quick_names_fixture", "rig_fixture"]
"""Fixtures that the tests below take by name."""
pytestmark = pytest.mark.integration


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [64, 1024, 1 << 20])
def test_every_engine_holds_what_was_sent_B117(
    rig: Callable[..., Rig], host: str, engines: int, bucket_bytes: int
) -> None:
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
