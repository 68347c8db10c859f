"""The fakes of both ends, moved by the real sender and receiver over gloo; faults of a sink show in its digests."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from offbeat.errors import WeightSyncError
from offbeat.ports import WeightSink, WeightSource
from offbeat.rpc.messages import WeightsAbandon, WeightsJoin, WeightsMove, WeightsMoved, WeightsOffer
from offbeat.rpc.server import Progress
from offbeat.testing.fake_weights import FakeWeightSink, FakeWeightSource
from offbeat.weights.receiver import WeightReceiver
from offbeat.weights.sender import WeightSender
from offbeat.weights.session import EngineState

pytestmark = pytest.mark.integration


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in {"a": (3, 5), "b": (7,)}.items()}


def transfer(source: WeightSource, sink: WeightSink) -> tuple[WeightsMoved, WeightsMoved]:
    """One transfer in this process: the sender in a thread, the receiver here. Returns what each says it has."""
    sender = WeightSender(source, lambda: 0, Progress()).methods()
    receiver = WeightReceiver(sink, EngineState(), Progress()).methods()
    common: dict[str, Any] = {"nonce": "n", "backend": "gloo", "bucket_bytes": 64, "members": 2, "timeout_s": 30.0}
    offered = sender["weights_offer"].handler(WeightsOffer(host="127.0.0.1", dtype=None, **common))
    join = {"host": offered.host, "port": offered.port, "manifest": offered.manifest}
    receiver["weights_prepare"].handler(WeightsJoin(rank=1, manifest_hash=offered.manifest_hash, **join, **common))
    move = WeightsMove(nonce="n", version=0, timeout_s=30.0, stall_s=10.0)
    sent: list[WeightsMoved] = []
    thread = threading.Thread(target=lambda: sent.append(sender["weights_send"].handler(move)))
    thread.start()
    received = receiver["weights_receive"].handler(move)
    thread.join(30)
    for side, method in ((receiver, "weights_abandon"), (sender, "weights_close")):
        side[method].handler(WeightsAbandon(nonce="n", reason="done"))
    return sent[0], received


def test_what_a_source_has_lies_in_the_sink_with_equal_digests() -> None:
    source, sink = FakeWeightSource(weights(1)), FakeWeightSink(weights(2))
    sent, received = transfer(source, sink)
    assert sent.digests == received.digests
    assert sink.loaded == ["a", "b"]
    assert all(torch.equal(source.weights[name], sink.weights[name]) for name in ("a", "b"))


@pytest.mark.parametrize(("fault", "place"), [({"forget": "b"}, 1), ({"corrupt": "a"}, 0)])
def test_a_forgotten_tensor_or_one_wrong_element_shows_in_its_digest_B083(fault: dict[str, str], place: int) -> None:
    sink = FakeWeightSink(weights(2), forget=fault.get("forget"), corrupt=fault.get("corrupt"))
    sent, received = transfer(FakeWeightSource(weights(1)), sink)
    different = [index for index in (0, 1) if sent.digests[index] != received.digests[index]]
    assert different == [place]


def test_names_are_compared_before_anything_moves_B116() -> None:
    sink = FakeWeightSink({**weights(2), "c": torch.zeros(1)})
    with pytest.raises(WeightSyncError, match="c"):
        sink.check(FakeWeightSource(weights(1)).manifest(None))
