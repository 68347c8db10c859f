"""The engine pool: routing, order, concurrency, failures, and every kind of wrong reply."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.errors import ProtocolError, RunError, WorkerDied, first_cause
from offbeat.rollout.pool import EnginePool
from offbeat.rpc.messages import EngineDescription, PauseCall
from offbeat.testing.fakes import FakeEngine, World
from offbeat.testing.virtual_time import run_in_virtual_time
from offbeat.types import GenerateRequest, Rollout, Sampling

SAMPLING = Sampling(max_new_tokens=4, stop_token_ids=(7,))


@dataclass
class Engine:
    """Replies with one token a sample after `delay_s`; `spoil` changes its rollouts."""

    name: str = "engine-0"
    delay_s: float = 0.0
    version: int = 3
    failure: Exception | None = None
    spoil: Callable[[list[Rollout]], list[Rollout]] = lambda rollouts: rollouts
    asked: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])

    async def describe(self) -> EngineDescription:
        await asyncio.sleep(self.delay_s)
        return EngineDescription(
            engine="fake",
            engine_version="1",
            torch_version="",
            weights_version=self.version,
            state="serving",
            vocab_size=8,
            dtype="float32",
            device="cpu",
            capabilities=(),
            max_length=99,
        )

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        self.asked.extend(request.prompt_id for request in requests)
        self.log.append("begin")
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        if self.failure is not None:
            raise self.failure
        self.log.append("end")
        return self.spoil([self._rollout(request, i) for request in requests for i in range(len(request.seeds))])

    def _rollout(self, request: GenerateRequest, index: int) -> Rollout:
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=index,
            epoch=request.epoch,
            prompt_token_ids=request.token_ids,
            token_ids=np.array([5, 7], np.int32),
            logprobs=np.array([-0.5, -1.0], np.float32),
            versions=((self.version, 2),),
            finish_reason="stop",
            engine=self.name,
            started_s=0.0,
            finished_s=1.0,
        )

    async def pause(self, mode: PauseCall) -> None:
        await asyncio.sleep(self.delay_s)
        self.log.append(f"pause {mode.mode}")

    async def resume(self) -> None:
        await asyncio.sleep(self.delay_s)
        self.log.append("resume")


def requests_of(count: int, samples: int = 2) -> list[GenerateRequest]:
    return [
        GenerateRequest(prompt_id=f"p/{i}", epoch=1, token_ids=np.array([i, 1], np.int32), seeds=tuple(range(samples)))
        for i in range(count)
    ]


def generate(engines: Sequence[Engine], count: int = 3) -> list[Rollout]:
    return asyncio.run(EnginePool(engines).generate(requests_of(count), SAMPLING))


@pytest.mark.parametrize("engines", [1, 2, 3, 8])
def test_results_come_in_the_order_of_the_requests_however_long_each_engine_takes(engines: int) -> None:
    pool = [Engine(name=f"engine-{i}", delay_s=0.01 * (engines - i)) for i in range(engines)]
    rollouts = generate(pool, count=7)
    assert [(r.prompt_id, r.sample_index) for r in rollouts] == [(f"p/{i}", j) for i in range(7) for j in range(2)]
    for index, engine in enumerate(pool):
        assert engine.asked == [f"p/{i}" for i in range(index, 7, engines)]
    assert all(r.engine == f"engine-{int(r.prompt_id[2:]) % engines}" for r in rollouts)


def test_engines_work_at_the_same_time() -> None:
    order: list[str] = []
    generate([Engine(name=f"engine-{i}", delay_s=0.01, log=order) for i in range(3)])
    assert order == ["begin"] * 3 + ["end"] * 3


def test_an_engine_without_a_share_is_not_asked() -> None:
    idle = Engine(name="engine-1", failure=RunError("asked"))
    assert len(generate([Engine(), idle], count=1)) == 2
    assert generate([Engine(), idle], count=0) == []


def test_one_failure_cancels_the_others_and_is_raised_itself() -> None:
    error = WorkerDied("engine-1", "killed by SIGKILL")
    slow = Engine(name="engine-0", delay_s=60)
    with pytest.raises(WorkerDied) as caught:
        generate([slow, Engine(name="engine-1", delay_s=0.01, failure=error)])
    assert caught.value is error
    assert slow.log == ["begin", "cancelled"]


def test_of_failures_at_one_moment_the_end_of_an_engine_is_raised_with_its_own_cause() -> None:
    noticed = Engine(name="engine-0", delay_s=0.01, failure=RunError("the connection is broken"))
    died = WorkerDied("engine-1", "killed by SIGKILL")
    died.__cause__ = OSError("exit status")
    with pytest.raises(WorkerDied) as caught:
        generate([noticed, Engine(name="engine-1", delay_s=0.01, failure=died)])
    assert caught.value is died
    assert isinstance(died.__cause__, OSError)


def test_the_cause_of_a_group_is_the_end_of_a_process_else_the_first_error() -> None:
    died, first, second = WorkerDied("engine-1", "exit code 1"), RunError("first"), RunError("second")
    assert first_cause(first) is first
    assert first_cause(ExceptionGroup("", [ExceptionGroup("", [first]), second])) is first
    assert first_cause(ExceptionGroup("", [first, ExceptionGroup("", [second, died])])) is died


def changed(position: int, **fields: Any) -> Callable[[list[Rollout]], list[Rollout]]:
    def spoil(rollouts: list[Rollout]) -> list[Rollout]:
        rollouts[position] = msgspec.structs.replace(rollouts[position], **fields)
        return rollouts

    return spoil


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda rollouts: rollouts[:-1], "1 samples for 2 seeds"),
        (changed(1, prompt_id="p/0"), r"the reply is for .*\('p/0', 1, 1\), asked for was \('p/1', 1, 1\)"),
        (changed(1, sample_index=0), r"the reply is for"),
        (changed(1, epoch=0), r"the reply is for"),
        (changed(1, prompt_token_ids=np.array([9, 9], np.int32)), "other token ids"),
        (changed(1, prompt_token_ids=np.array([1], np.int32)), r"other token ids \(1\) than were sent \(2\)"),
        (changed(1, logprobs=np.array([-1.0], np.float32)), "2 tokens with 1 logprobs"),
        (changed(1, logprobs=np.array([-1.0, np.nan], np.float32)), "token 1 has logprob nan"),
        (changed(1, logprobs=np.array([-np.inf, -1.0], np.float32)), "token 0 has logprob -inf"),
        (changed(1, logprobs=np.array([0.5, -1.0], np.float32)), "token 0 has logprob 0.5"),
        (changed(1, versions=((3, 1),)), "2 tokens, but weights versions for 1"),
        (changed(1, finish_reason="length"), "finished by 'length', but its last token is 7"),
        (changed(1, token_ids=np.array([5, 6], np.int32)), "finished by 'stop', but its last token is 6"),
        (changed(1, token_ids=np.array([7, 7], np.int32)), "goes on after stop id 7 at token 0"),
        (
            changed(
                1,
                token_ids=np.array([], np.int32),
                logprobs=np.array([], np.float32),
                versions=((3, 0),),
                finish_reason="length",
            ),
            "no token",
        ),
        (
            changed(
                1,
                token_ids=np.array([1] * 5, np.int32),
                logprobs=np.zeros(5, np.float32),
                versions=((3, 5),),
                finish_reason="length",
            ),
            "5 tokens, max_new_tokens is 4",
        ),
    ],
)
def test_a_wrong_reply_is_refused_with_engine_and_sample_B155(
    spoil: Callable[[list[Rollout]], list[Rollout]], text: str
) -> None:
    where = r"engine-1" if text.startswith("1 samples") else r"engine-1, prompt 'p/1', sample 1: "
    with pytest.raises(ProtocolError, match=f"{where}.*{text}"):
        generate([Engine(), Engine(name="engine-1", spoil=spoil)])


def test_an_aborted_sample_may_be_empty() -> None:
    empty = {
        "token_ids": np.array([], np.int32),
        "logprobs": np.array([], np.float32),
        "versions": ((3, 0),),
        "finish_reason": "abort",
    }
    assert len(generate([Engine(spoil=changed(0, **empty))])) == 6


@pytest.mark.parametrize(
    "second",
    [Engine(name="engine-1", version=2), Engine(name="engine-1", spoil=changed(0, versions=((3, 1), (2, 1))))],
    ids=["an engine behind", "two versions in a sample"],
)
def test_samples_of_two_weights_versions_in_one_call_are_refused(second: Engine) -> None:
    with pytest.raises(RunError, match=r"engine-1, prompt 'p/1', sample 0 .*version 2.* engine-0 drew from 3"):
        generate([Engine(), second])


def test_engines_of_different_kinds_or_versions_are_named() -> None:
    assert asyncio.run(EnginePool([Engine(), Engine(name="engine-1")]).describe()).weights_version == 3
    with pytest.raises(RunError, match="weights_version is 3 in engine-0, 4 in engine-1"):
        asyncio.run(EnginePool([Engine(), Engine(name="engine-1", version=4)]).describe())


def test_pause_and_resume_reach_every_engine() -> None:
    engines = [Engine(), Engine(name="engine-1", delay_s=0.01)]

    async def both() -> None:
        pool = EnginePool(engines)
        await pool.pause(PauseCall(mode="abort"))
        await pool.resume()

    asyncio.run(both())
    assert [engine.log for engine in engines] == [["pause abort", "resume"]] * 2


@dataclass
class Together(FakeEngine):
    """One of several ranks that can only resume together, as ranks of one collective do. Busy ones refuse to."""

    ranks: asyncio.Barrier | None = None
    refused: int = 0

    async def resume(self) -> None:
        assert self.ranks is not None
        assert not self.busy, "a rank with requests at work would not come to the collective"
        await self.ranks.wait()
        await super().resume()

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        self.refused += self.paused
        return await super().generate(requests, sampling)


def test_500_pauses_and_resumes_of_four_ranks_under_load_come_to_an_end() -> None:
    """B079: requests come at any time, and so do second pauses and second resumes."""
    uneven = random.Random(3)

    async def main() -> tuple[int, list[str], int]:
        world, ranks = World(), asyncio.Barrier(4)
        engines = [Together(world, name=f"engine-{i}", version=1, token_s=0.02, ranks=ranks) for i in range(4)]
        pool, served, refusals = EnginePool(engines), 0, list[str]()

        async def ask() -> None:
            nonlocal served
            while True:
                await asyncio.sleep(uneven.uniform(0.0, 0.2))
                try:
                    served += len(await pool.generate(requests_of(4, samples=1), SAMPLING))
                except RunError as error:
                    refusals.append(str(error))

        async def soon(call: Coroutine[Any, Any, None]) -> None:
            await asyncio.sleep(uneven.uniform(0.0, 0.1))
            await call

        clients = [asyncio.create_task(ask()) for _ in range(2)]
        for _ in range(500):
            await asyncio.gather(*(soon(pool.pause(PauseCall(mode="wait"))) for _ in range(uneven.choice([1, 2]))))
            assert not any(engine.busy for engine in engines)
            await asyncio.sleep(uneven.uniform(0.0, 0.05))
            await asyncio.gather(*(soon(pool.resume()) for _ in range(uneven.choice([1, 2]))))
            await asyncio.sleep(uneven.uniform(0.0, 0.2))
        assert not any(client.done() for client in clients)
        for client in clients:
            client.cancel()
        return served, refusals, sum(engine.refused for engine in engines)

    served, refusals, halfway = run_in_virtual_time(main())
    assert served > 500
    assert len(refusals) > 20
    assert all("the engines are paused" in refusal for refusal in refusals)
    assert halfway == 0, "a request was let in while some engines were still paused"
