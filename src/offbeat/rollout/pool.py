"""Several engines behind the one `Engine` seam. Fixed routing, one order of results, and no reply taken on trust.

    requests  0 1 2 3 4 …  ──▶  engine 0: 0 2 4 …     a request's samples stay together: its prefill is shared
                                engine 1: 1 3 …

Which engine computes what depends on positions in the call alone, never on who is free: the same call gives the same
rows to the same engine. A failure of one engine cancels the calls to the others and is raised as it is.

Pausing and resuming take turns, and each waits for every engine: requests are let in again when the last engine has
resumed, never between the first and the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from offbeat.errors import ProtocolError, RunError, first_cause
from offbeat.ports import Engine
from offbeat.rpc.messages import EngineDescription, PauseCall
from offbeat.types import GenerateRequest, Rollout, Sampling

R = TypeVar("R")


class NamedEngine(Engine, Protocol):
    """An engine that errors can name."""

    @property
    def name(self) -> str: ...


class EnginePool:
    """`ports.Engine` over one or more engines, which belong to the caller."""

    def __init__(self, engines: Sequence[NamedEngine]) -> None:
        assert engines, "a pool has at least one engine"
        self._engines = tuple(engines)
        self._open = True
        self._turn = asyncio.Lock()

    async def describe(self) -> EngineDescription:
        """Of the first engine, once all are seen to be of one kind and at one version."""
        descriptions = await _all([engine.describe() for engine in self._engines])
        first = descriptions[0]
        for engine, description in zip(self._engines, descriptions, strict=True):
            for field in ("engine", "vocab_size", "dtype", "max_length", "weights_version"):
                ours, theirs = getattr(first, field), getattr(description, field)
                if ours != theirs:
                    raise RunError(
                        f"engines differ: {field} is {ours!r} in {self._engines[0].name}, {theirs!r} in {engine.name}; "
                        "all engines of a run serve the same model at the same version."
                    )
        return first

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        """Raises the original error of the first engine that fails, `ProtocolError` for a wrong reply."""
        if not self._open:
            raise RunError(f"the engines are paused and take no requests: resume them first ({len(requests)} refused).")
        shares = [requests[index :: len(self._engines)] for index in range(len(self._engines))]
        busy = [(engine, share) for engine, share in zip(self._engines, shares, strict=True) if share]
        replies = await _all([engine.generate(share, sampling) for engine, share in busy])
        groups: list[list[list[Rollout]]] = []
        for (engine, share), reply in zip(busy, replies, strict=True):
            groups.append(check_reply(engine.name, share, sampling, reply))
        _check_one_version([(engine.name, reply) for (engine, _), reply in zip(busy, replies, strict=True)])
        # Request number k went to engine k mod N as its number k // N.
        count = len(self._engines)
        return [rollout for k in range(len(requests)) for rollout in groups[k % count][k // count]]

    async def pause(self, mode: PauseCall) -> None:
        async with self._turn:
            self._open = False
            await _all([engine.pause(mode) for engine in self._engines])

    async def resume(self) -> None:
        """Once for each pause: a second one that comes meanwhile waits, and then has nothing to do."""
        async with self._turn:
            if not self._open:
                await _all([engine.resume() for engine in self._engines])
                self._open = True


async def _all(calls: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Run them together; the first failure cancels the others, and what explains it is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        first = first_cause(failures)
        raise first from first.__cause__
    return [task.result() for task in tasks]


def check_reply(
    engine: str, requests: Sequence[GenerateRequest], sampling: Sampling, rollouts: Sequence[Rollout]
) -> list[list[Rollout]]:
    """The rollouts of each request, once everything about them has been checked. Raises `ProtocolError`."""
    expected = [(request, index) for request in requests for index in range(len(request.seeds))]
    if len(rollouts) != len(expected):
        raise ProtocolError(f"{engine} returned {len(rollouts)} samples for {len(expected)} seeds.")
    groups: list[list[Rollout]] = [[] for _ in requests]
    numbers = [number for number, request in enumerate(requests) for _ in request.seeds]
    for number, (request, index), rollout in zip(numbers, expected, rollouts, strict=True):
        problem = _problem(request, index, sampling, rollout)
        if problem:
            raise ProtocolError(f"{engine}, prompt {request.prompt_id!r}, sample {index}: {problem}.")
        groups[number].append(rollout)
    return groups


def _problem(request: GenerateRequest, index: int, sampling: Sampling, rollout: Rollout) -> str | None:
    """What is wrong with a reply, or None."""
    wanted = (request.prompt_id, index, request.epoch)
    given = (rollout.prompt_id, rollout.sample_index, rollout.epoch)
    if given != wanted:
        return f"the reply is for (prompt, sample, epoch) {given}, asked for was {wanted}"
    if not np.array_equal(rollout.prompt_token_ids, request.token_ids):
        return (
            f"the engine's prompt has other token ids ({len(rollout.prompt_token_ids)}) than were sent "
            f"({len(request.token_ids)}): it tokenises again or cuts prompts short"
        )
    return _token_problem(sampling, rollout)


def _token_problem(sampling: Sampling, rollout: Rollout) -> str | None:
    tokens, logprobs = rollout.token_ids, rollout.logprobs
    if len(tokens) != len(logprobs):
        return f"{len(tokens)} tokens with {len(logprobs)} logprobs"
    if len(tokens) > sampling.max_new_tokens:
        return f"{len(tokens)} tokens, max_new_tokens is {sampling.max_new_tokens}"
    if not len(tokens) and rollout.finish_reason != "abort":
        return f"no token, yet it says it finished by {rollout.finish_reason!r}"
    bad = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > 1e-3))
    if len(bad):
        return f"token {bad[0]} has logprob {logprobs[bad[0]]}"
    versioned = sum(count for _, count in rollout.versions)
    if versioned != len(tokens) or not rollout.versions:
        return f"{len(tokens)} tokens, but weights versions for {versioned}"
    stops = np.isin(tokens, sampling.stop_token_ids)
    if stops[:-1].any():
        return f"it goes on after stop id {tokens[int(stops.argmax())]} at token {int(stops.argmax())}"
    ends_in_stop = bool(len(tokens)) and bool(stops[-1])
    if ends_in_stop != (rollout.finish_reason == "stop"):
        last = tokens[-1] if len(tokens) else None
        return f"it says it finished by {rollout.finish_reason!r}, but its last token is {last}"
    return None


def _check_one_version(replies: Sequence[tuple[str, Sequence[Rollout]]]) -> None:
    """All samples of a call were drawn from one weights version, in all engines."""
    seen: tuple[str, Rollout] | None = None
    for engine, rollouts in replies:
        for rollout in rollouts:
            seen = seen or (engine, rollout)
            versions = {version for version, _ in rollout.versions}
            if versions != {seen[1].versions[0][0]}:
                raise RunError(
                    f"{engine}, prompt {rollout.prompt_id!r}, sample {rollout.sample_index} was drawn from weights "
                    f"version {', '.join(map(str, sorted(versions)))}, {seen[0]} drew from {seen[1].versions[0][0]}: "
                    "an engine missed a weight transfer."
                )
