"""Starting workers, leaving the hub: what goes wrong is named with its remedy, and nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rpc_harness import HERE, alive, spec, with_worker
from rpc_worker import Sleep

from offbeat.errors import ConfigError, ProtocolError, RemoteError, WorkerDied
from offbeat.rpc.client import Hub, ProcessSpec, Worker
from offbeat.rpc.messages import Nothing
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration


def start(
    folder: Path, start_s: float = 30.0, change: Callable[[ProcessSpec], ProcessSpec] | None = None, **settings: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), Hub() as hub:
            asked = spec(folder, **settings)
            await hub.start(change(asked) if change else asked, start_s=start_s)

    with no_leaks(adopt=True):
        asyncio.run(main())


def test_a_failed_build_fails_the_start_with_its_own_text(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"engine-0 could not start: FileNotFoundError: no such model") as caught:
        start(tmp_path, build_error="no such model")
    assert "in build" in caught.value.traceback_text


def test_a_death_while_building_fails_the_start_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B038: before it could serve anything."""
    monkeypatch.setenv("OFFBEAT_FAULTS", "engine-0/build=kill")
    with pytest.raises(WorkerDied, match="killed by SIGKILL") as caught:
        start(tmp_path)
    assert caught.value.log_tail == "building engine-0\noffbeat: fault injected at build: kill"


def test_a_start_beyond_its_limit_ends_the_whole_tree_B126(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "grandchild"
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"not ready after 2 s, so it was ended; last progress: loading part \d"):
        start(tmp_path, 2.0, build_steps=600, grandchild_file="")
    assert time.monotonic() - started < 10
    monkeypatch.setenv("OFFBEAT_FAULTS", "build=stop")
    with pytest.raises(WorkerDied, match="not ready after 3 s"):
        start(tmp_path, 3.0, grandchild_file=str(file))
    assert not alive(int(file.read_text()))


def test_several_workers_start_at_the_same_time(tmp_path: Path) -> None:
    async def main() -> float:
        async with Hub() as hub:
            started = time.monotonic()
            await asyncio.gather(
                *(hub.start(spec(tmp_path, f"engine-{n}", build_steps=15), start_s=30) for n in range(4))
            )
            return time.monotonic() - started

    with no_leaks():
        assert asyncio.run(main()) < 5.0  # one after the other: 4 × 1.5 s and more


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Hub() as hub:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.7):
                    await hub.start(spec(tmp_path, build_steps=600), start_s=60)

    with no_leaks():
        asyncio.run(main())


def test_an_error_in_the_controller_ends_its_workers(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        raise KeyError("the controller's own")

    with no_leaks(), pytest.raises(KeyError, match="own"):
        with_worker(tmp_path, body)


def test_an_interpreter_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    def change(asked: ProcessSpec) -> ProcessSpec:
        return ProcessSpec(asked.name, asked.module, asked.settings, asked.log, python="/nowhere/python")

    with pytest.raises(ConfigError, match=r"interpreter '/nowhere/python' cannot be run \(No such file"):
        start(tmp_path, change=change)


def test_an_interpreter_without_offbeat_is_named_with_the_remedy(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)

    def change(asked: ProcessSpec) -> ProcessSpec:
        return ProcessSpec(asked.name, "offbeat.rpc.server", asked.settings, asked.log, python=str(bare))

    with pytest.raises(WorkerDied, match=rf"{bare} has no module offbeat: run '{bare} -m pip install -e ") as caught:
        start(tmp_path, change=change)
    assert "No module named" in caught.value.log_tail


@pytest.mark.parametrize("side", ["worker", "both"])
def test_another_protocol_is_refused_with_both_versions_and_the_remedy(tmp_path: Path, side: str) -> None:
    """`worker`: it only announces the other version. `both`: it also refuses the controller's."""
    patch = "import offbeat.rpc.codec as codec\ncodec.PROTOCOL = 'offbeat/2'\n"
    if side == "worker":
        patch += "import offbeat.rpc.lifeline as lifeline\nlifeline.check_protocol = lambda *_: None\n"
    (tmp_path / "sitecustomize.py").write_text(patch)

    def change(asked: ProcessSpec) -> ProcessSpec:
        env = {"PYTHONPATH": f"{tmp_path}:{HERE}"}
        return ProcessSpec(asked.name, asked.module, asked.settings, asked.log, env=env)

    with pytest.raises((WorkerDied, ProtocolError)) as caught:
        start(tmp_path, change=change)
    text = str(caught.value)
    assert "'offbeat/2'" in text
    assert "'offbeat/1'" in text
    assert f"{sys.executable} -m pip install -e " in text


def test_a_worker_with_a_wrong_token_is_refused(tmp_path: Path) -> None:
    patch = (
        "import offbeat.rpc.connection as c\n"
        "real = c.Hello\n"
        "c.Hello = lambda **fields: real(**{**fields, 'token': 'f' * 64})\n"
    )
    (tmp_path / "sitecustomize.py").write_text(patch)

    def change(asked: ProcessSpec) -> ProcessSpec:
        env = {"PYTHONPATH": f"{tmp_path}:{HERE}"}
        return ProcessSpec(asked.name, asked.module, asked.settings, asked.log, env=env)

    with pytest.raises(ProtocolError, match="engine-0: wrong token"):
        start(tmp_path, change=change)


def test_queued_calls_do_not_delay_a_shutdown(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        calls = [worker.call("sleep", Sleep(seconds=0.5), Nothing, timeout_s=60) for _ in range(20)]
        pending = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await worker.close(5)
        assert time.monotonic() - started < 3
        ends = await pending
        assert all(isinstance(end, WorkerDied) for end in ends[1:])

    with_worker(tmp_path, body)


def test_a_hub_whose_exit_is_cancelled_leaves_nothing_and_nobody_waiting(tmp_path: Path) -> None:
    pending: list[asyncio.Task[Nothing]] = []

    async def leave_soon() -> None:
        async with asyncio.timeout(3), Hub(grace_s=60) as hub:
            worker = await hub.start(spec(tmp_path), start_s=30)
            call = worker.call("hold_lock", Sleep(seconds=60), Nothing, timeout_s=120)
            pending.append(asyncio.create_task(call))
            await asyncio.sleep(0.1)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await leave_soon()
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(pending[0], 1)

    with no_leaks():
        asyncio.run(main())


def test_a_worker_run_by_hand_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "rpc_worker.py")], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert done.returncode == 2
    assert b"offbeat: the controller ended before it said what to do" in done.stderr
