"""Killed, stopped, resumed: every sample is trained exactly once, and what is saved is of one moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_run import PROMPTS, SAMPLES, FakeRun, UnevenEngine

from offbeat.aftermath import saved
from offbeat.checkpoint import CheckpointStore, State
from offbeat.commands.train import resume
from offbeat.errors import ConfigError
from offbeat.metrics.display import SilentDisplay
from offbeat.metrics.evaluation import evaluated_at
from offbeat.recording import RunSaver
from offbeat.testing.virtual_time import run_in_virtual_time
from offbeat.types import GenerateRequest, Rollout, Sampling

pytestmark = pytest.mark.slow


def live(run: FakeRun, *, kill_after_s: float | None = None, stop_after_s: float | None = None) -> bool:
    """One life. Returns whether it came to its own end."""

    async def main() -> bool:
        life = asyncio.create_task(run.live())
        if stop_after_s is not None:
            await asyncio.wait([life], timeout=stop_after_s)
            if run.lives and (stages := run.lives[-1].stages) is not None:
                stages.stop()
        await asyncio.wait([life], timeout=kill_after_s)
        ended = life.done()
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        return ended

    return run_in_virtual_time(main())


def in_order(steps: int, rows: int) -> list[list[int]]:
    """The rows of each step, every sample of them."""
    return [
        [position % rows for position in range(step * PROMPTS, (step + 1) * PROMPTS) for _ in range(SAMPLES)]
        for step in range(steps)
    ]


def identities(samples: list[dict[str, Any]]) -> list[tuple[int, str, int, int]]:
    return [(one["step"], one["prompt_id"], one["epoch"], one["sample_index"]) for one in samples]


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_at_any_moment_every_row_is_still_trained_exactly_once_an_epoch(
    memory_path: Path, staleness: int
) -> None:
    """B051: two epochs of 100 rows, killed again and again in the middle of anything."""
    whole = FakeRun(memory_path / "whole", steps=50, max_staleness=staleness)
    assert live(whole)
    kills, number = 0, 0
    moments = random.Random(staleness)
    while kills < 40:
        run = FakeRun(memory_path / str(number), steps=50, max_staleness=staleness, seed=number)
        number += 1
        while not live(run, kill_after_s=moments.uniform(0.0, 16.0)):
            kills += 1
        assert run.learned() == in_order(50, rows=100)
        assert identities(run.samples()) == identities(whole.samples())
        assert [record["step"] for record in run.metrics()] == list(range(50))
    found = Counter((name, epoch) for _, name, epoch, _ in identities(whole.samples()))
    assert found == {(f"rows/{row}", epoch): SAMPLES for row in range(100) for epoch in (0, 1)}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_was_in_flight_at_a_stop_is_the_first_to_be_trained_after_it(
    memory_path: Path, staleness: int
) -> None:
    """B174, B051: what was sampled and not trained comes again, with the same seeds, and through the loop itself."""
    in_flight = 0
    for quarter in range(3, 60, 6):
        run = FakeRun(memory_path / str(quarter), steps=8, max_staleness=staleness, save_every=0, seed=quarter)
        live(run, stop_after_s=quarter / 4)
        done = len(run.learned())
        before = run.lives[-1]
        assert before.trainer.learned == run.learned()
        lost = [rows for rows in before.engine.asked if rows[0] >= done * PROMPTS]
        assert live(run)
        if done < 8:
            assert run.lives[-1].engine.asked[0] == in_order(8, 100)[done][::SAMPLES]
            assert not lost or lost[0] == run.lives[-1].engine.asked[0]
            in_flight += bool(lost)
        assert run.learned() == in_order(8, rows=100)
        assert [one["step"] for one in run.samples()] == [step for step in range(8) for _ in range(PROMPTS * SAMPLES)]
    assert in_flight >= 2 * staleness, "or no batch was ever lost"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resume_at_step_1000_asks_for_nothing_of_the_steps_before(memory_path: Path, staleness: int) -> None:
    """B148: the position is a number, not a replay."""
    run = FakeRun(memory_path, steps=1004, max_staleness=staleness, rows=700)
    store = CheckpointStore(run.folder.checkpoints)
    writing = store.begin(1000)
    (writing / "trainer-0").mkdir()
    (writing / "trainer-0" / "weights.json").write_text("[]")
    (writing / "trainer-0" / "version.json").write_text("1000")
    store.commit(writing, State(next_step=1000, weights_version=1000, seed=0, data="rows", elapsed_s=0.0))
    assert live(run)
    (life,) = run.lives
    assert life.prompts.read == [1000, 1001, 1002, 1003]
    assert life.engine.asked == [sorted(set(rows)) for rows in in_order(1004, 700)[1000:]]
    sync, first = life.world.named("sync")[0], life.world.named("generate")[0]
    assert (sync.version, sync.ended_s <= first.started_s) == (1000, True)
    assert life.trainer.learned == in_order(1004, 700)[1000:]


def test_the_next_batch_is_under_way_whenever_the_trainer_works(memory_path: Path) -> None:
    """B123: whatever takes how long, the engines never wait for a batch that nobody counted as finished."""
    run = FakeRun(memory_path, steps=200, max_staleness=1, save_every=0)
    assert live(run)
    (life,) = run.lives
    generated, trained = life.world.named("generate"), life.world.named("train")
    assert len(generated) == len(trained) == 200
    assert [next_one.started_s for next_one in generated[1:]] == [event.started_s for event in trained[:-1]]
    assert max(len(at) for at in _at_once(life.world.named("generate"))) == 1, "and never more than the one batch"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_of_200_steps_holds_the_samples_of_three_steps_at_most(memory_path: Path, staleness: int) -> None:
    """B031: what was trained on and written down is let go of."""
    living: list[int] = []

    class Counting(UnevenEngine):
        alive = 0

        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
            rollouts = await super().generate(requests, sampling)
            for rollout in rollouts:
                Counting.alive += 1
                weakref.finalize(rollout.token_ids, Counting.gone)
            living.append(Counting.alive)
            return rollouts

        @classmethod
        def gone(cls) -> None:
            cls.alive -= 1

    run = FakeRun(memory_path, steps=200, max_staleness=staleness, save_every=50, engine=Counting)
    assert live(run)
    assert len(living) == 200
    assert max(living) <= 3 * PROMPTS * SAMPLES


def _at_once(events: list[Any]) -> list[list[Any]]:
    return [[other for other in events if other.started_s <= one.started_s < other.ended_s] for one in events]


def test_trainer_and_controller_appear_and_go_as_one_checkpoint(memory_path: Path) -> None:
    """B142: while the trainer still writes, the one before is whole and the new one is not there."""
    seen: list[tuple[str, int]] = []

    class Watched(RunSaver):
        async def save(self, next_step: int, version: int) -> None:
            watching = asyncio.create_task(self.watch())
            await super().save(next_step, version)
            watching.cancel()
            self.look("after")

        async def watch(self) -> None:
            while True:
                self.look("meanwhile")
                await asyncio.sleep(0.05)

        def look(self, moment: str) -> None:
            checkpoint, skipped = self.store.latest()
            assert skipped == []
            seen.append((moment, checkpoint.step if checkpoint else 0))
            if checkpoint is not None:
                inside = {str(path.relative_to(checkpoint.folder)) for path in checkpoint.folder.rglob("*.json")}
                assert inside == {"complete.json", "state.json", "trainer-0/version.json", "trainer-0/weights.json"}

    run = FakeRun(memory_path, steps=5, max_staleness=1, save_every=1, saver=Watched)
    assert live(run)
    newest = 0
    for moment, step in seen:
        assert step == newest + (moment == "after")
        newest = step
    assert newest == 5
    assert len(seen) > 20
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == ["step-4", "step-5"]


def test_a_checkpoint_is_of_one_moment_also_while_the_next_batch_is_sampled(memory_path: Path) -> None:
    """B145: fifty saves under load; position, version and weights belong together in each of them."""
    found: list[tuple[int, int, int, int]] = []
    busy: list[bool] = []
    run = FakeRun(memory_path, steps=50, max_staleness=1, save_every=1)

    class Reading(RunSaver):
        async def save(self, next_step: int, version: int) -> None:
            busy.append(run.lives[-1].engine.busy > 0)
            await super().save(next_step, version)
            checkpoint, _ = self.store.latest()
            assert checkpoint is not None
            learned, state = run.learned(), checkpoint.state
            own_version = int((checkpoint.folder / "trainer-0" / "version.json").read_text())
            found.append((state.next_step, state.weights_version, own_version, len(learned)))
            assert learned == in_order(state.next_step, rows=100)

    run.saver = Reading
    assert live(run)
    assert found == [(step, step, step, step) for step in range(1, 51)]
    assert busy.count(True) > 10, "or nothing was under way while it saved"


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_evaluation_shows_the_version_of_its_step_at_the_start_the_end_and_after_a_resume(
    memory_path: Path, staleness: int
) -> None:
    """B068: the reward of a held-out sample is the version that answered."""
    run = FakeRun(memory_path, steps=9, max_staleness=staleness, eval_every=2)
    live(run, kill_after_s=10.0)
    assert live(run)
    assert len(run.lives) == 2
    assert run.lives[1].first > 0
    points = {r["eval/held/weights_version"]: r["eval/held/avg@1"] for r in run.metrics() if "eval/held/avg@1" in r}
    assert points == {version: float(version) for version in (0, 2, 4, 6, 8, 9)}
    assert {one["step"] for one in run.samples() if one["eval"]} == {0, 2, 4, 6, 8, 9}
    shown = [result for life in run.lives for result in life.evaluations]
    assert all(result.step == result.version == result.avg for result in shown)


def test_on_policy_samples_carry_the_trainers_own_version_and_no_other(memory_path: Path) -> None:
    """B146: read off every line of samples.jsonl."""
    for staleness in (0, 1):
        run = FakeRun(memory_path / str(staleness), steps=12, max_staleness=staleness)
        assert live(run)
        lags = [one["step"] - version for one in run.samples() for version, _ in one["versions"]]
        assert lags[: PROMPTS * SAMPLES] == [0] * PROMPTS * SAMPLES
        assert set(lags[PROMPTS * SAMPLES :]) == {staleness}
        assert all(a.ended_s <= b.started_s for a, b in pairwise(run.lives[0].world.named("sync")))


def test_an_evaluation_after_the_last_step_that_was_lost_is_made_by_the_resume(memory_path: Path) -> None:
    """Killed between the last checkpoint and the last line: all steps are saved, the number is not."""
    run = FakeRun(memory_path, steps=4, max_staleness=1, eval_every=3, save_every=0)
    run.folder.write_config(run.config.model_dump(mode="json"))
    assert live(run)
    whole = run.metrics()
    assert evaluated_at(4, whole) == {"held"}
    assert saved(run.folder, 4).startswith("all 4 steps")
    with pytest.raises(ConfigError, match="has done all its 4 steps"):
        resume(run.path, (), display=SilentDisplay())
    run.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in whole[:-1]))
    assert "the last evaluation is missing" in saved(run.folder, 4)
    with pytest.raises(ConfigError) as refused:  # for want of a model; it would have gone on
        resume(run.path, (), display=SilentDisplay())
    assert "has done all" not in str(refused.value)
    assert live(run)
    assert [untimed(record) for record in run.metrics()] == [untimed(record) for record in whole]
    (life, result) = (run.lives[-1], run.lives[-1].evaluations)
    assert ([one.version for one in result], life.trainer.learned) == ([4], run.learned())
    assert life.prompts.read == []


def untimed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith("time_")}


def test_only_the_sets_whose_points_are_cut_are_measured_again(memory_path: Path) -> None:
    records = [{"step": 3, "eval/a/avg@1": 0.5}, {"step": 4, "eval/b/avg@1": 0.5, "eval/b/pass@1": 0.1}, {"step": 4}]
    assert evaluated_at(4, records) == {"b"}
    run = FakeRun(memory_path, steps=4, max_staleness=1, eval_every=0, save_every=0, also={1: {"held"}, 2: {"other"}})
    assert live(run)
    assert [one.version for one in run.lives[0].evaluations] == [0, 1, 4]
