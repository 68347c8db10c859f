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
LAST_LINE = "line 000001 ".ljust(99, ".")
DROPPED = re.compile(r"\n\[offbeat: (\d+) bytes dropped here: a log has at most 40000\]\n")


def size_of(log: Path) -> int:
    return log.stat().st_size


def test_a_log_over_its_limit_is_cut_while_its_worker_lives(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        await worker.call("chatter", Grow(bytes=200_000), Nothing, timeout_s=20)
        for _tick in range(200):
            if size_of(worker.spec.log) <= LIMIT:
                break
            await asyncio.sleep(0.05)
        await worker.call("chatter", Grow(bytes=200), Nothing, timeout_s=20)
        text = worker.spec.log.read_text()
        assert len(text) <= LIMIT
        assert text.startswith("building engine-0\nline 000000 ")
        assert len(DROPPED.findall(text)) == 1
        assert "line 001999 " in DROPPED.split(text)[-1]
        assert text.endswith(LAST_LINE + "\n")
        assert worker.child.log_tail().endswith(LAST_LINE)

    with_worker(tmp_path, body, log_bytes=LIMIT, heartbeat_s=1.0)


def test_a_log_that_is_cut_again_and_again_says_exactly_how_much_is_missing(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        first = "building engine-0\n"
        for _round in range(3):
            await worker.call("chatter", Grow(bytes=200_000), Nothing, timeout_s=20)
            worker.child._log_bytes = LIMIT  # pyright: ignore[reportPrivateUsage] only this look shall cut
            worker.child.bound_log()
            worker.child._log_bytes = 1 << 30  # pyright: ignore[reportPrivateUsage] as above
        text = worker.spec.log.read_text()
        (dropped,) = DROPPED.findall(text)
        kept = len(DROPPED.sub("", text))
        # The note of each earlier cut was dropped with the middle, and counted.
        notes = len(first) + 3 * 200_000 + 2 * 80
        assert len(first) + 3 * 200_000 <= kept + int(dropped) <= notes
        # Every line of the last part is whole.
        assert {len(line) for line in DROPPED.split(text)[-1].splitlines()} == {99}

    with_worker(tmp_path, body)


def test_the_last_words_of_a_worker_are_kept_when_its_log_is_cut_at_its_end(tmp_path: Path) -> None:
    async def body(_: Hub, worker: Worker) -> None:
        await worker.call("chatter", Grow(bytes=300_000), Nothing, timeout_s=20)
        with pytest.raises(WorkerDied) as caught:
            await worker.call("fail", Fail(how="abort"), Text, timeout_s=10)
        assert "Fatal Python error: Aborted" in caught.value.log_tail
        assert size_of(worker.spec.log) <= LIMIT

    # The next look of the hub is a second away: only the end of the worker cuts.
    with_worker(tmp_path, body, log_bytes=LIMIT)


def test_a_log_within_its_limit_is_left_alone(tmp_path: Path) -> None:
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
