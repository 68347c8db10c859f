"""The whole weight transaction: real processes, the real RPC, gloo."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_worker import Peek, Peeked, Step

from offbeat.config import WeightsSection
from offbeat.errors import WeightSyncError, WorkerDied
from offbeat.rpc.client import Hub, ProcessSpec, Worker
from offbeat.rpc.messages import EngineDescription, GenerateCall, GenerateResult, Nothing
from offbeat.testing.tiny_model import tiny_moe, tiny_qwen3
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

    def transaction(self) -> WeightTransaction:
        return WeightTransaction(self.trainer, self.engines, self.weights, self.dtype, PROBE)

    async def step(self) -> None:
        await self.trainer.call("step", Step(), Nothing, timeout_s=20)

    async def peek(self, worker: Worker, name: str = "model.norm.weight") -> Peeked:
        return await worker.call("peek", Peek(name=name), Peeked, timeout_s=20)

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
    host: str = "127.0.0.1",
    faults: str = "",
    fault: str = "",
    dtype: Any = "float32",
    **weights: Any,
) -> AsyncGenerator[Cluster]:
    environment = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "OFFBEAT_FAULTS": faults}

    def spec(name: str, **settings: Any) -> ProcessSpec:
        settings = {"model": str(model), **settings}
        return ProcessSpec(name, "weight_worker", settings, folder / f"{name}.log", env=environment)

    section = WeightsSection(host=host, **{"timeout_s": 60.0, "stall_s": 20.0, **weights})
    async with Hub(heartbeat_s=20.0, grace_s=1.0) as hub:
        names = [f"engine-{n}" for n in range(engines)]
        faulty = names[-1]
        trainer, *rest = await asyncio.gather(
            hub.start(spec("trainer-0", role="trainer"), start_s=90),
            *(
                hub.start(spec(n, role="engine", dtype=dtype, fault=fault if n == faulty else ""), start_s=90)
                for n in names
            ),
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


@pytest.mark.parametrize(("host", "engines"), [("127.0.0.1", 1), ("::1", 2), ("[::1]", 1), ("localhost", 2)])
def test_engines_follow_the_trainer_over_every_address_family_B010(
    tmp_path: Path, tiny: Path, host: str, engines: int
) -> None:
    async def body() -> None:
        async with cluster(tmp_path, model=tiny, host=host, engines=engines, bucket_mib=0.01) as c:
            sync = c.transaction()
            await c.step()
            first = await sync.sync(1)
            assert first.bytes_moved > 0
            assert first.probe_gap_max is not None
            assert first.probe_gap_max < 1e-3
            for version in (2, 3):
                await c.step()
                report = await sync.sync(version)
                assert report.probe_gap_max is None  # parity_every is 20
            wanted = await c.peek(c.trainer)
            for engine in c.engines:
                assert (await c.peek(engine)).total == pytest.approx(wanted.total)
                assert (await c.describe(engine)).weights_version == 3
                result = await c.generate(engine)
                assert {version for r in result.rollouts for version, _ in r.versions} == {3}

    run(body)
