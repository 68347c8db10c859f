"""Calls between a controller and a real worker process: values, errors as text, order, deadlines, memory."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import numpy as np
import pytest
from rpc_harness import rss_bytes, spec, with_worker
from rpc_worker import Echo, EchoResult, Fail, Grow, Numbers, Sleep, Text

from offbeat.errors import CallTimeout, ProtocolError, RemoteError, WorkerDied
from offbeat.rpc import codec
from offbeat.rpc.client import Hub, Worker
from offbeat.rpc.messages import Nothing
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration


def test_values_and_arrays_go_there_and_back(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        call = Echo(array=np.arange(6, dtype=np.int32).reshape(2, 3), text="ä", extra={"x": [np.ones(2)], "n": None})
        back = await worker.call("echo", call, EchoResult, timeout_s=10)
        np.testing.assert_array_equal(back.array, call.array)
        np.testing.assert_array_equal(back.extra["x"][0], np.ones(2))
        assert (back.text, back.extra["n"], back.thread, back.writable) == ("ä", None, "MainThread", False)
        assert await worker.call("nothing", Nothing(), Nothing, timeout_s=10) == Nothing()

    with no_leaks():
        with_worker(tmp_path, body)


@pytest.mark.parametrize(
    ("how", "type_name", "text"),
    [
        ("two arguments", "NeedsTwo", "first words"),
        ("dynamic class", "only.here.Dynamic", "gone on the other side"),
        ("huge message", "RuntimeError", "50000000 characters"),
        ("not utf-8", "RuntimeError", "bad \\udcff"),
        ("base exception", "Base", "not an Exception"),
        ("unprintable", "Unprintable", "no message"),
        ("nested", "RuntimeError", "the outer one"),
        ("surrogate result", "offbeat.errors.ProtocolError", "surrogates"),
        ("large result", "offbeat.errors.ProtocolError", "exceeds the limit"),
        ("wrong result", "offbeat.errors.ProtocolError", "do not travel"),
    ],
)
def test_a_handlers_error_arrives_as_text_and_the_worker_serves_on_B029(
    shared: SharedWorker, how: str, type_name: str, text: str
) -> None:
    for method in ("fail", "urgent_fail"):
        with pytest.raises(RemoteError) as caught:
            shared.run(lambda w, m=method: w.call(m, Fail(how=how), Text, timeout_s=20))
        assert caught.value.type_name == type_name
        assert text in caught.value.message
        assert "Traceback" in caught.value.traceback_text
        assert len(str(caught.value)) < 10_000
        assert caught.value.method == method
        assert caught.value.process == "engine-0"
    if how == "nested":
        assert "KeyError: 'the root cause'" in caught.value.traceback_text
    assert shared.run(lambda w: w.call("fail", Fail(how="none"), Text, timeout_s=10)).value == "survived"


class SharedWorker:
    """One worker for many small tests, with a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._hub = Hub(max_message_bytes=32 << 20)
        self.log = folder / "engine-0.log"
        self._runner.run(self._open(folder))

    async def _open(self, folder: Path) -> None:
        await self._hub.__aenter__()
        self.worker = await self._hub.start(spec(folder), start_s=30)

    def run(self, call):  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType] any call of the worker
        async def main():
            return await call(self.worker)

        return self._runner.run(main())

    def send_raw(self, frames: list[codec.Frame]) -> None:
        async def main(_: Worker) -> None:
            assert self._hub.send(self.worker.identity, frames)

        self.run(main)

    def close(self) -> None:
        self._runner.run(self._hub.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):  # pyright: ignore[reportUnknownParameterType] generator fixture
    with no_leaks():
        worker = SharedWorker(tmp_path_factory.mktemp("shared"))
        yield worker
        worker.close()


def test_an_unknown_method_and_an_unknown_argument_are_refused_by_name(shared: SharedWorker) -> None:
    with pytest.raises(RemoteError, match=r"no method 'nonsense'; this worker has chatter, echo, fail"):
        shared.run(lambda w: w.call("nonsense", Nothing(), Nothing, timeout_s=10))
    with pytest.raises(RemoteError, match=r"unknown field `how`"):
        shared.run(lambda w: w.call("echo", Fail(how="x"), EchoResult, timeout_s=10))


def test_a_reply_of_another_type_is_refused(shared: SharedWorker) -> None:
    with pytest.raises(ProtocolError, match=r"engine-0.fail: reply refused"):
        shared.run(lambda w: w.call("fail", Fail(how="none"), Numbers, timeout_s=10))


def test_a_message_beyond_the_limit_is_refused_before_it_is_sent(shared: SharedWorker) -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        shared.run(lambda w: w.call("echo", Echo(array=np.zeros(40 << 20, np.uint8)), EchoResult, timeout_s=10))


def test_rubbish_from_the_hub_is_dropped_with_a_line_and_the_worker_lives_B175(shared: SharedWorker) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 100, 5000):
        shared.send_raw([rng.bytes(size)])
        shared.send_raw([rng.bytes(size), rng.bytes(size)])
    good = codec.encode("call", Echo(array=np.zeros(100_000)), id=1 << 40, method="echo")
    shared.send_raw(good[:-1])
    shared.send_raw(codec.encode("call", {"array": 7}, id=1 << 41, method="echo"))
    shared.send_raw(codec.encode("unheard of", None))
    answer = shared.run(lambda w: w.call("echo", Echo(array=np.ones(3)), EchoResult, timeout_s=10))
    assert answer.array.sum() == 3
    assert shared.log.read_text().count("message dropped") >= 11


def test_calls_run_first_in_first_out_and_urgent_ones_at_once(shared: SharedWorker) -> None:
    async def body(worker: Worker) -> None:
        calls = [
            asyncio.create_task(worker.call("sleep", Sleep(seconds=0.1, steps=n), Nothing, timeout_s=10))
            for n in (5, 3, 8)
        ]
        await asyncio.sleep(0.15)
        started = time.monotonic()
        assert (await worker.call("who", Nothing(), Text, timeout_s=10)).value == "offbeat i/o"
        assert time.monotonic() - started < 0.1, "an urgent method waited for the main thread"
        assert not all(call.done() for call in calls)
        await asyncio.gather(*calls)
        history = await worker.call("history", Nothing(), Numbers, timeout_s=10)
        assert history.values[-3:] == (5, 3, 8)

    shared.run(body)


def test_a_deadline_ends_a_call_and_its_late_reply_is_ignored(shared: SharedWorker) -> None:
    async def body(worker: Worker) -> None:
        with pytest.raises(CallTimeout, match=r"engine-0.sleep: no reply after 0.3 s"):
            await worker.call("sleep", Sleep(seconds=0.6, note="step 3"), Nothing, timeout_s=0.3)
        assert (await worker.call("fail", Fail(how="none"), Text, timeout_s=10)).value == "survived"
        assert worker.pending_calls == 0

    shared.run(body)
    assert "time.sleep" in shared.log.read_text() or "in sleep" in shared.log.read_text()


def test_a_cancelled_call_is_forgotten_and_never_begins(shared: SharedWorker) -> None:
    async def body(worker: Worker) -> None:
        first = asyncio.create_task(worker.call("sleep", Sleep(seconds=0.3, steps=1), Nothing, timeout_s=10))
        second = asyncio.create_task(worker.call("sleep", Sleep(seconds=0.3, steps=99), Nothing, timeout_s=10))
        await asyncio.sleep(0.05)
        second.cancel()
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
        history = await worker.call("history", Nothing(), Numbers, timeout_s=10)
        assert 99 not in history.values
        assert worker.pending_calls == 0

    shared.run(body)


def test_a_stall_is_told_from_slow_work(shared: SharedWorker) -> None:
    async def body(worker: Worker) -> None:
        slow = Sleep(seconds=3.0, steps=30, note="decoding")
        await worker.call("sleep", slow, Nothing, timeout_s=30, stall_s=0.5)
        with pytest.raises(CallTimeout, match=r"engine-0.sleep: no progress for 0.5 s; its last progress was 'stuck'"):
            await worker.call("sleep", Sleep(seconds=4.0, note="stuck"), Nothing, timeout_s=30, stall_s=0.5)
        assert worker.progress.note == "stuck"
        assert worker.progress.counters == {"step": 0.0}
        assert worker.progress_age_s > 0.4

    shared.run(body)


def test_a_worker_imports_neither_torch_nor_pydantic(shared: SharedWorker) -> None:
    modules = shared.run(lambda w: w.call("modules", Nothing(), Text, timeout_s=10)).value.split()
    assert {"torch", "pydantic", "transformers", "asyncio"}.isdisjoint(modules)


def test_memory_stays_flat_over_200_calls_of_1_mb_B031(shared: SharedWorker) -> None:
    async def body(worker: Worker) -> None:
        array = np.ones(1 << 20, np.uint8)

        async def calls(count: int) -> None:
            for _ in range(count):
                back = await worker.call("echo", Echo(array=array), EchoResult, timeout_s=10)
                assert back.array.nbytes == array.nbytes

        await calls(30)
        before = [rss_bytes(pid) for pid in (os.getpid(), worker.child.pid)]
        await calls(200)
        after = [rss_bytes(pid) for pid in (os.getpid(), worker.child.pid)]
        # 200 MB went each way; one kept message in ten would show as 20 MB.
        assert all(late - early < 12 << 20 for early, late in zip(before, after, strict=True)), (before, after)

    shared.run(body)


def test_200_mb_in_one_call_is_not_copied_more_than_the_transport_needs(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        base = rss_bytes(worker.child.pid)
        array = np.ones(50_000_000, np.float32)
        me = rss_bytes(os.getpid())
        back = await worker.call("echo", Echo(array=array), EchoResult, timeout_s=30)
        assert back.array[-1] == 1
        # Here: the array and what came back. There: one copy in, sent back from the same memory.
        assert rss_bytes(os.getpid()) - me < 1.3 * array.nbytes
        assert peak_bytes(worker.child.pid) - base < 1.3 * array.nbytes
        del back
        grown = await worker.call("grow", Grow(bytes=200_000_000), EchoResult, timeout_s=30)
        assert grown.array.nbytes == 200_000_000

    with_worker(tmp_path, body)


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_calls_go_over_tcp_with_both_address_families_B010(tmp_path: Path, host: str) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        array = np.arange(1_000_000, dtype=np.float32)
        back = await worker.call("echo", Echo(array=array), EchoResult, timeout_s=20)
        np.testing.assert_array_equal(back.array, array)

    with no_leaks():
        with_worker(tmp_path, body, transport="tcp", host=host)


def test_a_call_to_a_closed_worker_fails_at_once(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        await worker.close()
        with pytest.raises(WorkerDied, match="closed by the controller"):
            await worker.call("nothing", Nothing(), Nothing, timeout_s=10)

    with_worker(tmp_path, body)
