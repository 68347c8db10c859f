"""Evaluation: the statistics against oracles, and the round trip through engines that tell their version."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_values import scored

from offbeat.errors import RunError
from offbeat.evaluate import EvalSet, evaluate
from offbeat.metrics.evaluation import mean_with_error, pass_at_k, summarize
from offbeat.rpc.messages import EngineDescription, PauseCall
from offbeat.types import GenerateRequest, Prompt, Rollout, Sampling, Scored, pass_at, run_length, sample_seed


@settings(deadline=None)
@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_pass(numbers: tuple[int, int, int]) -> None:
    n, c, k = numbers
    choices = list(itertools.combinations(range(n), k))
    with_pass = sum(any(sample < c for sample in choice) for choice in choices)
    assert pass_at_k(n, c, k) == pytest.approx(with_pass / len(choices))


def test_pass_at_k_equals_the_formula_of_the_paper_for_its_200_samples() -> None:
    # Chen et al. 2021, equation 1, with exact binomials.
    for c, k in [(0, 1), (1, 1), (1, 100), (13, 10), (199, 2), (200, 100)]:
        assert pass_at_k(200, c, k) == pytest.approx(1 - math.comb(200 - c, k) / math.comb(200, k), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_numbers_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= n"):
        pass_at_k(n, c, k)


def test_the_error_is_clustered_by_prompt() -> None:
    # Two prompts, one always right and one always wrong: eight samples, yet only two independent numbers.
    samples = [scored(p, i, reward=r) for p, r in (("a", 1.0), ("b", 0.0)) for i in range(4)]
    result = summarize("test", samples, step=3, version=0)
    assert result.avg == 0.5
    assert result.avg_error == pytest.approx(math.sqrt(0.5) / math.sqrt(2))  # std(ddof=1) of (1, 0) over sqrt(2)
    naive = float(np.std([1.0] * 4 + [0.0] * 4, ddof=1) / math.sqrt(8))
    assert result.avg_error is not None
    assert result.avg_error > 2 * naive


def test_the_numbers_of_a_result_are_those_worked_out_by_hand() -> None:
    samples = [
        scored("a", 0, reward=1.0, tokens=1, parts={"right": 1.0}),
        scored("a", 1, reward=0.4, tokens=2, parts={"right": 0.4}, finish_reason="length"),
        scored("b", 0, reward=0.0, tokens=3, parts={"right": 0.0}, errors=("x",)),
        scored("b", 1, reward=0.2, tokens=6, parts={"right": 0.2}),
    ]
    result = summarize("test", samples, step=7, version=0)
    assert (result.prompts, result.samples_per_prompt, result.step, result.version) == (2, 2, 7, 0)
    assert result.avg == pytest.approx(0.4)  # (.7 + .1) / 2
    assert result.avg_error == pytest.approx(0.3)  # std(.7, .1) = .4243, over sqrt(2)
    assert result.pass_at[1] == (pytest.approx(0.25), pytest.approx(0.25))
    assert result.pass_at[2] == (pytest.approx(0.5), pytest.approx(0.5))
    assert result.to_metrics() == {
        "eval/test/avg@2": result.avg,
        "eval/test/avg@2_error": result.avg_error,
        "eval/test/pass@1": 0.25,
        "eval/test/pass@1_error": pytest.approx(0.25),
        "eval/test/pass@2": 0.5,
        "eval/test/pass@2_error": pytest.approx(0.5),
        "eval/test/weights_version": 0,
        "eval/test/prompts": 2,
        "eval/test/truncated_fraction": 0.25,
        "eval/test/response_length_mean": 3.0,
        "eval/test/reward_errors": 1,
        "eval/test/reward/right": pytest.approx(0.4),
    }


def test_the_threshold_decides_what_passes() -> None:
    samples = [scored("a", 0, reward=0.4), scored("a", 1, reward=0.6)]
    assert summarize("t", samples, step=0, version=0, pass_threshold=0.6).pass_at[1][0] == 0.5
    assert summarize("t", samples, step=0, version=0, pass_threshold=0.1).pass_at[1][0] == 1.0


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_mean_and_error_equal_numpys(values: list[float]) -> None:
    mean, error = mean_with_error(values)
    assert mean == pytest.approx(float(np.mean(values)), abs=1e-9)
    assert error == pytest.approx(float(np.std(values, ddof=1) / math.sqrt(len(values))), abs=1e-9)


def test_one_prompt_has_no_error() -> None:
    assert mean_with_error([0.5]) == (0.5, None)


def test_the_reported_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [pass_at(n) for n in (1, 2, 4, 6, 8)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_a_missing_sample_is_an_error_not_another_average() -> None:
    with pytest.raises(RunError, match=r"prompts have \[1, 2\] samples"):
        summarize("t", [scored("a", 0), scored("a", 1), scored("b", 0)], step=0, version=0)
    with pytest.raises(RunError, match="at least one"):
        summarize("t", [], step=0, version=0)


@dataclass
class VersionEngine:
    """Serves a version; a token a step of the clock. `lie` is stamped on the last token of the last sample."""

    version: int
    lie: int | None = None
    lose: int = 0
    calls: list[tuple[tuple[GenerateRequest, ...], Sampling]] = field(default_factory=list)

    async def describe(self) -> EngineDescription:
        raise NotImplementedError

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Rollout]:
        self.calls.append((tuple(requests), sampling))
        await asyncio.sleep(0)
        asked = [(request, i) for request in requests for i in range(len(request.seeds))]
        found = [self._rollout(request, i, [self.version] * 3) for request, i in asked]
        if self.lie is not None:
            found[-1] = self._rollout(*asked[-1], [self.version, self.version, self.lie])
        return found[: len(found) - self.lose]

    def _rollout(self, request: GenerateRequest, index: int, versions: list[int]) -> Rollout:
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=index,
            epoch=request.epoch,
            prompt_token_ids=request.token_ids,
            token_ids=np.zeros(3, np.int32),
            logprobs=np.zeros(3, np.float32),
            versions=run_length(versions),
            finish_reason="stop",
            engine="engine-0",
            started_s=0.0,
            finished_s=1.0,
        )

    async def pause(self, mode: PauseCall) -> None: ...

    async def resume(self) -> None: ...


class VersionReward:
    """The reward of a sample is the version of the weights that made it."""

    async def score(self, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Scored]:
        await asyncio.sleep(0)
        pairs = zip(rollouts, prompts, strict=True)
        assert all(rollout.prompt_id == prompt.id for rollout, prompt in zip(rollouts, prompts, strict=True))
        return [Scored(rollout=r, prompt=p, text="", reward=float(r.version_min), parts={}) for r, p in pairs]


def prompts(count: int, epoch: int = 0) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(id=f"test/{i}", epoch=epoch, source="test", token_ids=np.array([i], np.int32), text=str(i), columns={})
        for i in range(count)
    )


def eval_set(name: str = "test", *, count: int = 3, samples: int = 2, epoch: int = 0, length: int = 8) -> EvalSet:
    return EvalSet(name, prompts(count, epoch), Sampling(max_new_tokens=length, temperature=0.7), samples)


@pytest.mark.parametrize("step", [0, 1, 25, 80], ids=["start", "first", "resumed", "last"])
def test_the_point_at_a_step_was_answered_by_the_version_of_that_step_B068(step: int) -> None:
    engine = VersionEngine(version=step)
    (result,) = asyncio.run(evaluate([eval_set()], engine, VersionReward(), step=step, version=step, run_seed=1))
    assert (result.avg, result.version, result.step) == (step, step, step)
    assert result.to_metrics()["eval/test/weights_version"] == step


@pytest.mark.parametrize(("served", "lie"), [(24, None), (25, 24), (26, None)])
def test_an_answer_of_another_version_is_never_labelled_with_this_one_B068(served: int, lie: int | None) -> None:
    engine = VersionEngine(version=served, lie=lie)
    seen: list[EvalSet] = []
    with pytest.raises(RunError, match=r"labelled 25"):
        asyncio.run(
            evaluate(
                [eval_set()],
                engine,
                VersionReward(),
                step=25,
                version=25,
                run_seed=1,
                seen=lambda asked, _: seen.append(asked),
            )
        )
    assert seen == []  # nothing was written down under the wrong label


def test_each_set_has_its_own_sampling_and_every_evaluation_the_same_seeds() -> None:
    engine = VersionEngine(version=3)
    sets = [eval_set("a", length=8), eval_set("b", count=1, samples=4, length=99, epoch=5)]
    seen: list[tuple[str, int]] = []
    for step in (3, 4):
        engine.version = step
        asyncio.run(
            evaluate(
                sets,
                engine,
                VersionReward(),
                step=step,
                version=step,
                run_seed=11,
                seen=lambda asked, found: seen.append((asked.name, len(found))),
            )
        )
    assert [sampling.max_new_tokens for _, sampling in engine.calls] == [8, 99, 8, 99]
    assert [[r.seeds for r in requests] for requests, _ in engine.calls[:2]] == [
        [r.seeds for r in requests] for requests, _ in engine.calls[2:]
    ]
    request = engine.calls[1][0][0]
    assert request.epoch == 0  # whatever the epoch of the prompt
    assert request.seeds == tuple(sample_seed(11, "test/0", i, 0) for i in range(4))
    assert seen == [("a", 6), ("b", 4), ("a", 6), ("b", 4)]


def test_lost_samples_are_an_error() -> None:
    with pytest.raises(RunError, match=r"asked for 6 samples .* gave 5"):
        asyncio.run(evaluate([eval_set()], VersionEngine(0, lose=1), VersionReward(), step=0, version=0, run_seed=1))
