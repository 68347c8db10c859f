"""One step off-policy: engines sample batch k+1 while the trainer learns from batch k (`max_staleness = 1`).

    step       0          1             2
    engines    |s0|gen 0 |  |gen 1   |s1|gen 2   |s2|         sN: a verified full sync of version N
    trainer              |  |train 0 |  |train 1 |  |train 2|

Engines are idle at each sync, so no sample mixes versions. Batch 0 is sampled and trained at version 0; every later
batch k is sampled at version k-1 and trained at version k. No batch is lost or trained twice.
"""

from __future__ import annotations

import asyncio

from offbeat.loops import Sampled, Stages


async def one_step(stages: Stages[Sampled]) -> None:
    await stages.sync()
    await stages.evaluate()
    launched: asyncio.Task[Sampled] | None = None
    async with asyncio.TaskGroup() as group:
        for step in stages.steps():
            if launched is None:
                sampled = await stages.sample(step)
            else:
                sampled = await launched
                await stages.sync()
                await stages.evaluate()
            launched = group.create_task(stages.sample(step + 1)) if stages.has(step + 1) else None
            await stages.train(step, sampled)
        if launched is not None:
            launched.cancel()  # told to stop: a resumed run samples this batch again
            return
    await stages.sync()
    await stages.evaluate()
