"""Engines that hold a model for a short while: what `eval` and `try` share. Writes into no run.

    trainer (the model | a checkpoint | warmed up) ── verified sync ──▶ engines ── body(system, version) ──▶ ended

Weights reach engines by a sync only, so a trainer is started even where nothing is trained. It costs the model once in
float32 (no gradients, no optimizer state), and the engines then hold what a run's engines would: digests and the parity
probe included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offbeat.build import System, start
from offbeat.checkpoint import Checkpoint
from offbeat.commands.passing import passing_folder
from offbeat.interrupt import Interrupt
from offbeat.metrics.display import Display
from offbeat.metrics.writer import RunFolder
from offbeat.prepare import Prepared
from offbeat.showing import activity, header
from offbeat.supervision import unless_a_worker_dies
from offbeat.training import warm_up

T = TypeVar("T")

Body = Callable[[System, int], Awaitable[T]]
"""Gets the running system, and the weights version that every engine serves."""


def serve(
    name: str,
    prepared: Prepared,
    display: Display,
    body: Body[T],
    *,
    checkpoint: Checkpoint | None = None,
    warmup: bool = False,
) -> T:
    """Run `body` against engines with the weights of a checkpoint, or of the model (after `[warmup]` if asked for).

    All processes have ended when this returns. Raises `RunError`, and `KeyboardInterrupt`.
    """
    with passing_folder(name) as folder:
        try:
            return asyncio.run(_serve(prepared, folder, display, body, checkpoint, warmup=warmup))
        finally:
            display.close()


async def _serve(
    prepared: Prepared,
    folder: RunFolder,
    display: Display,
    body: Body[T],
    checkpoint: Checkpoint | None,
    *,
    warmup: bool,
) -> T:
    with Interrupt(asyncio.current_task(), display.warn).installed():
        display.begin(header(prepared))
        display.phase("starting processes")
        async with start(prepared, folder) as system:

            async def main() -> T:
                version = 0
                if checkpoint is not None:
                    await system.trainer.load(str(checkpoint.folder / "trainer-0"))
                    version = checkpoint.state.weights_version
                elif warmup:
                    await warm_up(prepared, system, display)
                display.phase("first weight sync")
                await system.weights.sync(version)
                return await body(system, version)

            async with activity(system, display):
                return await unless_a_worker_dies(main(), system.workers)
