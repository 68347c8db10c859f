"""The hf engine as a process: state, weights, sampling, pause, failures. Its trainer is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.config import LimitsSection, LossSection, TrainerSection, WeightsSection
from offbeat.errors import RemoteError, WorkerDied
from offbeat.rollout.pool import EnginePool
from offbeat.rollout.remote import RemoteEngine
from offbeat.rollout.settings import EngineSettings
from offbeat.rpc.client import Hub, Worker
from offbeat.rpc.messages import GenerateCall, GenerateResult, PauseCall
from offbeat.rpc.process import ProcessSpec
from offbeat.testing.leaks import no_leaks
from offbeat.testing.tiny_model import tiny_gpt2, tiny_qwen3
from offbeat.trainer.client import RemoteTrainer
from offbeat.trainer.settings import TrainerSettings
from offbeat.types import GenerateRequest, Rollout, Sampling, sample_seed
from offbeat.weights.sync import Probe, WeightTransaction

pytestmark = pytest.mark.integration

SAMPLING = Sampling(max_new_tokens=16, temperature=0.7, top_p=0.9, stop_token_ids=(1, 5, 6, 7))
LONG = Sampling(max_new_tokens=230)
LIMITS = LimitsSection(generate_s=60.0, update_s=60.0, stall_s=30.0)


def requests_of(count: int, samples: int = 3) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            prompt_id=f"p/{i}",
            epoch=0,
            token_ids=(np.arange(2 + i, dtype=np.int32) * 7 + i) % 60 + 3,
            seeds=tuple(sample_seed(0, f"p/{i}", j, 0) for j in range(samples)),
        )
        for i in range(count)
    ]


@dataclass
class System:
    engines: list[RemoteEngine]
    trainer: RemoteTrainer
    weights: WeightTransaction

    @property
    def worker(self) -> Worker:
        return self.engines[0].worker


@asynccontextmanager
async def system(folder: Path, model: Path, *, engines: int = 1, faults: str = "") -> AsyncGenerator[System]:
    environment = {"OMP_NUM_THREADS": "1", "OFFBEAT_FAULTS": faults}
    engine = EngineSettings(model=str(model), dtype="float32", device="cpu", threads=1, max_rows=8)
    trainer = TrainerSettings(
        model=str(model),
        total_updates=1,
        trainer=TrainerSection(dtype="float32", device="cpu", threads=1).model_dump(mode="json"),
        loss=LossSection().model_dump(mode="json"),
    )

    def spec(name: str, module: str, settings: Any) -> ProcessSpec:
        return ProcessSpec(name, module, msgspec.to_builtins(settings), folder / f"{name}.log", env=environment)

    async with Hub(heartbeat_s=20.0, grace_s=1.0) as hub:
        learner, *workers = await asyncio.gather(
            hub.start(spec("trainer-0", "offbeat.trainer.worker", trainer), start_s=90),
            *(hub.start(spec(f"engine-{n}", "offbeat.rollout.worker", engine), start_s=90) for n in range(engines)),
        )
        probe = Probe(tuple(requests_of(2)), msgspec.structs.replace(SAMPLING, max_new_tokens=4))
        yield System(
            [RemoteEngine(worker, LIMITS) for worker in workers],
            RemoteTrainer(learner, LIMITS),
            WeightTransaction(learner, workers, WeightsSection(), "float32", probe),
        )


def run(make: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 150.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await make()

    with no_leaks():
        asyncio.run(limited())


async def largest_gap(trainer: RemoteTrainer, rollouts: list[Rollout], sampling: Sampling) -> float:
    pairs = [(r.prompt_token_ids.tolist(), r.token_ids.tolist()) for r in rollouts]
    scored = await trainer.logprobs(pairs, sampling)
    return max(
        float(np.abs(a[np.isfinite(a)] - r.logprobs[np.isfinite(a)]).max(initial=0.0))
        for a, r in zip(scored, rollouts, strict=True)
    )


def test_two_engines_sample_from_the_trainers_weights_after_the_first_sync(tmp_path: Path) -> None:
    async def body() -> None:
        async with system(tmp_path, tiny_gpt2(tmp_path / "model"), engines=2) as running:
            pool = EnginePool(running.engines)
            before = await pool.describe()
            assert (before.engine, before.state, before.weights_version, before.dtype) == ("hf", "stale", -1, "float32")
            with pytest.raises(RemoteError, match=r"engine-. failed in generate.*stale"):
                await pool.generate(requests_of(4), SAMPLING)

            report = await running.weights.sync(0)
            assert report.probe_gap_max is not None
            assert (await pool.describe()).state == "serving"
            rollouts = await pool.generate(requests_of(5), SAMPLING)
            assert [(r.prompt_id, r.sample_index) for r in rollouts] == [
                (f"p/{i}", j) for i in range(5) for j in range(3)
            ]
            assert {r.engine for r in rollouts} == {"engine-0", "engine-1"}
            assert all(r.versions == ((0, len(r.token_ids)),) for r in rollouts)
            assert await largest_gap(running.trainer, rollouts, SAMPLING) <= 1e-4
            again = await pool.generate(requests_of(5), SAMPLING)
            assert [r.logprobs.tobytes() for r in again] == [r.logprobs.tobytes() for r in rollouts]

            call = GenerateCall(requests=tuple(requests_of(1)), sampling=SAMPLING, probe=True)
            with pytest.raises(RemoteError, match="probe is answered between load and commit only"):
                await running.worker.call("generate", call, GenerateResult, timeout_s=30)

    run(body)


def test_pause_with_abort_cuts_samples_short_and_resume_serves_again_B009(tmp_path: Path) -> None:
    """The pause returns only when nothing runs any more; what comes meanwhile is refused."""
    model = tiny_qwen3(tmp_path / "model")
    # Slow enough that the pause certainly comes in the middle, and not so slow that an abort ignored would pass.
    faults = "engine.step=sleep:0.05"

    async def body() -> None:
        async with system(tmp_path, model, faults=faults) as running:
            engine = running.engines[0]
            await running.weights.sync(0)
            first = running.worker.progress.counters.get("tokens", 0)
            task = asyncio.create_task(engine.generate(requests_of(2), LONG))
            while running.worker.progress.counters.get("tokens", 0) < first + 12:  # noqa: ASYNC110  # it is a poll
                await asyncio.sleep(0.01)
            await engine.pause(PauseCall(mode="abort"))
            rollouts = await asyncio.wait_for(task, 0.5)
            assert {r.finish_reason for r in rollouts} == {"abort"}
            assert all(0 < len(r.token_ids) < 200 for r in rollouts)
            with pytest.raises(RemoteError, match="engine-0 is paused"):
                await engine.generate(requests_of(1), SAMPLING)
            await engine.resume()
            assert {r.finish_reason for r in await engine.generate(requests_of(1), SAMPLING)} <= {"stop", "length"}

    run(body)


def test_an_engine_without_its_device_says_so_at_the_start(tmp_path: Path) -> None:
    async def body() -> None:
        async with Hub(heartbeat_s=20.0, grace_s=1.0) as hub:
            settings = EngineSettings(model=str(tiny_qwen3(tmp_path / "model")), dtype="float32", device="cpux")
            spec = ProcessSpec(
                "engine-0",
                "offbeat.rollout.worker",
                msgspec.to_builtins(settings),
                tmp_path / "engine.log",
                env={"OMP_NUM_THREADS": "1"},
            )
            with pytest.raises((RemoteError, WorkerDied), match="'cpux' is not a device; usable here"):
                await hub.start(spec, start_s=60)

    run(body)
