"""A place for one reward worker: starts it, calls it, ends it when its sample is over the limit, starts the next.

Used by one task at a time. `score` either returns a whole result or raises `Trouble` with the piece of work to blame;
by then the worker is gone with everything that it started.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from offbeat.errors import CallTimeout, RemoteError, RewardError, WorkerDied
from offbeat.rewards.board import Board, Current
from offbeat.rewards.worker import CONCURRENT, RewardDescription, RewardSettings
from offbeat.rpc.client import Hub, ProcessSpec, Worker
from offbeat.rpc.messages import Nothing, ScoreCall, ScoreResult, WorkSpan
from offbeat.rpc.worker import may_go_unheard

_CALL_MARGIN_S = 5.0
_DESCRIBE_S = 30.0
_END_S = 5.0
_IDLE_DEATHS = 3
"""A worker that ends this often in a row with no sample to blame cannot be helped."""


class Trouble(Exception):
    """A call failed. `index` is the piece of work to blame; None: unknown."""

    def __init__(self, index: int | None, text: str) -> None:
        super().__init__(text)
        self.index = index
        self.text = text


class Slot:
    def __init__(self, hub: Hub, name: str, settings: RewardSettings, log: Path, start_s: float) -> None:
        self.name = name
        self.description: RewardDescription | None = None
        self._hub, self._log, self._start_s = hub, log, start_s
        self._timeout_s = settings.timeout_s
        self._board = Board()
        self._settings = msgspec.to_builtins(msgspec.structs.replace(settings, board=self._board.path))
        self._worker: Worker | None = None
        self._idle_deaths = 0

    async def ensure(self) -> Worker:
        """The worker, started if there is none. Raises `RewardError` when a reward function cannot be loaded."""
        if self._worker is not None:
            return self._worker
        self._board.leave()
        spec = ProcessSpec(self.name, "offbeat.rewards.worker", self._settings, self._log)
        try:
            worker = await self._hub.start(spec, start_s=self._start_s)
            self._worker = worker
            self.description = await worker.call("describe", Nothing(), RewardDescription, timeout_s=_DESCRIBE_S)
        except RemoteError as error:
            places = re.findall(r'File "([^"<]+)", line (\d+)', error.traceback_text)
            place = f" ({':'.join(places[-1])})" if places else ""
            raise RewardError(
                f"reward functions cannot be loaded: {error.type_name}: {error.message}{place}"
            ) from error
        return worker

    def worked(self, spans: Sequence[WorkSpan]) -> None:
        """To be told of the slot, whichever worker was in it."""
        self._hub.worked(self.name, spans)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                await worker.close(grace_s=1.0)
        finally:
            self._board.close()

    async def score(self, call: ScoreCall, units: int) -> ScoreResult:
        """Raises `Trouble` (the worker is gone then), `RemoteError`, or `WorkerDied` where it ends without any work."""
        worker = await self.ensure()
        limit_s = self._timeout_s * self._in_turn(call.function, units) + _CALL_MARGIN_S
        calling = asyncio.ensure_future(worker.call("score", call, ScoreResult, timeout_s=limit_s))
        may_go_unheard(calling)
        try:
            over = await self._watch(calling)
            if over is None:
                result = calling.result()
                self._idle_deaths = 0
                return result
        except WorkerDied as died:
            raise self._death(died, call.function) from died
        except CallTimeout as late:
            await self._end(worker)
            raise Trouble(None, f"took longer than the limit and ignored it ({late})") from late
        except asyncio.CancelledError:
            # Nobody waits for the answer any more: the user's code must not go on and hold up the next call.
            calling.cancel()
            await asyncio.shield(self._end(worker))
            raise
        calling.cancel()
        await self._end(worker)
        raise Trouble(
            over.index,
            f"took longer than rewards.timeout_s = {self._timeout_s:g} s; its worker was ended",
        )

    def _in_turn(self, function: str, units: int) -> int:
        """How many times the limit of one piece of work all of them may take."""
        together = self.description is not None and function in self.description.concurrent
        return math.ceil(units / CONCURRENT) if together else units

    async def _watch(self, calling: asyncio.Future[ScoreResult]) -> Current | None:
        """Until the call is done (None), or a sample is over its limit."""
        while True:
            current = self._board.read()
            # A sample that starts later has a later deadline, so nothing can be over before this one.
            left_s = self._timeout_s if current is None else current.started_s + self._timeout_s - time.monotonic()
            if current is not None and left_s <= 0:
                return None if calling.done() else current
            await asyncio.wait([calling], timeout=left_s)
            if calling.done():
                return None

    def _death(self, died: WorkerDied, function: str) -> Exception:
        """The worker ended by itself: because of the sample that it was grading, if there was one."""
        current = self._board.read()
        self._worker = None
        if current is None:
            self._idle_deaths += 1
            if self._idle_deaths < _IDLE_DEATHS:
                return Trouble(None, f"its worker ended: {died.cause}")
            cause = (
                f"{died.cause}; it ended {_IDLE_DEATHS} times in a row between two samples of reward function "
                f"{function!r}: look at what that leaves behind (threads, closed files, memory)"
            )
            return WorkerDied(died.process, cause, died.log_tail)
        self._idle_deaths = 0
        return Trouble(current.index, f"its worker ended: {died.cause}")

    async def _end(self, worker: Worker) -> None:
        """Kill the worker's process group and wait until it is reaped."""
        self._worker = None
        worker.kill()
        await worker.close(grace_s=_END_S)
