"""What the display is told of a system: what is known before it starts, and what its workers are at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from offbeat.build import System
from offbeat.config import Config
from offbeat.devices import slow_in_bfloat16
from offbeat.metrics.display import Display
from offbeat.metrics.status import Activity, Header, batch_arithmetic
from offbeat.prepare import Prepared
from offbeat.rpc.worker import Worker

ACTIVITY_S = 0.25


def header(prepared: Prepared) -> Header:
    """What is known before anything starts."""
    config = prepared.config
    arithmetic = batch_arithmetic(
        prompts=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        updates=config.updates_per_step,
        epochs=config.epochs_per_batch,
        max_staleness=config.max_staleness,
    )
    dropped = sum(source.dropped for source in prepared.prompts.sources)
    rows = (
        ("model", f"{prepared.model_name} · {prepared.model.model_type} · init {config.init}"),
        ("engines", f"{config.rollout.replicas} × {config.rollout.engine} · {config.engine_dtype}"),
        ("data", f"{prepared.prompts.rows:,} rows · {dropped} too long · {epochs(prepared.prompts.steps_per_epoch)}"),
        ("batch", arithmetic),
        *([] if config.checkpoint.every_steps else [("saves", saved_when(config))]),
        *[("slow", text) for text in slow_dtypes(config)],
    )
    return Header(title=prepared.model_name, rows=rows, steps=config.steps)


def epochs(steps: Mapping[str, float]) -> str:
    """`110 steps per epoch`, or `steps per epoch: sums 200, words 20` where sources differ."""
    shown = {name: f"{count:.0f}" for name, count in steps.items()}
    if len(set(shown.values())) == 1:
        return f"{next(iter(shown.values()))} steps per epoch"
    return f"steps per epoch: {', '.join(f'{name} {count}' for name, count in shown.items())}"


def saved_when(config: Config) -> str:
    """`saved every 25 steps`, or that nothing is before the end."""
    every = config.checkpoint.every_steps
    if not every:
        return "nothing before the end, whatever happens on the way: checkpoint.every_steps is 0"
    return "saved after each step" if every == 1 else f"saved every {every} steps"


def slow_dtypes(config: Config) -> list[str]:
    """One sentence if bfloat16, the default, is computed where nothing is made for it. Loads torch."""
    keys = {"trainer.dtype": (config.trainer.device, config.trainer.dtype)}
    if config.rollout.python is None and config.rollout.dtype:
        keys["rollout.dtype"] = (config.rollout.device, config.engine_dtype)
    slow = [key for key, (device, dtype) in keys.items() if dtype == "bfloat16" and slow_in_bfloat16(device)]
    if not slow:
        return []
    return [f'this CPU has no arithmetic for bfloat16; {" and ".join(slow)} = "float32" is faster here']


@contextlib.asynccontextmanager
async def activity(system: System, display: Display) -> AsyncGenerator[None]:
    """Tells the display what goes on, from the workers' heartbeats."""

    async def tell() -> None:
        working: list[Worker] = []  # of the batch in the making: an engine that is done with its share counts, too
        while True:
            busy = [worker for worker in system.engine_workers if worker.pending_calls]
            working = [w for w in system.engine_workers if w in busy or w in working] if busy else []
            counts = [w.progress.counters["samples"] for w in working if "samples" in w.progress.counters]
            trainer = system.trainer_worker
            display.activity(
                Activity(
                    tokens=round(sum(w.progress.counters.get("tokens", 0) for w in busy)) if busy else None,
                    samples=round(sum(counts)) if counts else None,
                    note=f"training: {trainer.progress.note}" if trainer.pending_calls else "",
                )
            )
            await asyncio.sleep(ACTIVITY_S)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
