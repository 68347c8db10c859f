"""Runs the controller's work beside a watch over its processes: the end of one explains whatever else went wrong.

A peer's broken connection is often noticed before the peer's end, and cancelling makes errors of its own. What is
raised is the cause: a process that died if one did, else the first error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from offbeat.errors import first_cause
from offbeat.rpc.client import Worker

T = TypeVar("T")
CULPRIT_S = 2.0
"""When a call fails, how long to wait for news of a process that ended: that is the better explanation."""


async def unless_a_worker_dies(main: Awaitable[T], workers: Sequence[Worker]) -> T:
    """Run `main`; the end of a worker ends it, and explains whatever else went wrong because of it."""
    task = asyncio.ensure_future(main)
    deaths = [asyncio.ensure_future(worker.wait_died()) for worker in workers]
    try:
        await asyncio.wait([task, *deaths], return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled() and task.exception() is not None:
            # A peer's broken connection is often noticed before the peer's end.
            await asyncio.wait(deaths, timeout=CULPRIT_S, return_when=asyncio.FIRST_COMPLETED)
        died = next((death.result() for death in deaths if death.done()), None)
        if died is not None and not (task.done() and not task.cancelled() and task.exception() is None):
            raise died
        return await task
    except BaseExceptionGroup as failures:
        first = first_cause(failures)
        raise first from first.__cause__
    finally:
        for pending in (task, *deaths):
            pending.cancel()
        await asyncio.gather(task, *deaths, return_exceptions=True)
