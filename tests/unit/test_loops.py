"""The two loops over fakes that take time, and the proof that each ordering error is noticed."""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat import loops
from offbeat.config import Config, parse_config
from offbeat.errors import RunError, WeightSyncError
from offbeat.journal import Journal, account
from offbeat.journal.events import events
from offbeat.loops.on_policy import on_policy
from offbeat.loops.one_step import one_step
from offbeat.metrics.spans import Timeline
from offbeat.ports import SyncReport
from offbeat.stages import RunStages, Sampled, Trained
from offbeat.testing.fakes import FakeEngine, FakePrompts, FakeReward, FakeTrainer, FakeWeightSync, World
from offbeat.testing.virtual_time import run_in_virtual_time
from offbeat.types import Sampling

STEPS = 5


@dataclass
class Recorded:
    world: World
    trained: list[Trained] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    weights: FakeWeightSync | None = None
    journal: io.BytesIO = field(default_factory=io.BytesIO)
    elapsed_s: float = 0.0

    def synced(self, report: SyncReport) -> None:
        assert report.version >= 0


@dataclass
class _Recorder:
    into: Recorded

    def synced(self, report: SyncReport) -> None:
        self.into.synced(report)

    def trained(self, trained: Trained) -> None:
        self.into.trained.append(trained)


@dataclass
class _Evaluations:
    into: Recorded
    engine: FakeEngine
    every: int = 2

    def due(self, version: int) -> bool:
        return version % self.every == 0 or version == STEPS

    async def run(self, version: int) -> None:
        assert self.engine.version == version
        assert self.engine.busy == 0
        await asyncio.sleep(0.1)
        self.into.evaluated.append(version)


@dataclass
class _Saver:
    into: Recorded

    def due(self, next_step: int) -> bool:
        return next_step == STEPS

    async def save(self, next_step: int, version: int) -> None:
        await asyncio.sleep(0.01)
        self.into.saved.append(next_step)


def make_config(max_staleness: int) -> Config:
    return parse_config(
        {
            "model": "fake",
            "steps": STEPS,
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_staleness": max_staleness,
            "data": [{"source": "rows.jsonl", "rewards": {"fake:fake": 1.0}}],
        }
    )


def run(
    loop: Callable[[loops.Stages[Sampled]], Any],
    max_staleness: int,
    *,
    train_s: float = 1.0,
    refuse_stale: bool = True,
    first: int = 0,
    during: Callable[[RunStages, Trained], None] | None = None,
    stop_at_s: float | None = None,
    then: Callable[[RunStages], None] | None = None,
) -> Recorded:
    world = World(trainer_version=first)
    into = Recorded(world)
    engine = FakeEngine(world, refuse_stale=refuse_stale)
    into.weights = FakeWeightSync(world, [engine])
    journal = Journal(into.journal)
    if first:
        journal.resumed(first, None, ())
    stages = RunStages(
        config=make_config(max_staleness),
        sampling=Sampling(max_new_tokens=4),
        prompts=FakePrompts(),
        engine=engine,
        reward=FakeReward(),
        trainer=FakeTrainer(world, train_s=train_s),
        weights=into.weights,
        evaluations=_Evaluations(into, engine),
        saver=_Saver(into),
        recorder=_Recorder(into),
        journal=journal,
        timeline=Timeline(),
        remaining=range(first, STEPS),
        version=first,
    )
    if during is not None:
        recorder = _Recorder(into)

        class Watching(_Recorder):
            def trained(self, trained: Trained) -> None:
                recorder.trained(trained)
                during(stages, trained)

        stages.recorder = Watching(into)

    async def main() -> None:
        if stop_at_s is not None:
            asyncio.get_running_loop().call_later(stop_at_s, stages.stop)
        await loop(stages)
        await stages.finish()
        into.elapsed_s = asyncio.get_running_loop().time()
        if then is not None:
            then(stages)

    run_in_virtual_time(main())
    return into


@pytest.mark.parametrize(("loop", "staleness"), [(on_policy, 0), (one_step, 1)])
def test_stopped_in_the_last_step_a_run_is_not_done_and_its_resume_only_syncs_and_evaluates(
    loop: Callable[[loops.Stages[Sampled]], Any], staleness: int
) -> None:
    done: list[bool] = []

    def stop(stages: RunStages, trained: Trained) -> None:
        if trained.step == STEPS - 1:
            stages.stop()

    into = run(loop, staleness, during=stop, then=lambda stages: done.append(stages.done))
    assert (into.evaluated, into.saved, done) == ([0, 2, 4], [STEPS], [False])
    into = run(loop, staleness, first=STEPS, then=lambda stages: done.append(stages.done))
    assert (into.evaluated, into.trained, done) == ([STEPS], [], [False, True])
    assert [len(into.world.named(name)) for name in ("sync", "generate", "train")] == [1, 0, 0]


def expected_rows(step: int) -> tuple[int, ...]:
    return tuple(range(step * 4, step * 4 + 4))


def check(into: Recorded, max_staleness: int, first: int = 0) -> None:
    """Everything that a loop promises, read off the log of what really happened."""
    world, steps = into.world, range(first, STEPS)
    assert into.weights is not None
    assert into.weights.busy_engines == 0, "a sync ran under a generation"
    syncs, generated, trained = world.named("sync"), world.named("generate"), world.named("train")
    assert [event.rows for event in generated] == [expected_rows(step) for step in steps]
    assert [trained_step.step for trained_step in into.trained] == list(steps)
    for step, event in zip(steps, trained, strict=True):
        assert sorted(set(event.rows)) == list(expected_rows(step))
        assert len(event.rows) == 8, "every sample once"
    assert syncs[0].ended_s <= generated[0].started_s, "the first sync comes before anything is sampled"
    assert [event.version for event in syncs] == list(range(first, STEPS + 1)), "every version reaches the engines once"
    lags = [into.trained[i].version - generated[i].version for i in range(len(into.trained))]
    assert lags == [0] + [max_staleness] * (len(steps) - 1)
    assert all(len(scored.rollout.versions) == 1 for step in into.trained for scored in step.scored)
    assert into.evaluated == [v for v in range(first, STEPS + 1) if v % 2 == 0 or v == STEPS]
    told = account(events(io.BytesIO(into.journal.getvalue())))
    assert (told.problems, told.unended) == ([], {})
    assert sorted(told.trained_at.values()) == sorted(step for step in steps for _ in range(8))
    # generate 1.0 (+ reward 0.05), train 1.0, sync 0.1, eval 0.1 where due, save 0.01
    evaluations = 0.1 * len(into.evaluated)
    if max_staleness == 0:
        bound = len(steps) * (1.05 + 1.0 + 0.1) + 0.1
    else:
        bound = 1.05 + len(steps) * (1.05 * 1.05 + 0.1) + 0.1
    assert into.elapsed_s <= bound + evaluations + 0.1, "generation and training do not overlap as promised"


@pytest.mark.parametrize(("loop", "staleness"), [(on_policy, 0), (one_step, 1)])
def test_a_loop_trains_every_batch_once_in_order_at_the_promised_lag(loop: Any, staleness: int) -> None:
    check(run(loop, staleness), staleness)


@pytest.mark.parametrize(("loop", "staleness"), [(on_policy, 0), (one_step, 1)])
def test_a_resumed_loop_starts_with_a_full_sync_and_lag_zero(loop: Any, staleness: int) -> None:
    into = run(loop, staleness, first=2)
    check(into, staleness, first=2)


@pytest.mark.parametrize("train_s", [0.2, 1.0, 3.0])
def test_a_one_step_off_policy_step_takes_as_long_as_its_slower_side_plus_the_sync(train_s: float) -> None:
    into = run(one_step, 1, train_s=train_s)
    steps = [event.ended_s for event in into.world.named("train")]
    slower = max(1.0 + 0.05, train_s)
    for before, after in itertools.pairwise(steps[:-1]):
        assert after - before <= 1.05 * slower + 0.1 + 0.1  # sync, and an evaluation where one is due


@pytest.mark.parametrize(("loop", "staleness"), [(on_policy, 0), (one_step, 1)])
def test_a_run_told_to_stop_finishes_its_step_saves_and_drops_what_is_in_flight(loop: Any, staleness: int) -> None:
    def stop_after_step_1(stages: RunStages, trained: Trained) -> None:
        if trained.step == 1:
            stages.stop()

    into = run(loop, staleness, during=stop_after_step_1)
    assert [step.step for step in into.trained] == [0, 1]
    assert into.saved == [2]


@pytest.mark.parametrize(("loop", "staleness"), [(on_policy, 0), (one_step, 1)])
def test_a_run_told_to_stop_at_any_time_has_saved_what_it_trained(loop: Any, staleness: int) -> None:
    """In the middle of sampling, training, a sync, an evaluation or a save."""
    for tenth in range(101):
        into = run(loop, staleness, stop_at_s=0.1 * tenth + 0.005)
        assert [step.step for step in into.trained] == list(range(len(into.trained)))
        assert into.saved == [len(into.trained)], f"told after {tenth / 10} s"


def test_a_failure_while_sampling_ends_the_loop_at_once_even_during_training() -> None:
    world = World()
    engine = FakeEngine(world)
    into = Recorded(world)

    class FailingReward(FakeReward):
        async def score(self, rollouts: Any, prompts: Any) -> Any:
            if int(prompts[0].token_ids[0]) >= 4:
                raise RunError("the reward worker is gone")
            return await super().score(rollouts, prompts)

    stages = RunStages(
        config=make_config(1),
        sampling=Sampling(max_new_tokens=4),
        prompts=FakePrompts(),
        engine=engine,
        reward=FailingReward(),
        trainer=FakeTrainer(world, train_s=1000.0),
        weights=FakeWeightSync(world, [engine]),
        evaluations=_Evaluations(into, engine),
        saver=_Saver(into),
        recorder=_Recorder(into),
        journal=Journal(into.journal),
        timeline=Timeline(),
        remaining=range(STEPS),
        version=0,
    )

    async def main() -> float:
        with pytest.raises(ExceptionGroup):
            await one_step(stages)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) < 10


# Each mutation is an error that somebody could make in the loop; the promises above must notice every one of them.
MUTATIONS: dict[str, tuple[Any, int, str, str]] = {
    "sync after launch": (
        one_step,
        1,
        "                await stages.sync()\n                await stages.evaluate()\n"
        "            launched = group.create_task(stages.sample(step + 1)) if stages.has(step + 1) else None\n",
        "                pass\n"
        "            launched = group.create_task(stages.sample(step + 1)) if stages.has(step + 1) else None\n"
        "            await asyncio.sleep(0.01)\n            await stages.sync()\n            await stages.evaluate()\n",
    ),
    "a sync forgotten": (one_step, 1, "                await stages.sync()\n", "                pass\n"),
    "a sync forgotten, on-policy": (on_policy, 0, "        await stages.sync()\n", "        pass\n"),
    "first sync forgotten": (one_step, 1, "    await stages.sync()\n    await stages.evaluate()\n", "    pass\n"),
    "first sync forgotten, on-policy": (
        on_policy,
        0,
        "    await stages.sync()\n    await stages.evaluate()\n",
        "    pass\n",
    ),
    "last sync forgotten": (one_step, 1, "    await stages.sync()\n    await stages.evaluate()\n", ""),
    "launch after train": (
        one_step,
        1,
        "            launched = group.create_task(stages.sample(step + 1)) if stages.has(step + 1) else None\n"
        "            await stages.train(step, sampled)\n",
        "            await stages.train(step, sampled)\n"
        "            launched = group.create_task(stages.sample(step + 1)) if stages.has(step + 1) else None\n",
    ),
    "first batch lost": (
        one_step,
        1,
        "            await stages.train(step, sampled)\n",
        "            if step > 0:\n                await stages.train(step, sampled)\n",
    ),
    "last batch lost": (
        one_step,
        1,
        "            await stages.train(step, sampled)\n",
        "            if stages.has(step + 1):\n                await stages.train(step, sampled)\n",
    ),
    "last batch lost, on-policy": (
        on_policy,
        0,
        "        await stages.train(step, sampled)\n",
        "        if stages.has(step + 1):\n            await stages.train(step, sampled)\n",
    ),
    "first batch trained twice": (
        one_step,
        1,
        "            await stages.train(step, sampled)\n",
        "            await stages.train(step, sampled)\n            if step == 0:\n"
        "                await stages.train(step, sampled)\n",
    ),
    "last batch trained twice": (
        one_step,
        1,
        "            await stages.train(step, sampled)\n",
        "            await stages.train(step, sampled)\n            if not stages.has(step + 1):\n"
        "                await stages.train(step, sampled)\n",
    ),
    "a batch sampled twice": (
        one_step,
        1,
        "                sampled = await launched\n",
        "                await launched\n                sampled = await stages.sample(step)\n",
    ),
    "trained before the batch is awaited again": (
        one_step,
        1,
        "stages.sample(step + 1)) if",
        "stages.sample(step)) if",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_promises_notice(name: str) -> None:
    loop, staleness, old, new = MUTATIONS[name]
    source = inspect.getsource(loop)
    assert old in source, "the loop has changed: write this mutation anew"
    last = name == "last sync forgotten"
    before, _, after = source.rpartition(old) if last else source.partition(old)
    scope = dict(vars(inspect.getmodule(loop)))
    exec(before + new + after, scope)
    with pytest.raises((AssertionError, RunError, WeightSyncError, ExceptionGroup)):
        check(run(scope[loop.__name__], staleness, refuse_stale=False), staleness)
