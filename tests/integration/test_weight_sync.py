"""The whole weight transaction: real processes, the real RPC, gloo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_worker import Break, Peek, Peeked, Step

from offbeat.config import WeightsSection
from offbeat.errors import RemoteError, WeightSyncError
from offbeat.rpc.client import Hub, ProcessSpec, Worker
from offbeat.rpc.messages import EngineDescription, GenerateCall, GenerateResult, Nothing
from offbeat.testing.tiny_model import tiny_qwen3
from offbeat.types import GenerateRequest, Sampling
from offbeat.weights.sync import Probe, WeightTransaction

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
SAMPLING = Sampling(max_new_tokens=4, temperature=0.7)
REQUESTS = (
    GenerateRequest(prompt_id="p/0", epoch=0, token_ids=np.array([5, 6, 7], np.int32), seeds=(1, 2)),
    GenerateRequest(prompt_id="p/1", epoch=0, token_ids=np.array([9], np.int32), seeds=(3,)),
)
PROBE = Probe(REQUESTS, SAMPLING)


@dataclass
class Cluster:
    hub: Hub
    trainer: Worker
    engines: list[Worker]
    weights: WeightsSection
    dtype: Any

    def transaction(self, **changed: Any) -> WeightTransaction:
        weights = self.weights.model_copy(update=changed)
        return WeightTransaction(self.trainer, self.engines, weights, self.dtype, PROBE)

    async def step(self) -> None:
        await self.trainer.call("step", Step(), Nothing, timeout_s=20)

    async def peek(self, worker: Worker, name: str = "model.norm.weight") -> Peeked:
        return await worker.call("peek", Peek(name=name), Peeked, timeout_s=20)

    async def break_(self, worker: Worker, fault: str = "", points: str = "") -> None:
        await worker.call("break", Break(fault=fault, points=points), Nothing, timeout_s=20)

    async def describe(self, worker: Worker) -> EngineDescription:
        return await worker.call("describe", Nothing(), EngineDescription, timeout_s=20)

    async def generate(self, worker: Worker) -> GenerateResult:
        call = GenerateCall(requests=REQUESTS, sampling=SAMPLING)
        return await worker.call("generate", call, GenerateResult, timeout_s=20)


@asynccontextmanager
async def cluster(
    folder: Path,
    *,
    model: Path,
    engines: int = 1,
    faults: str = "",
    dtype: Any = "float32",
    **weights: Any,
) -> AsyncGenerator[Cluster]:
    environment = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "OFFBEAT_FAULTS": faults}
    environment["RES_OPTIONS"] = "timeout:1 attempts:1"  # some sandboxes' name servers lose requests

    def spec(name: str, **settings: Any) -> ProcessSpec:
        settings = {"model": str(model), **settings}
        return ProcessSpec(name, "weight_worker", settings, folder / f"{name}.log", env=environment)

    values: dict[str, Any] = {"timeout_s": 60.0, "stall_s": 20.0, **weights}
    section = WeightsSection(**values)
    async with Hub(heartbeat_s=20.0, grace_s=1.0) as hub:
        names = [f"engine-{n}" for n in range(engines)]
        trainer, *rest = await asyncio.gather(
            hub.start(spec("trainer-0", role="trainer"), start_s=90),
            *(hub.start(spec(n, role="engine", dtype=dtype), start_s=90) for n in names),
        )
        yield Cluster(hub, trainer, rest, section, dtype)


def run(make: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 120.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await make()

    asyncio.run(limited())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("models") / "tied")


def test_engines_follow_the_trainer_over_every_address_family_B010(tmp_path: Path, tiny: Path) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, engines=2, bucket_mib=0.01) as c:
            both, version = c.engines, 0
            for host, count in [("127.0.0.1", 1), ("::1", 2), ("[::1]", 1), ("localhost", 2)]:
                c.engines = both[:count]
                sync = c.transaction(host=host)
                for turn in range(3):
                    await c.step()
                    version += 1
                    report = await sync.sync(version)
                    assert report.bytes_moved > 0
                    assert (report.probe_gap_max is not None) == (turn == 0)  # parity_every is 20
                    assert (report.probe_gap_max or 0) < 1e-3
                wanted = await c.peek(c.trainer)
                for engine in c.engines:
                    assert (await c.peek(engine)).total == pytest.approx(wanted.total)
                    assert (await c.describe(engine)).weights_version == version
                    result = await c.generate(engine)
                    assert {stamp for r in result.rollouts for stamp, _ in r.versions} == {version}

    run(body)


FAULTS = {
    "forget_tied_head": ("parity probe of engine-1", "tied output head"),
    "ignore_temperature": ("parity probe of engine-1", "temperature (0.7)"),
    "stale_layer": ("engine-1 does not hold what the trainer sent", "layers.1.self_attn.q_proj.weight"),
    "swap": ("engine-1 does not hold what the trainer sent", "layers.0"),
    "refuse": ("engine-1", "does not like the manifest"),
    "reset_fails": ("engine-1", "3 requests hold blocks"),
}
"""What engine-1 does wrong → what the error says."""


def test_an_engine_that_is_wrong_is_caught_and_nothing_is_committed_B001_B023_B076_B096_B119(
    tmp_path: Path, tiny: Path
) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, engines=2, parity_every=1, bucket_mib=0.01) as c:
            sync = c.transaction()
            await c.step()
            version = 1
            await sync.sync(version)
            for fault, words in FAULTS.items():
                await c.break_(c.engines[1], fault)
                await c.step()
                version += 1
                with pytest.raises(WeightSyncError) as caught:
                    await sync.sync(version)
                for word in words:
                    assert word in str(caught.value), fault
                for engine in c.engines:
                    described = await c.describe(engine)
                    assert (described.state, described.weights_version) == ("stale", version - 1), fault
                    with pytest.raises(RemoteError, match="stale"):
                        await c.generate(engine)
                await c.break_(c.engines[1])
                await sync.sync(version)
                await c.generate(c.engines[1])

    run(body)


RAISED = {
    "engine.receive=raise": (1, ("engine-1", "fault injected at engine.receive", "'move'")),
    "engine.after_load=raise": (1, ("engine-1", "fault injected at engine.after_load", "'move'")),
    "engine.before_commit=raise": (1, ("engine-1", "fault injected at engine.before_commit", "'commit'")),
    "trainer.send=raise": (None, ("trainer-0", "fault injected at trainer.send", "'move'")),
}
"""Fault → engine (None: the trainer) and what the error says."""


def test_an_error_in_the_middle_frees_all_and_reaches_the_user_in_its_own_words_B036_B058(
    tmp_path: Path, tiny: Path
) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, engines=2, bucket_mib=0.01) as c:
            await c.step()
            for fault, (engine, words) in RAISED.items():
                culprit = c.trainer if engine is None else c.engines[engine]
                await c.break_(culprit, points=fault)
                started = time.monotonic()
                with pytest.raises(WeightSyncError) as caught:
                    await c.transaction().sync(1)
                assert time.monotonic() - started < 10
                for word in words:
                    assert word in str(caught.value), fault
                assert caught.value.unresponsive == ()
                for one in c.engines:
                    assert (await c.describe(one)).state == "stale"
                await c.break_(culprit)
            await c.transaction().sync(1)

    run(body)


def test_a_process_that_dies_in_the_middle_is_named_and_the_others_are_free_B036(tmp_path: Path, tiny: Path) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, engines=2, bucket_mib=0.01) as c:
            await c.step()
            for culprit, fault in ((c.engines[1], "engine.receive=kill"), (c.trainer, "trainer.send=kill")):
                await c.break_(culprit, points=fault)
                started = time.monotonic()
                with pytest.raises(WeightSyncError, match=r"'move'.*SIGKILL") as caught:
                    await c.transaction().sync(1)
                assert culprit.name in str(caught.value)
                assert time.monotonic() - started < 10
                described = await c.describe(c.engines[0])  # it answers: its main thread is free
                assert (described.state, described.weights_version) == ("stale", -1)
                del c.engines[1:]

    run(body)


def test_a_stopped_process_ends_the_sync_by_the_stall_limit_and_is_named(tmp_path: Path, tiny: Path) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, engines=2, bucket_mib=0.01, stall_s=2.0) as c:
            await c.step()
            for culprit, fault in ((c.engines[1], "engine.receive=stop"), (c.trainer, "trainer.send=stop")):
                await c.break_(culprit, points=fault)
                started = time.monotonic()
                with pytest.raises(WeightSyncError, match="stall") as caught:
                    await c.transaction().sync(1)
                assert time.monotonic() - started < 20
                assert caught.value.unresponsive == (culprit.name,)
                assert culprit.name in str(caught.value)
                assert (await c.describe(c.engines[0])).state == "stale"
                culprit.kill()
                del c.engines[1:]

    run(body)


def test_new_trainers_take_over_engines_of_dead_ones_B048(tmp_path: Path, tiny: Path) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, bucket_mib=0.01) as c:
            for turn in range(3):
                if turn:
                    spec = c.trainer.spec
                    await c.trainer.close()
                    c.trainer = await c.hub.start(replace(spec, name=f"trainer-{turn}"), start_s=90)
                    for _ in range(turn):
                        await c.step()
                await c.step()
                await c.transaction().sync(turn + 1)
                assert (await c.peek(c.engines[0])).total == pytest.approx((await c.peek(c.trainer)).total)
                call = asyncio.create_task(c.transaction().sync(turn + 1))
                await asyncio.sleep(0.002)  # somewhere in the transaction
                c.trainer.kill()
                with pytest.raises(WeightSyncError):
                    await call
                assert (await c.describe(c.engines[0])).state == "stale"

    run(body)


def test_a_cancelled_sync_leaves_engines_stale_and_the_next_one_works(tmp_path: Path, tiny: Path) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, bucket_mib=0.01) as c:
            sync = c.transaction()
            await c.step()
            await sync.sync(1)
            await c.break_(c.engines[0], points="engine.receive=sleep:1")
            running = asyncio.create_task(sync.sync(1))
            moving = False
            while not moving:  # else it might be cancelled before it has asked the engines for anything
                await asyncio.sleep(0.01)
                assert not running.done()
                moving = "move" in sync._phases  # pyright: ignore[reportPrivateUsage]  # nothing else tells
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await c.break_(c.engines[0])
            assert (await c.describe(c.engines[0])).state == "stale"
            await sync.sync(1)
            assert (await c.describe(c.engines[0])).state == "serving"

    run(body)


def test_many_syncs_leave_no_descriptor_and_no_thread_and_are_quick_B078(tmp_path: Path, tiny: Path) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny) as c:
            sync = c.transaction()
            await c.step()
            for _ in range(3):
                await sync.sync(1)
            before = [await c.peek(worker) for worker in (c.trainer, *c.engines)]
            times = [(await sync.sync(1)).seconds for _ in range(30)]
            after = [await c.peek(worker) for worker in (c.trainer, *c.engines)]
            for one, two in zip(before, after, strict=True):
                assert two.descriptors <= one.descriptors
                assert two.threads <= one.threads
            assert sorted(times)[len(times) // 2] < 0.2  # about 15 ms on a free machine

    run(body)
