"""The pool of reward workers: grades rollouts in parallel and ends a worker whose sample takes too long.

    work (one function × one sample or group) ──▶ queue ──▶ slot 0 … slot n-1, each one worker process
                                                            │ chunks of work, one call a chunk
                                                            └ deadline of the current sample, read off the board

A sample over its limit, or one that ends its worker (a crash, `os._exit`, memory), counts as an error with value 0.
The worker is ended with all that it started and a fresh one takes its place; the rest of the chunk is graded again, and
results of an ended call are never used: each value comes from exactly one completed call. Nothing of the user's runs
in this process, so the event loop is never held up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.data.plain import to_wire
from offbeat.errors import ProtocolError, RemoteError, RewardError, first_cause
from offbeat.rewards.functions import short_names
from offbeat.rewards.ledger import Ledger, Work
from offbeat.rewards.slot import Slot, Trouble
from offbeat.rewards.worker import RewardDescription, RewardSettings
from offbeat.rpc.client import Hub
from offbeat.rpc.messages import RewardItem, ScoreCall, ScoreResult
from offbeat.rpc.work import WorkLog
from offbeat.types import IntArray, Prompt, Rollout, Scored

if TYPE_CHECKING:
    from offbeat.config import RewardsSection

_log = logging.getLogger("offbeat.rewards")

Decode = Callable[[Sequence[IntArray]], list[str]]
"""Token ids of completions → their texts; see `offbeat.data.chat.decode_completions`."""

FIRST_CHUNK = 16
LARGEST_CHUNK = 128
CHUNK_S = 0.1
"""A chunk aims at this much work: what is lost when its worker is ended."""


@dataclass(frozen=True)
class Grade:
    """What the functions of a sample's source say of it; see `Scored` for the fields."""

    reward: float
    parts: dict[str, float]
    errors: tuple[str, ...]


class RewardPool:
    """Made by `RewardPool.start`; the hub's exit ends its workers.

    Attributes:
        names: spec of each function → the name under which its values are reported.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        functions: Mapping[str, Mapping[str, float]],
        decode: Decode | None,
        section: RewardsSection,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names or short_names(spec for weights in functions.values() for spec in weights)
        self._functions = functions
        self._decode = decode
        self._section = section
        self._idle: asyncio.Queue[Slot] = asyncio.Queue()
        self._slots = slots
        self._description: RewardDescription | None = None
        for slot in slots:
            self._idle.put_nowait(slot)

    @classmethod
    async def start(
        cls,
        hub: Hub,
        section: RewardsSection,
        functions: Mapping[str, Mapping[str, float]],
        decode: Decode | None,
        logs: Path,
        *,
        start_s: float = 60.0,
        names: Mapping[str, str] | None = None,
    ) -> RewardPool:
        """Start every worker.

        Args:
            functions: name of a source (or held-out set) → its reward functions and their weights.
            decode: for `score`; None where only texts are graded.
            logs: folder of the workers' logs (what reward functions print is there).
            names: spec of each function → the name under which it reports; None: short ones, unique over `functions`.

        Raises `RewardError` when a reward function cannot be loaded.
        """
        specs = tuple(dict.fromkeys(spec for weights in functions.values() for spec in weights))
        settings = RewardSettings(functions=specs, timeout_s=section.timeout_s, board="", path=tuple(sys.path))
        slots = [
            Slot(hub, f"reward-{index}", settings, logs / f"reward-{index}.log", start_s)
            for index in range(section.workers)
        ]
        pool = cls(slots, functions, decode, section, names)
        try:
            async with asyncio.TaskGroup() as group:
                for slot in slots:
                    group.create_task(slot.ensure())
        except BaseException as error:
            await pool.close()
            first = first_cause(error)
            raise first from first.__cause__
        pool._description = slots[0].description
        return pool

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots))

    async def score(self, rollouts: Sequence[Rollout], prompts: Iterable[Prompt]) -> list[Scored]:
        """Grade rollouts of these prompts, in the order of the rollouts.

        Raises:
            RewardError: more errors than `max_error_fraction` allows, or a function broke its contract.
            WorkerDied: workers end again and again without a sample to blame.
        """
        by_id = {(prompt.id, prompt.epoch): prompt for prompt in prompts}
        own = [by_id[rollout.prompt_id, rollout.epoch] for rollout in rollouts]
        assert self._decode is not None, "a pool without a decoder grades texts only"
        texts = self._decode([rollout.token_ids for rollout in rollouts])
        ids = [f"{rollout.prompt_id} sample {rollout.sample_index}" for rollout in rollouts]
        grades = await self.grade(ids, own, texts)
        return [
            Scored(
                rollout=rollout, prompt=prompt, text=text, reward=grade.reward, parts=grade.parts, errors=grade.errors
            )
            for rollout, prompt, text, grade in zip(rollouts, own, texts, grades, strict=True)
        ]

    async def grade(self, ids: Sequence[str], prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Grade]:
        """Grade completions as texts: `texts[i]` answers `prompts[i]` and is called `ids[i]` in messages.

        A group is what has one prompt and epoch. Errors are those of `score`.
        """
        work = self._work(prompts)
        ledger = Ledger(
            ids, sum(len(one.places) for one in work), self._section.max_error_fraction, self._section.timeout_s
        )
        items = _Items(prompts, texts, self._columns)
        await self._grade(deque(work), items, ledger)
        return [self._summed(prompt, ledger.of(place)) for place, prompt in enumerate(prompts)]

    def _summed(self, prompt: Prompt, graded: Mapping[str, float | str | None]) -> Grade:
        parts: dict[str, float] = {}
        errors: list[str] = []
        reward = 0.0
        for spec, weight in self._functions[prompt.source].items():
            value = graded[spec]
            if isinstance(value, str):
                errors.append(f"{self.names[spec]}: {value}")
                parts[self.names[spec]] = 0.0  # in the mean as what it counted, or failing would look like winning
            elif value is not None:
                parts[self.names[spec]] = value
                reward += weight * value
        return Grade(reward, parts, tuple(errors))

    def _work(self, prompts: Sequence[Prompt]) -> list[Work]:
        """Every function's samples, by function: a chunk is one function's."""
        assert self._description is not None
        work: list[Work] = []
        for spec, signature in self._description.signatures.items():
            places = [place for place, prompt in enumerate(prompts) if spec in self._functions[prompt.source]]
            if not signature.group:
                work.extend(Work(spec, (place,)) for place in places)
                continue
            groups: dict[tuple[str, int], list[int]] = {}
            for place in places:
                groups.setdefault((prompts[place].id, prompts[place].epoch), []).append(place)
            work.extend(Work(spec, tuple(group)) for group in groups.values())
        return work

    def _columns(self, spec: str) -> frozenset[str] | None:
        """The columns that a function wants to see; None: all."""
        assert self._description is not None
        signature = self._description.signatures[spec]
        if signature.needs_all_columns:
            return None
        return frozenset(signature.column_of(parameter) for parameter in signature.parameters)

    async def _grade(self, queue: deque[Work], items: _Items, ledger: Ledger) -> None:
        pace: dict[str, float] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(self._slots), len(queue))):
                    group.create_task(self._drain(queue, items, ledger, pace))
        except BaseExceptionGroup as errors:
            first = first_cause(errors)
            raise first from first.__cause__

    async def _drain(self, queue: deque[Work], items: _Items, ledger: Ledger, pace: dict[str, float]) -> None:
        slot = await self._idle.get()
        work = WorkLog()
        try:
            while queue:
                chunk = self._take(queue, pace)
                await self._grade_chunk(slot, chunk, queue, items, ledger, pace)
                work.lap("score")
        finally:
            self._idle.put_nowait(slot)
            slot.worked(work.spans())

    def _take(self, queue: deque[Work], pace: Mapping[str, float]) -> list[Work]:
        """The next chunk: work of one function, small where it is slow, and enough left for the other slots."""
        assert self._description is not None
        first = queue.popleft()
        share = math.ceil((len(queue) + 1) / len(self._slots))
        if first.alone:
            most = 1
        elif first.function in self._description.concurrent:
            most = min(LARGEST_CHUNK, share)
        else:
            seconds = pace.get(first.function)
            most = FIRST_CHUNK if seconds is None else int(CHUNK_S / max(seconds, 1e-6))
            most = max(1, min(most, LARGEST_CHUNK, share))
        chunk = [first]
        while queue and len(chunk) < most and queue[0].function == first.function and not queue[0].alone:
            chunk.append(queue.popleft())
        return chunk

    async def _grade_chunk(
        self,
        slot: Slot,
        chunk: list[Work],
        queue: deque[Work],
        items: _Items,
        ledger: Ledger,
        pace: dict[str, float],
    ) -> None:
        started = time.monotonic()
        try:
            call = ScoreCall(
                function=chunk[0].function,
                items=tuple(items.of(place, chunk[0].function) for work in chunk for place in work.places),
                groups=tuple(len(work.places) for work in chunk),
            )
            result = await slot.score(call, len(chunk))
        except (RemoteError, ProtocolError) as error:
            raise RewardError(f"reward worker {slot.name}: {error}") from error
        except Trouble as trouble:
            self._sort_out(trouble, chunk, queue, ledger)
            return
        _keep(result, chunk, ledger)
        pace[chunk[0].function] = (time.monotonic() - started) / len(chunk)

    def _sort_out(self, trouble: Trouble, chunk: list[Work], queue: deque[Work], ledger: Ledger) -> None:
        """One sample of the chunk is to blame: it is an error, all others go back to the head of the queue."""
        at = trouble.index if trouble.index is not None else 0 if len(chunk) == 1 else None
        if at is None:
            # Nobody can say which: one at a time will tell.
            queue.extendleft(Work(work.function, work.places, alone=True) for work in reversed(chunk))
            return
        blamed = chunk[at]
        for place in blamed.places:
            _log.warning("%s: %s: %s", ledger.ids[place], self.names[blamed.function], trouble.text)
        queue.extendleft(reversed([*chunk[:at], *chunk[at + 1 :]]))
        for place in blamed.places:
            ledger.fail(place, blamed.function, trouble.text)


class _Items:
    """Samples as the workers get them: with the columns that the function at hand asks for, and no others."""

    def __init__(
        self, prompts: Sequence[Prompt], texts: Sequence[str], columns: Callable[[str], frozenset[str] | None]
    ) -> None:
        self._prompts, self._texts, self._columns = prompts, texts, columns
        self._rows: dict[tuple[str, int, str], dict[str, object]] = {}

    def of(self, place: int, function: str) -> RewardItem:
        prompt = self._prompts[place]
        key = (prompt.id, prompt.epoch, function)
        if key not in self._rows:
            wanted = self._columns(function)
            row = {name: value for name, value in prompt.columns.items() if wanted is None or name in wanted}
            try:
                self._rows[key] = to_wire(row)
            except TypeError as error:
                raise RewardError(f"{prompt.id}: {error}; convert the column to text or numbers.") from error
        return RewardItem(prompt=prompt.text, completion=self._texts[place], columns=self._rows[key])


def _keep(result: ScoreResult, chunk: Sequence[Work], ledger: Ledger) -> None:
    places = [place for work in chunk for place in work.places]
    function = chunk[0].function
    for index in result.broken:
        raise RewardError(f"reward function {function!r} {result.errors[index]} (sample {ledger.ids[places[index]]}).")
    for place, value, error in zip(places, result.values, result.errors, strict=True):
        if error is None:
            ledger.keep(place, function, value)
        else:
            ledger.fail(place, function, error)
