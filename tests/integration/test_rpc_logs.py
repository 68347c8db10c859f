"""Neither a worker that prints without end nor a stranger that sends without end fills the disk."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest
import zmq
from rpc_harness import with_worker
from rpc_worker import Fail, Grow, Text

from offbeat.errors import WorkerDied
from offbeat.rpc.client import Complaints, Hub, Worker
from offbeat.rpc.messages import Nothing

pytestmark = pytest.mark.integration

LIMIT = 40_000
DROPPED = re.compile(r"\n\[offbeat: (\d+) bytes dropped here: a log has at most 40000\]\n")


async def shrunk(log: Path) -> None:
    async with asyncio.timeout(10):
        while log.stat().st_size > LIMIT:
            await asyncio.sleep(0.02)


def test_a_log_over_its_limit_keeps_its_first_and_last_lines_and_says_what_is_missing(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        log, printed = worker.spec.log, 0
        for _ in range(3):
            await worker.call("chatter", Grow(bytes=200_000), Nothing, timeout_s=20)
            printed += 200_000
            await shrunk(log)
        await worker.call("chatter", Grow(bytes=200), Nothing, timeout_s=20)
        text = log.read_text()
        assert text.startswith("building engine-0\nline 000000 ")
        assert text.endswith("line 000001 ".ljust(99, ".") + "\n")
        (dropped,) = DROPPED.findall(text)
        whole = len("building engine-0\n") + printed + 200
        kept = len(DROPPED.sub("", text))
        # What was printed between reading and cutting is not counted: only chatter that was over before the cut.
        assert kept + int(dropped) <= whole + 3 * 80
        assert kept + int(dropped) >= whole - 3 * 80 or int(dropped) > 400_000
        assert "line 001999 " in DROPPED.split(text)[-1]
        assert worker.child.log_tail().endswith("line 000001 ".ljust(99, "."))

    with_worker(tmp_path, body, log_bytes=LIMIT, heartbeat_s=1.0)


def test_the_last_words_of_a_worker_are_kept_when_its_log_is_cut_at_its_end(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        call = asyncio.create_task(worker.call("chatter", Grow(bytes=300_000), Nothing, timeout_s=20))
        await call
        with pytest.raises(WorkerDied) as caught:
            await worker.call("fail", Fail(how="abort"), Text, timeout_s=10)
        assert "Fatal Python error: Aborted" in caught.value.log_tail
        assert worker.spec.log.stat().st_size <= LIMIT

    # Beats are so far apart that only the end looks at the log.
    with_worker(tmp_path, body, log_bytes=LIMIT, heartbeat_s=60.0)


def test_a_small_log_and_one_that_is_no_file_are_left_alone(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        await worker.call("chatter", Grow(bytes=20_000), Nothing, timeout_s=20)
        before = worker.spec.log.read_bytes()
        worker.child.bound_log()
        assert worker.spec.log.read_bytes() == before

    with_worker(tmp_path, body, log_bytes=LIMIT)


def test_messages_of_strangers_make_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sent = 2000

    async def body(hub: Hub, worker: Worker) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.set(zmq.LINGER, 0)
            peer.connect(hub.address)
            for index in range(sent):
                peer.send(b"junk %d" % index)
                if index % 100 == 0:
                    await worker.call("nothing", Nothing(), Nothing, timeout_s=10)
            await asyncio.sleep(0.3)

    with caplog.at_level(logging.WARNING, logger="offbeat.rpc"):
        with_worker(tmp_path, body)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 6
    assert all("dropped: " in line for line in lines[:5])
    assert lines[5] == f"{sent - 5} more messages from unknown peers were dropped or refused"


def test_complaints_begin_again_after_a_period_and_sources_do_not_hide_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = Complaints(few=1, period_s=3600.0)
    with caplog.at_level(logging.WARNING, logger="offbeat.rpc"):
        for _ in range(3):
            now.add("", "stranger")
        now.add("engine-0", "worker")
        now.flush()
        now.add("", "again")
        now.flush()
        at_once = Complaints(few=1, period_s=0.0)
        for index in range(2):
            at_once.add("", f"period {index}")
    lines = [record.getMessage() for record in caplog.records]
    more = "2 more messages from unknown peers were dropped or refused"
    assert lines == ["stranger", "worker", more, "again", "period 0", "period 1"]
