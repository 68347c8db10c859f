"""The textbook loop: every sample comes from the very weights that it updates (`max_staleness = 0`).

step       0                1                2
engines    |s0|gen 0|       |s1|gen 1|       |s2|gen 2|       |s3|    sN: a verified full sync
trainer             |train 0|        |train 1|        |train 2|
"""

from __future__ import annotations

from offbeat.loops import Sampled, Stages


async def on_policy(stages: Stages[Sampled]) -> None:
    await stages.sync()
    await stages.evaluate()
    for step in stages.steps():
        sampled = await stages.sample(step)
        await stages.train(step, sampled)
        await stages.sync()
        await stages.evaluate()
