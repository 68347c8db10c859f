"""The reward worker: runs reward functions one sample (or group) after the other, in the main thread.

It never judges time by itself except for coroutines: the pool ends the whole process when a sample takes too long. An
exception of a function is that sample's error, as text; a value that is no reward is reported as a broken contract.
Coroutine functions run up to `CONCURRENT` samples at once in one event loop that lives as long as the process.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.data.plain import from_wire
from offbeat.faults import point
from offbeat.rewards.board import Board
from offbeat.rewards.functions import load_function
from offbeat.rewards.signature import FunctionSignature, signature_of
from offbeat.rewards.values import NotAReward, as_group_rewards, as_reward
from offbeat.rpc.messages import Nothing, RewardItem, ScoreCall, ScoreResult
from offbeat.rpc.server import Method, Progress, WorkerContext, serve

CONCURRENT = 32
NOTICE_S = 0.2


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process."""

    functions: tuple[str, ...]
    timeout_s: float
    board: str
    path: tuple[str, ...] = ()
    """The controller's module search path."""


class RewardDescription(msgspec.Struct, frozen=True, kw_only=True):
    signatures: dict[str, FunctionSignature]
    concurrent: tuple[str, ...]
    """Coroutine functions."""


class OverLimit(Exception):
    """A coroutine function was ended at the limit."""


@dataclass
class _Outcome:
    """Values and errors of a call, filled in place by index."""

    values: list[float | None]
    errors: list[str | None]
    broken: list[int] = field(default_factory=list[int])

    def fail(self, indices: range, error: BaseException) -> None:
        for index in indices:
            self.errors[index] = _text_of(error)
            if isinstance(error, NotAReward):
                self.broken.append(index)


class RewardWorker:
    def __init__(self, settings: RewardSettings, progress: Progress) -> None:
        self._timeout_s = settings.timeout_s
        self._progress = progress
        self._board = Board(settings.board)
        self._runner = asyncio.Runner()
        sys.path.extend(entry for entry in settings.path if entry not in sys.path)
        self._functions = {spec: load_function(spec) for spec in settings.functions}
        self._signatures = {spec: signature_of(function) for spec, function in self._functions.items()}

    def methods(self) -> dict[str, Method]:
        return {
            "describe": Method(Nothing, self.describe),
            "score": Method(ScoreCall, self.score),
        }

    def describe(self, _: Nothing) -> RewardDescription:
        concurrent = [spec for spec, function in self._functions.items() if _is_coroutine(function)]
        return RewardDescription(signatures=self._signatures, concurrent=tuple(concurrent))

    def score(self, call: ScoreCall) -> ScoreResult:
        function, signature = self._functions[call.function], self._signatures[call.function]
        outcome = _Outcome([None] * len(call.items), [None] * len(call.items))
        units = _units(call, signature.group)
        if _is_coroutine(function):
            self._score_in_loop(function, signature, call.items, units, outcome)
        else:
            for number, unit in enumerate(units):
                self._score_unit(function, signature, call.items, number, unit, outcome)
        return ScoreResult(values=tuple(outcome.values), errors=tuple(outcome.errors), broken=tuple(outcome.broken))

    def _score_unit(
        self,
        function: Callable[..., Any],
        signature: FunctionSignature,
        items: tuple[RewardItem, ...],
        number: int,
        unit: range,
        outcome: _Outcome,
    ) -> None:
        self._progress.advance()
        self._board.enter(number)
        try:
            point("reward.score")
            _keep(function(**_arguments(signature, items, unit)), signature, unit, outcome)
        except BaseException as error:  # SystemExit and library time-outs that are no Exception are errors too
            outcome.fail(unit, error)
        finally:
            self._board.leave()

    def _score_in_loop(
        self,
        function: Callable[..., Awaitable[Any]],
        signature: FunctionSignature,
        items: tuple[RewardItem, ...],
        units: list[range],
        outcome: _Outcome,
    ) -> None:
        waiting = set(range(len(units)))
        try:
            self._runner.run(self._score_together(function, signature, items, units, outcome, waiting))
        except (asyncio.CancelledError, RuntimeError) as error:  # RuntimeError: the loop was stopped
            reason = str(error) or type(error).__name__
            broken = NotAReward(f"stopped or cancelled what runs beside it in the event loop ({reason})")
            for number in waiting:
                outcome.fail(units[number], broken)
            self._runner = asyncio.Runner()  # the old loop may not run any more, and its tasks may not end

    async def _score_together(
        self,
        function: Callable[..., Awaitable[Any]],
        signature: FunctionSignature,
        items: tuple[RewardItem, ...],
        units: list[range],
        outcome: _Outcome,
        waiting: set[int],
    ) -> None:
        """`waiting`: the places of units that have no outcome yet."""
        places = asyncio.Semaphore(CONCURRENT)

        async def one(number: int, unit: range) -> None:
            async with places:
                # The pool gives a step that blocks a little longer than the time-out below takes to be noticed.
                started_s = time.monotonic() + NOTICE_S
                work = _Watched(_await(function, _arguments(signature, items, unit)), self._board, number, started_s)
                limit = asyncio.timeout(self._timeout_s)
                try:
                    async with limit:
                        _keep(await work, signature, unit, outcome)
                except BaseException as error:  # as above
                    late = OverLimit(f"took longer than rewards.timeout_s = {self._timeout_s:g} s")
                    outcome.fail(unit, late if limit.expired() else error)
                waiting.discard(number)
                self._progress.advance()

        # A group of tasks, since one that cancels itself when it is done must not end the others.
        async with asyncio.TaskGroup() as group:
            for number, unit in enumerate(units):
                group.create_task(one(number, unit))


class _Watched:
    """A coroutine that is on the board while it runs, and only then: a blocking step is the pool's to end."""

    def __init__(self, work: Coroutine[Any, Any, Any], board: Board, number: int, started_s: float) -> None:
        self._work, self._board, self._number, self._started_s = work, board, number, started_s

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731 -- changes from step to step
        while True:
            self._board.enter(self._number, self._started_s)
            try:
                waited_for = step()
            except StopIteration as done:
                return done.value
            finally:
                self._board.leave()
            try:
                sent = yield waited_for
            except BaseException as error:
                step = _thrower(self._work, error)
            else:
                step = _sender(self._work, sent)


def _thrower(work: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: work.throw(error)


def _sender(work: Coroutine[Any, Any, Any], value: Any) -> Callable[[], Any]:
    return lambda: work.send(value)


async def _await(function: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> Any:
    return await function(**arguments)


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 -- asks of what kind it is


def _units(call: ScoreCall, group: bool) -> list[range]:
    """What one call of the function grades: an item, or the items of a group."""
    if not group:
        return [range(index, index + 1) for index in range(len(call.items))]
    units: list[range] = []
    start = 0
    for size in call.groups or (len(call.items),):
        units.append(range(start, start + size))
        start += size
    return units


def _arguments(signature: FunctionSignature, items: tuple[RewardItem, ...], unit: range) -> dict[str, Any]:
    each = [_of_item(signature, items[index]) for index in unit]
    if not signature.group:
        return each[0]
    names = [name for name in each[0] if all(name in one for one in each)]
    return {name: [one[name] for one in each] for name in names}


def _of_item(signature: FunctionSignature, item: RewardItem) -> dict[str, Any]:
    row = from_wire(item.columns)
    missing = signature.unfilled(row)
    if missing:
        raise NotAReward(f"has a parameter {missing[0]!r}, which the row lacks; its columns are {', '.join(row)}")
    return signature.arguments(item.completion, item.prompt, row)


def _keep(value: Any, signature: FunctionSignature, unit: range, outcome: _Outcome) -> None:
    values = as_group_rewards(value, len(unit)) if signature.group else [as_reward(value)]
    for index, one in zip(unit, values, strict=True):
        outcome.values[index] = one


def _text_of(error: BaseException) -> str:
    """Type, message and the innermost line; never raises, whatever the exception's own `__str__` does."""
    try:
        message = str(error)
    except BaseException as inner:  # SystemExit too
        message = f"(no message: its __str__ raises {type(inner).__name__})"
    if isinstance(error, NotAReward | OverLimit):
        text = message
    else:
        frame = _innermost(error)
        place = f" ({frame.filename}:{frame.lineno})" if frame else ""
        text = f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"
    return text[:2000].encode("utf-8", "backslashreplace").decode()


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    """The line where it was raised, ours aside: that of its cause, when Python made another error of it."""
    current: BaseException | None = error
    for _ in range(8):  # causes may lead round in a circle
        if current is None:
            return None
        frames = [frame for frame in traceback.extract_tb(current.__traceback__) if frame.filename != __file__]
        if frames:
            return frames[-1]
        current = current.__cause__ or current.__context__
    return None


def build(context: WorkerContext) -> Mapping[str, Method]:
    settings = msgspec.convert(dict(context.settings), RewardSettings)
    point("reward.init")
    return RewardWorker(settings, context.progress).methods()


if __name__ == "__main__":
    serve(build)
