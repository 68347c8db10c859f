"""A controller that is there to be killed: starts workers, says who they are in one JSON line, and waits.

Arguments: a folder for logs. Workers: one that computes, one that started a grandchild, one that is stopped and has a
grandchild too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from rpc_harness import spec
from rpc_worker import Numbers, Sleep

from offbeat.rpc.client import Hub
from offbeat.rpc.messages import Nothing


async def main(folder: Path) -> None:
    async with Hub() as hub:
        workers = await asyncio.gather(*(hub.start(spec(folder, f"engine-{index}"), start_s=60) for index in range(3)))
        pids = [worker.child.pid for worker in workers]
        for worker in workers[1:]:
            answer = await worker.call("grandchild", Nothing(), Numbers, timeout_s=20)
            pids += answer.values
        computing = asyncio.create_task(workers[0].call("hold_lock", Sleep(seconds=100), Nothing, timeout_s=200))
        await asyncio.sleep(0.2)
        os.kill(workers[2].child.pid, signal.SIGSTOP)
        print(json.dumps({"pids": pids, "socket": hub.address.removeprefix("ipc://")}), flush=True)
        await computing


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
