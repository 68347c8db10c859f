"""The reward pool with real worker processes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_functions import resident_mib

from offbeat.config import RewardsSection
from offbeat.errors import RewardError, WorkerDied
from offbeat.metrics.records import sample_statistics
from offbeat.rewards.pool import RewardPool
from offbeat.rpc.client import Hub
from offbeat.types import Prompt, Rollout, Scored

pytestmark = pytest.mark.integration

FILE = str(Path(__file__).parent / "reward_functions.py")
EMPTY = np.zeros(0, np.int32)


def _prompts(count: int, **columns: Any) -> list[Prompt]:
    return [
        Prompt(
            id=f"d/{index}",
            epoch=0,
            source="d",
            token_ids=EMPTY,
            text=f"prompt {index}",
            columns={"answer": str(index), **columns},
        )
        for index in range(count)
    ]


def _rollouts(prompts: Sequence[Prompt], samples: int = 1) -> list[Rollout]:
    """The completion of prompt k is the one token k: its text is str(k)."""
    return [
        Rollout(
            prompt_id=prompt.id,
            sample_index=sample,
            epoch=0,
            prompt_token_ids=EMPTY,
            token_ids=np.asarray([index], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=((0, 1),),
            finish_reason="stop",
            engine="engine-0",
            started_s=0.0,
            finished_s=0.0,
        )
        for index, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def _with_pool(
    folder: Path,
    functions: Mapping[str, float],
    use: Callable[[RewardPool], Awaitable[Any]],
    *,
    timeout_s: float = 1.0,
    workers: int = 1,
    max_error_fraction: float = 0.5,
) -> Any:
    section = RewardsSection(timeout_s=timeout_s, workers=workers, max_error_fraction=max_error_fraction)
    specs = {name if ":" in name else f"{FILE}:{name}": weight for name, weight in functions.items()}

    async def run() -> Any:
        async with Hub() as hub:
            pool = await RewardPool.start(
                hub, section, {"d": specs}, lambda rows: [str(int(ids[0])) for ids in rows], folder
            )
            try:
                return await use(pool)
            finally:
                await pool.close()

    return asyncio.run(run())


def _score(
    folder: Path, functions: Mapping[str, float], prompts: Sequence[Prompt], samples: int = 1, **pool: Any
) -> list[Scored]:
    rollouts = _rollouts(prompts, samples)
    return _with_pool(folder, functions, lambda pool: pool.score(rollouts, prompts), **pool)


def test_rewards_are_weighted_sums_and_every_part_is_kept(tmp_path: Path):
    scored = _score(tmp_path, {"right": 1.0, "slow": 0.25}, _prompts(6), samples=2, workers=2)
    assert [one.reward for one in scored] == [1.25] * 12
    assert scored[0].parts == {"right": 1.0, "slow": 1.0}
    assert [(one.rollout.prompt_id, one.rollout.sample_index) for one in scored][:3] == [
        ("d/0", 0),
        ("d/0", 1),
        ("d/1", 0),
    ]
    printed = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("reward-*.log"))
    assert printed.count("graded") == 12, "what reward functions print is in their log"


@pytest.mark.parametrize("how", ["loop", "sleep", "regex", "pow"])
def test_a_sample_that_never_ends_is_ended_at_the_limit_and_the_others_are_graded_B027(tmp_path: Path, how: str):
    prompts = _prompts(12, how=how)

    async def use(pool: RewardPool) -> tuple[list[Scored], float]:
        started = time.monotonic()
        return await pool.score(_rollouts(prompts), prompts), time.monotonic() - started

    scored, seconds = _with_pool(tmp_path, {"bad_at_5": 1.0}, use)
    assert [one.reward for one in scored] == [1.0] * 5 + [0.0] + [1.0] * 6
    assert scored[5].errors == ("bad_at_5: took longer than rewards.timeout_s = 1 s; its worker was ended",)
    assert seconds < 10


def test_children_of_a_reward_function_end_with_its_worker(tmp_path: Path):
    scored = _score(tmp_path, {"bad_at_5": 1.0}, _prompts(7, how="child"))
    assert scored[5].errors
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x0061.5\x00" not in lines


@pytest.mark.parametrize(("how", "text"), [("exit", "SystemExit: 3"), ("os_exit", "exit code 3"), ("raise", "no good")])
def test_a_function_that_ends_its_process_or_raises_is_an_error_of_that_sample_only(
    tmp_path: Path, how: str, text: str
):
    scored = _score(tmp_path, {"bad_at_5": 1.0}, _prompts(8, how=how))
    assert [one.reward for one in scored] == [1.0] * 5 + [0.0] + [1.0] * 2
    assert text in scored[5].errors[0]


def test_samples_beside_a_slow_one_are_not_lost_and_not_counted_twice_B139(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    marks = tmp_path / "marks"
    prompts = _prompts(64, marks=str(marks))
    rollouts = _rollouts(prompts)

    async def use(pool: RewardPool) -> tuple[list[Scored], float]:
        started = time.monotonic()
        return await pool.score(rollouts, prompts), time.monotonic() - started

    scored, seconds = _with_pool(tmp_path, {"logged": 1.0}, use, timeout_s=2.0, workers=2)
    assert [one.reward for one in scored] == [0.0 if place == 5 else float(place) for place in range(64)]
    calls = Counter(marks.read_text(encoding="utf-8").split())
    assert calls["5"] == 1, "the sample over the limit is not tried again"
    told = [one.getMessage() for one in caplog.records if one.name == "offbeat.rewards"]
    assert told == ["d/5 sample 0: logged: took longer than rewards.timeout_s = 2 s; its worker was ended"]
    assert set(calls) == {str(place) for place in range(64)}
    assert seconds < 12


@pytest.mark.parametrize(("how", "text"), [("nan", "finite"), ("text", "a number is needed")])
def test_a_value_that_is_no_reward_stops_the_run_and_names_the_sample_B046(tmp_path: Path, how: str, text: str):
    with pytest.raises(RewardError, match=rf"bad_at_5' returned.*{text}.*d/5 sample 0"):
        _score(tmp_path, {"bad_at_5": 1.0}, _prompts(8, how=how))


def test_none_abstains_it_adds_nothing_and_is_left_out_of_the_mean_B046(tmp_path: Path):
    scored = _score(tmp_path, {"right": 1.0, "abstains": 0.5}, _prompts(6))
    assert [one.reward for one in scored] == [1.5, 1.0] * 3
    assert "abstains" not in scored[1].parts
    metrics = sample_statistics(scored)
    assert (metrics["reward/right"], metrics["reward/abstains"], metrics["reward_errors"]) == (1.0, 1.0, 0)


def test_too_many_errors_stop_the_run_with_the_first_of_them_B013(tmp_path: Path):
    with pytest.raises(RewardError, match=r"always_raises' on sample d/\d sample 0: ValueError: cannot grade"):
        _score(tmp_path, {"always_raises": 1.0}, _prompts(8), max_error_fraction=0.2)


def test_errors_within_the_allowed_share_are_counted_apart_from_wrong_B013(tmp_path: Path):
    scored = _score(tmp_path, {"bad_at_5": 1.0}, _prompts(8, how="raise"), max_error_fraction=0.2)
    metrics = sample_statistics(scored)
    assert (metrics["reward/bad_at_5"], metrics["reward_errors"]) == (7 / 8, 1)
    assert [index for index, one in enumerate(scored) if one.errors] == [5]
    assert "bad_at_5: ValueError: no good" in scored[5].errors[0]


def test_a_group_function_gets_aligned_lists_of_one_group_B101(tmp_path: Path):
    scored = _score(tmp_path, {"echo": 1.0}, _prompts(5), samples=3)
    assert [round(one.reward, 6) for one in scored] == [1.3] * 15


def test_a_group_function_with_a_wrong_count_stops_the_run_B140(tmp_path: Path):
    with pytest.raises(RewardError, match=r"one_for_all' returned 1 values for 4 completions.*d/0 sample 0"):
        _score(tmp_path, {"one_for_all": 1.0}, _prompts(2), samples=4)


def test_coroutines_run_side_by_side_and_end_at_the_limit(tmp_path: Path):
    prompts = _prompts(30)

    async def use(pool: RewardPool) -> tuple[list[Scored], float]:
        started = time.monotonic()
        return await pool.score(_rollouts(prompts), prompts), time.monotonic() - started

    scored, seconds = _with_pool(tmp_path, {"waits": 1.0}, use)
    assert [one.reward for one in scored] == [1.0] * 5 + [0.0] + [1.0] * 24
    assert scored[5].errors == ("waits: took longer than rewards.timeout_s = 1 s",)
    assert seconds < 4, "30 × 0.2 s one after the other would be 6 s"


@pytest.mark.parametrize("name", ["blocks", "stubborn"])
def test_a_coroutine_that_cannot_be_cancelled_is_ended_with_its_worker_B138(tmp_path: Path, name: str):
    scored = _score(tmp_path, {name: 1.0}, _prompts(8))
    assert [one.reward for one in scored] == [1.0] * 5 + [0.0] + [1.0] * 2
    assert "took longer" in scored[5].errors[0]


def test_the_event_loop_stays_free_while_grading_B138(tmp_path: Path):
    prompts = _prompts(64, how="loop")

    async def use(pool: RewardPool) -> float:
        worst = 0.0
        grading = asyncio.ensure_future(pool.score(_rollouts(prompts, 8), prompts))
        while not grading.done():
            started = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - started - 0.005)
        await grading
        return worst

    assert _with_pool(tmp_path, {"right": 1.0}, use) < 0.1


def test_a_cancelled_batch_leaves_no_work_behind_and_the_pool_usable(tmp_path: Path):
    prompts = _prompts(8, how="sleep")

    async def use(pool: RewardPool) -> list[Scored]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await pool.score(_rollouts(prompts), prompts)
        started = time.monotonic()
        scored = await pool.score(_rollouts(prompts[:4]), prompts)
        assert time.monotonic() - started < 20, "the old sample would have slept for a minute"
        return scored

    scored = _with_pool(tmp_path, {"bad_at_5": 1.0}, use, timeout_s=60.0)
    assert [one.reward for one in scored] == [1.0] * 4


NAMED = {
    "stops_the_loop": "stops_the_loop' stopped or cancelled what runs beside it",
    "cancels_all": "cancels_all' stopped or cancelled what runs beside it",
    "ends_generators": r"ends_generators'.*StopIteration \(.*reward_functions\.py:\d+\)",
    "untold": r"untold'.*Untold: \(no message: its __str__ raises SystemExit\) \(.*reward_functions\.py:\d+\)",
    "unseen": r"unseen' returned Unseen \(its repr raises SystemExit\)",
}


@pytest.mark.parametrize("name", NAMED)
def test_whatever_a_function_does_to_what_runs_it_it_is_named(tmp_path: Path, name: str):
    with pytest.raises(RewardError, match=NAMED[name]):
        _score(tmp_path, {name: 1.0}, _prompts(40), max_error_fraction=0.0)


def test_a_coroutine_that_cancels_itself_when_it_is_done_ends_no_other(tmp_path: Path):
    scored = _score(tmp_path, {"cancels_itself": 1.0}, _prompts(8))
    assert [one.reward for one in scored] == [1.0] * 8


def test_a_function_after_which_its_process_cannot_go_on_is_named(tmp_path: Path):
    # Where the process aborts, within the next sample or between two, is a matter of time.
    with pytest.raises((RewardError, WorkerDied), match=r"closes_all' on sample|reward function '.*closes_all'"):
        _score(tmp_path, {"closes_all": 1.0}, _prompts(8))


def test_functions_that_cannot_be_loaded_are_reported_at_start(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import no_such_module_here\ndef f(completion): return 1\n", encoding="utf-8")
    with pytest.raises(RewardError, match=r"cannot be loaded: ModuleNotFoundError.*no_such_module_here"):
        _score(tmp_path, {f"{tmp_path / 'broken.py'}:f": 1.0}, _prompts(2))


def test_a_parameter_that_no_column_fills_stops_the_run(tmp_path: Path):
    with pytest.raises(
        RewardError, match=r"parameter 'nowhere', which the row lacks; its columns are answer|'nowhere'"
    ):
        _score(tmp_path, {"needs_missing": 1.0}, _prompts(2))


def test_grading_many_quick_samples_is_quick(tmp_path: Path):
    prompts = _prompts(32)
    rollouts = _rollouts(prompts, 8)

    async def use(pool: RewardPool) -> float:
        best = float("inf")
        for _ in range(8):
            started = time.monotonic()
            await pool.score(rollouts, prompts)
            best = min(best, time.monotonic() - started)
        return best

    # 8 to 16 ms on a quiet core; the limit has room for busy ones.
    assert _with_pool(tmp_path, {"right": 1.0}, use) < 0.1


def test_memory_stays_flat_over_200_batches_of_1_mb(tmp_path: Path):
    """B031: in the worker, which tells its own size as the reward, and in the process that drives the run."""
    prompts = _prompts(4, text="x" * (1 << 18))
    rollouts = _rollouts(prompts)

    async def use(pool: RewardPool) -> list[tuple[float, float]]:
        sizes: list[tuple[float, float]] = []
        for _ in range(230):
            worker = max(one.reward for one in await pool.score(rollouts, prompts))
            sizes.append((worker, resident_mib()))
        return sizes

    sizes = _with_pool(tmp_path, {"resident": 1.0}, use)
    # 200 MB went there; one kept batch in ten would show as 20 MB.
    assert all(late - early < 12 for early, late in zip(sizes[29], sizes[-1], strict=True)), (sizes[29], sizes[-1])


def test_math_verify_grades_in_the_workers_main_thread_B013(tmp_path: Path):
    pytest.importorskip("math_verify")
    prompts = [
        Prompt(id=f"d/{k}", epoch=0, source="d", token_ids=EMPTY, text="", columns={"answer": gold})
        for k, gold in enumerate(["$0$", "2/2", "3"])
    ]
    section = RewardsSection(timeout_s=20.0, max_error_fraction=0.0)

    async def run() -> list[Scored]:
        async with Hub() as hub:
            decode = lambda rows: [["0.0", r"so \boxed{1}", "4"][int(ids[0])] for ids in rows]  # noqa: E731 -- a fake tokenizer
            pool = await RewardPool.start(hub, section, {"d": {"math_verify": 1.0}}, decode, tmp_path)
            scored = await pool.score(_rollouts(prompts), prompts)
            await pool.close()
            return scored

    assert [one.reward for one in asyncio.run(run())] == [1.0, 1.0, 0.0]
