"""What a worker starts in a session of its own ends with the worker, with the hub, and with the controller."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rpc_harness import HERE, alive, spec, wait_until, with_worker
from rpc_worker import SLEEP, Fail, Numbers, Text

from offbeat.errors import WorkerDied
from offbeat.rpc import guard
from offbeat.rpc.client import Hub, Worker
from offbeat.rpc.messages import Nothing
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration


async def strays_of(worker: Worker) -> tuple[int, ...]:
    """Two live processes of this worker outside its session."""
    pids = (await worker.call("strays", Nothing(), Numbers, timeout_s=20)).values
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    assert all(os.getsid(pid) != worker.child.pid for pid in pids)
    return pids


def all_end(pids: tuple[int, ...]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), 2, f"{pids} ended")


@pytest.mark.parametrize("how", ["close", "kill", "death", "leaving the hub"])
def test_strays_end_with_their_worker(tmp_path: Path, how: str) -> None:
    async def body(_: Hub, worker: Worker) -> tuple[int, ...]:
        pids = await strays_of(worker)
        if how == "close":
            await worker.close()
        elif how == "kill":
            worker.kill()
            await asyncio.wait_for(worker.child.exited, 5)
        elif how == "death":
            with pytest.raises(WorkerDied):
                await worker.call("fail", Fail(how="sys.exit"), Text, timeout_s=10)
        if how != "leaving the hub":
            all_end(pids)
        return pids

    with no_leaks(adopt=True):
        all_end(with_worker(tmp_path, body))


def test_the_strays_of_other_workers_live_on_also_those_of_the_same_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with Hub() as hub, asyncio.timeout(60):
            other = await hub.start(spec(tmp_path, "reward-1"), start_s=30)
            old = await hub.start(spec(tmp_path, "reward-0"), start_s=30)
            theirs, first = await strays_of(other), await strays_of(old)
            old.kill()
            await asyncio.wait_for(old.child.exited, 5)
            with pytest.raises(WorkerDied):
                await old.call("nothing", Nothing(), Nothing, timeout_s=1)
            new = await hub.start(spec(tmp_path, "reward-0"), start_s=30)
            second = await strays_of(new)
            # The end of the old one, once more.
            old.abandon()
            guard.end_marked(f"{guard.RUN_VARIABLE}={hub.run}", f"{guard.WORKER_VARIABLE}={old.identity.decode()}")
            all_end(first)
            assert all(alive(pid) for pid in (*theirs, *second))
            for worker in (other, new):
                await worker.call("nothing", Nothing(), Nothing, timeout_s=10)

    with no_leaks(adopt=True):
        asyncio.run(main())


CONTROLLER = """
import asyncio, json, os, pathlib
from rpc_harness import spec
from rpc_worker import Numbers
from offbeat.rpc.client import Hub
from offbeat.rpc.messages import Nothing

async def main():
    async with Hub() as hub:
        worker = await hub.start(spec(pathlib.Path(os.environ["LOGS"])), start_s=60)
        strays = await worker.call("strays", Nothing(), Numbers, timeout_s=20)
        told = {"pids": strays.values, "guard": hub._guard._popen.pid, "folder": str(hub._folder)}
        print(json.dumps(told), flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


@contextmanager
def killed_controller(logs: Path, with_guard: bool) -> Generator[tuple[tuple[int, ...], Path]]:
    """Strays and runtime folder of a controller that was killed (its guard before it); whatever is left is ended."""
    env = {**os.environ, "PYTHONPATH": str(HERE), "LOGS": str(logs)}
    with subprocess.Popen([sys.executable, "-c", CONTROLLER], stdout=subprocess.PIPE, env=env) as controller:
        assert controller.stdout is not None
        told = json.loads(controller.stdout.readline())
        assert all(alive(pid) for pid in told["pids"])
        controller.send_signal(signal.SIGSTOP)
        if with_guard:
            os.kill(told["guard"], signal.SIGKILL)
        controller.kill()
    pids = tuple(told["pids"])
    try:
        yield pids, Path(told["folder"])
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_strays_end_when_the_controller_is_killed(tmp_path: Path) -> None:
    with no_leaks(timeout_s=10, adopt=True), killed_controller(tmp_path, False) as (pids, folder):
        wait_until(lambda: not any(alive(pid) for pid in pids), 10, f"{pids} ended")
        wait_until(lambda: not folder.exists(), 5, "the runtime folder is removed")


def test_strays_of_a_controller_that_was_killed_with_its_guard_end_at_the_next_start(tmp_path: Path) -> None:
    async def next_start() -> None:
        async with Hub():
            pass

    with no_leaks(timeout_s=10, adopt=True), killed_controller(tmp_path, True) as (pids, _):
        assert all(alive(pid) for pid in pids)
        asyncio.run(next_start())
        all_end(pids)


def test_only_processes_with_all_marks_are_ended_and_never_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = {"OFFBEAT_RUN": "test-marks", "OFFBEAT_WORKER": "a"}
    environments = [
        marks,
        {**marks, "OFFBEAT_WORKER": "ab"},
        {"OFFBEAT_RUN": "test-marks"},
        {"X": "OFFBEAT_RUN=test-marks"},
    ]
    children = [subprocess.Popen(SLEEP, env={**os.environ, **extra}) for extra in environments]
    try:
        guard.end_marked("OFFBEAT_RUN=test-marks", "OFFBEAT_WORKER=a")
        assert children[0].wait(5) == -signal.SIGKILL
        assert [child.poll() for child in children[1:]] == [None] * 3
        guard.end_marked("OFFBEAT_RUN=test-marks")
        assert [child.wait(5) for child in children[1:3]] == [-signal.SIGKILL] * 2
        assert children[3].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()
    itself = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import guard; guard.end_marked('OFFBEAT_RUN=me'); print(1)"
    )
    folder = str(Path(str(guard.__file__)).parent)
    command = [sys.executable, "-S", "-c", itself, folder]
    done = subprocess.run(command, env={"OFFBEAT_RUN": "me"}, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"1\n"), done.stderr


def test_a_process_that_is_just_being_started_is_not_missed() -> None:
    """`Popen` returns before the new program has its environment."""
    for index in range(40):
        mark = f"just-started-{index}"
        children = [subprocess.Popen(["sleep", "60"], env={"OFFBEAT_RUN": mark}) for _ in range(3)]
        try:
            guard.end_marked(f"OFFBEAT_RUN={mark}")
            assert [child.wait(5) for child in children] == [-signal.SIGKILL] * 3
        finally:
            for child in children:
                child.kill()
                child.wait()


FORKS = """
import os, time
# Each generation starts the next and ends: no process is there for long.
while os.fork() == 0:
    os.setsid()
    time.sleep(0.002)
"""


def test_a_chain_of_short_lived_processes_is_ended() -> None:
    def links() -> list[int]:
        found: list[int] = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if b"OFFBEAT_RUN=chain" in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    with no_leaks(timeout_s=5, adopt=True):
        subprocess.run([sys.executable, "-S", "-c", FORKS], env={"OFFBEAT_RUN": "chain"}, timeout=30, check=True)
        try:
            wait_until(lambda: bool(links()), 5, "the chain runs")
            guard.end_marked("OFFBEAT_RUN=chain")
            time.sleep(0.1)
            assert links() == []
        finally:
            for _ in range(200):
                for pid in links():
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
