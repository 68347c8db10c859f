"""Who dies, how soon it is known, what is said of it, and that nothing outlives its owner. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rpc_harness import HERE, alive, spec, wait_until, with_worker
from rpc_worker import Fail, Numbers, Sleep, Text

from offbeat.errors import ConfigError, ProtocolError, RemoteError, WorkerDied
from offbeat.rpc.client import Hub, ProcessSpec, Worker
from offbeat.rpc.messages import Nothing
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("how", "cause", "in_log"),
    [
        ("sys.exit", "exit code 3; it said: SystemExit: 3", ""),
        ("segfault", "killed by SIGSEGV", "Segmentation fault"),
        ("abort", "killed by SIGABRT", "Fatal Python error: Aborted"),
        ("test.kill", "killed by SIGKILL", "fault injected at test.kill"),
        ("test.exit", "exit code 9", "fault injected at test.exit"),
        ("test.term", "killed by SIGTERM", "fault injected at test.term"),
    ],
)
def test_a_death_in_a_call_is_named_and_fails_every_pending_call_at_once_B038(
    tmp_path: Path, how: str, cause: str, in_log: str
) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        owner = asyncio.create_task(worker.wait_died())
        await worker.call("sleep", Sleep(seconds=0.0), Nothing, timeout_s=10)
        calls: list[asyncio.Task[Any]] = [
            asyncio.create_task(worker.call("fail", Fail(how=how), Text, timeout_s=60)),
            asyncio.create_task(worker.call("sleep", Sleep(seconds=60), Nothing, timeout_s=120)),
        ]
        ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        died = await asyncio.wait_for(owner, 1)
        assert all(end is died for end in ends)
        assert died.process == "engine-0"
        assert died.cause.startswith(cause)
        assert in_log in died.log_tail
        assert "building engine-0" in died.log_tail
        with pytest.raises(WorkerDied):
            await worker.call("nothing", Nothing(), Nothing, timeout_s=10)

    env = {"OFFBEAT_FAULTS": "engine-0/test.kill=kill;test.exit=exit:9;test.term=term;engine-1/test.exit=kill"}
    with no_leaks():
        with_worker(tmp_path, body, env=env)


def test_an_exit_is_noticed_within_100_ms(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        call = asyncio.create_task(worker.call("sleep", Sleep(seconds=60), Nothing, timeout_s=120))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        os.kill(worker.child.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="engine-0: killed by SIGKILL"):
            await call
        # 100 ms is the promise; the rest is for a machine that does other things as well.
        assert time.monotonic() - started < 0.3

    with_worker(tmp_path, body)


def test_a_stopped_worker_is_found_by_its_heartbeat_and_ended(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        call = asyncio.create_task(worker.call("sleep", Sleep(seconds=60), Nothing, timeout_s=120))
        await asyncio.sleep(0.1)
        os.kill(worker.child.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"no heartbeat for 1 s \(process is stopped or its host is gone\)"):
            await asyncio.wait_for(call, 10)
        assert (await asyncio.wait_for(worker.wait_died(), 1)).process == "engine-0"
        assert not alive(worker.child.pid)

    with no_leaks():
        with_worker(tmp_path, body, heartbeat_s=1.0)


def test_native_code_that_holds_the_interpreter_lock_is_told_from_a_stopped_process(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        with pytest.raises(WorkerDied, match=r"no heartbeat for 1 s \(process lives, state S"):
            await worker.call("hold_lock", Sleep(seconds=60), Nothing, timeout_s=120)

    with_worker(tmp_path, body, heartbeat_s=1.0)


def test_work_that_is_merely_long_keeps_its_heartbeat(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        await worker.call("sleep", Sleep(seconds=2.5), Nothing, timeout_s=20)

    with_worker(tmp_path, body, heartbeat_s=1.0)


def test_a_controller_that_was_stopped_itself_does_not_blame_its_workers(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        time.sleep(2.5)  # noqa: ASYNC251 the event loop is held up on purpose
        await asyncio.sleep(0.5)
        await worker.call("nothing", Nothing(), Nothing, timeout_s=10)

    with_worker(tmp_path, body, heartbeat_s=1.0)


def test_a_death_that_was_asked_for_is_not_reported(tmp_path: Path) -> None:
    async def main() -> None:
        async with Hub() as hub:
            first, second = await asyncio.gather(
                hub.start(spec(tmp_path), start_s=30), hub.start(spec(tmp_path, "engine-1"), start_s=30)
            )
            owners = [asyncio.create_task(worker.wait_died()) for worker in (first, second)]
            call = asyncio.create_task(first.call("sleep", Sleep(seconds=60), Nothing, timeout_s=120))
            await asyncio.sleep(0.1)
            first.kill()
            with pytest.raises(WorkerDied, match="killed by the controller"):
                await call
            await second.close()
            await asyncio.sleep(0.1)
            assert not any(owner.done() for owner in owners)
            again = await hub.start(spec(tmp_path), start_s=30)
            await again.call("nothing", Nothing(), Nothing, timeout_s=10)
            for owner in owners:
                owner.cancel()

    with no_leaks():
        asyncio.run(main())


def test_a_worker_that_will_not_end_is_ended_with_its_children_in_bounded_time(tmp_path: Path) -> None:
    pids: list[int] = []

    async def body(_: Hub, worker: Worker) -> None:
        pids.append(worker.child.pid)
        pids.extend((await worker.call("grandchild", Nothing(), Numbers, timeout_s=10)).values)
        call = worker.call("hold_lock", Sleep(seconds=60), Nothing, timeout_s=120)
        pending = asyncio.create_task(call)
        await asyncio.sleep(0.1)
        assert all(alive(pid) for pid in pids)
        pending.cancel()

    started = time.monotonic()
    with no_leaks(adopt=True):
        with_worker(tmp_path, body, grace_s=0.5)
    assert time.monotonic() - started < 8
    assert not any(alive(pid) for pid in pids)


def test_grandchildren_end_with_a_worker_that_was_killed(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        (grandchild,) = (await worker.call("grandchild", Nothing(), Numbers, timeout_s=10)).values
        os.kill(worker.child.pid, signal.SIGKILL)
        await asyncio.wait_for(worker.wait_died(), 5)
        wait_until(lambda: not alive(grandchild), 2, "the grandchild ended")

    with no_leaks(adopt=True):
        with_worker(tmp_path, body)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGKILL of the guard too"])
def test_nothing_outlives_a_killed_controller_B011(tmp_path: Path, how: str) -> None:
    """A computing worker, one with a grandchild, and a stopped one with a grandchild: all end within 10 s."""
    with no_leaks(timeout_s=10, adopt=True):
        controller = subprocess.Popen(
            [sys.executable, str(HERE / "rpc_controller.py"), str(tmp_path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE)},
        )
        assert controller.stdout is not None
        try:
            told = json.loads(controller.stdout.readline())
            assert len(told["pids"]) == 5
            assert all(alive(pid) for pid in told["pids"])
            if "guard" in how:
                first = guard_of(controller.pid)
                os.kill(first, signal.SIGKILL)
                wait_until(lambda: guard_of(controller.pid) not in (0, first), 5, "the guard is started again")
        finally:
            controller.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
            controller.wait(20)
            controller.stdout.close()
        wait_until(lambda: not any(alive(pid) for pid in told["pids"]), 10, f"all of {told['pids']} ended")
        wait_until(lambda: not Path(told["socket"]).parent.exists(), 5, "the runtime folder is removed")


def guard_of(controller: int) -> int:
    """Process id of the controller's guard; 0 while there is none."""
    import psutil

    for child in psutil.Process(controller).children():
        with suppress(psutil.NoSuchProcess):
            if "guard.py" in " ".join(child.cmdline()):
                return child.pid
    return 0


def test_the_next_start_clears_what_a_controller_without_guard_left_B011(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal, sys\n"
        "from offbeat.rpc.client import Hub\n"
        "async def main():\n"
        "    async with Hub() as hub:\n"
        "        print(hub.address.removeprefix('ipc://'), flush=True)\n"
        "        os.kill(hub._guard._popen.pid, signal.SIGKILL)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    folder = Path(os.fsdecode(done.stdout.strip())).parent
    assert folder.name.startswith("offbeat-")
    assert folder.exists()

    async def next_start() -> None:
        async with Hub():
            assert not folder.exists()

    asyncio.run(next_start())


def test_ctrl_c_reaches_the_controller_only(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        assert os.getpgid(worker.child.pid) == worker.child.pid
        os.killpg(worker.child.pid, signal.SIGINT)
        await worker.call("sleep", Sleep(seconds=0.2), Nothing, timeout_s=10)

    with_worker(tmp_path, body)


# --- start -----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(RemoteError, match=r"engine-0.build failed: FileNotFoundError: no such model") as caught:
        start(tmp_path, build_error="no such model")
    assert "in build" in caught.value.traceback_text


def test_a_death_while_building_fails_the_start_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    with pytest.raises(
        WorkerDied, match=rf"{bare} has no module offbeat: run `{bare} -m pip install offbeat=="
    ) as caught:
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
    assert f"{sys.executable} -m pip install offbeat==" in text


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
    async def main() -> None:
        pending: asyncio.Task[Nothing] | None = None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3), Hub(grace_s=60) as hub:
                worker = await hub.start(spec(tmp_path), start_s=30)
                call = worker.call("hold_lock", Sleep(seconds=60), Nothing, timeout_s=120)
                pending = asyncio.create_task(call)
                await asyncio.sleep(0.1)
        assert pending is not None
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(pending, 1)

    with no_leaks():
        asyncio.run(main())


def test_a_worker_run_by_hand_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "rpc_worker.py")], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert done.returncode == 2
    assert b"offbeat: the controller ended before it said what to do" in done.stderr
