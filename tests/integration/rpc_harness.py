"""What the RPC tests share: how their worker is started."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from offbeat.rpc.client import Hub, ProcessSpec, Worker

R = TypeVar("R")
HERE = Path(__file__).parent


def spec(folder: Path, name: str = "engine-0", env: Mapping[str, str] | None = None, **settings: Any) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        module="rpc_worker",
        settings=settings,
        log=folder / f"{name}.log",
        env={"PYTHONPATH": str(HERE), **(env or {})},
    )


def with_worker(folder: Path, body: Callable[[Hub, Worker], Awaitable[R]], **options: Any) -> R:
    """Runs `body` with a hub (`options` are the hub's, `env` the worker's) and one worker; bounded."""
    env = options.pop("env", None)

    async def main() -> R:
        async with asyncio.timeout(60), Hub(**options) as hub:
            return await body(hub, await hub.start(spec(folder, env=env), start_s=30))

    return asyncio.run(main())


def alive(pid: int) -> bool:
    """True while the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until the condition held; AssertionError when it never did."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - started


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
