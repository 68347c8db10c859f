"""The composition root: from checked inputs to running processes.

    start(prepared) → System       engines, trainer and reward workers, connected and checked; ended on leaving

The only module that knows which implementation stands behind each seam.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import assert_never

import msgspec

from offbeat.config import Config
from offbeat.data.chat import decode_completions
from offbeat.errors import first_cause
from offbeat.metrics.spans import Timeline
from offbeat.metrics.writer import RunFolder
from offbeat.ports import Engine
from offbeat.prepare import Prepared
from offbeat.rewards.pool import RewardPool
from offbeat.rollout.pool import EnginePool
from offbeat.rollout.remote import RemoteEngine
from offbeat.rollout.settings import EngineSettings
from offbeat.rpc.client import Hub, Worker
from offbeat.rpc.process import ProcessSpec
from offbeat.stages import generate_requests
from offbeat.trainer.client import RemoteTrainer
from offbeat.trainer.settings import TrainerSettings
from offbeat.types import IntArray
from offbeat.weights.sync import Probe, WeightTransaction, check_hello

PROBE_PROMPTS = 4
PROBE_SAMPLES = 2
PROBE_TOKENS = 64


@dataclass(frozen=True)
class System:
    """The running processes of a run, behind their seams."""

    trainer_worker: Worker
    engine_workers: tuple[Worker, ...]
    trainer: RemoteTrainer
    engine: Engine
    reward: RewardPool
    weights: WeightTransaction

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those whose end is the end of the run; reward workers are replaced by their pool."""
        return (self.trainer_worker, *self.engine_workers)


@asynccontextmanager
async def start(prepared: Prepared, folder: RunFolder, timeline: Timeline | None = None) -> AsyncGenerator[System]:
    """Start every process; all of them have ended when the block is left. `timeline` hears what they work on."""
    config, timeline = prepared.config, timeline or Timeline()
    hub = Hub(heartbeat_s=config.limits.heartbeat_s, worked=timeline.worked)
    async with hub, AsyncExitStack() as ending:
        specs = [_trainer_spec(prepared.loaded, folder), *engine_specs(prepared.loaded, folder)]
        with timeline.span("controller", "start"):
            reward, (trainer_worker, *engine_workers) = await _start_all(hub, prepared, specs, folder)
        ending.push_async_callback(reward.close)
        trainer = RemoteTrainer(trainer_worker, config.limits)
        engines = [RemoteEngine(worker, config.limits) for worker in engine_workers]
        descriptions = await asyncio.gather(*(engine.describe() for engine in engines))
        check_hello(await trainer.describe(), descriptions, dtype=config.engine_dtype)
        system = System(
            trainer_worker=trainer_worker,
            engine_workers=tuple(engine_workers),
            trainer=trainer,
            engine=EnginePool(engines),
            reward=reward,
            weights=WeightTransaction(
                trainer_worker, engine_workers, config.weights, config.engine_dtype, _probe(prepared)
            ),
        )
        try:
            yield system
        except asyncio.CancelledError:  # told to end now: nobody waits for what they are at
            for worker in system.workers:
                worker.kill()
            raise


async def _start_all(
    hub: Hub, prepared: Prepared, specs: list[ProcessSpec], folder: RunFolder
) -> tuple[RewardPool, list[Worker]]:
    """All at once; the first failure ends the others, and what explains it is raised."""
    config = prepared.config

    def decode(completions: Sequence[IntArray]) -> list[str]:
        return decode_completions(prepared.tokenizer, completions, prepared.sampling.stop_token_ids)

    pool: asyncio.Task[RewardPool] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            pool = group.create_task(
                RewardPool.start(
                    hub, config.rewards, prepared.reward_weights, decode, folder.logs, start_s=config.limits.start_s
                )
            )
            workers = [group.create_task(hub.start(spec, start_s=config.limits.start_s)) for spec in specs]
    except BaseException as error:
        if pool is not None and pool.done() and not pool.cancelled() and pool.exception() is None:
            await pool.result().close()
        first = first_cause(error)
        raise first from first.__cause__
    return pool.result(), [worker.result() for worker in workers]


def threads_each(config: Config) -> int:
    """CPU threads of a process that has none set: the cores, shared out evenly between trainer and engines."""
    return max(1, len(os.sched_getaffinity(0)) // (config.rollout.replicas + 1))


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _trainer_spec(config: Config, folder: RunFolder) -> ProcessSpec:
    threads = config.trainer.threads or threads_each(config)
    settled = config.model_copy(update={"trainer": config.trainer.model_copy(update={"threads": threads})})
    return ProcessSpec(
        name="trainer-0",
        module="offbeat.trainer.worker",
        settings=msgspec.to_builtins(TrainerSettings.of(settled)),
        log=folder.log("trainer-0"),
        env=_environment(threads),
    )


def engine_specs(config: Config, folder: RunFolder) -> list[ProcessSpec]:
    match config.rollout.engine:
        case "hf":
            module = "offbeat.rollout.worker"
        case other:  # pyright: ignore[reportUnnecessaryComparison] (one engine so far)
            assert_never(other)
    threads = config.rollout.threads or threads_each(config)
    settings = EngineSettings(
        model=config.model,
        revision=config.revision,
        dtype=config.engine_dtype,
        device=config.rollout.device,
        threads=threads,
        max_rows=config.rollout.max_rows,
    )
    return [
        ProcessSpec(
            name=f"engine-{index}",
            module=module,
            settings=msgspec.to_builtins(settings),
            log=folder.log(f"engine-{index}"),
            python=config.rollout.python,
            env=_environment(threads),
        )
        for index in range(config.rollout.replicas)
    ]


def _probe(prepared: Prepared) -> Probe:
    """A few short samples of the first prompts, at the run's own sampling."""
    prompts = prepared.prompts.batch(0)[:PROBE_PROMPTS]
    tokens = min(PROBE_TOKENS, prepared.sampling.max_new_tokens)
    return Probe(
        requests=tuple(generate_requests(prompts, PROBE_SAMPLES, prepared.config.seed)),
        sampling=msgspec.structs.replace(prepared.sampling, max_new_tokens=tokens),
    )
