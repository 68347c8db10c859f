"""Parity and hello: the pure decisions."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import EngineDescription, TrainerDescription
from offbeat.types import Rollout, Sampling
from offbeat.weights.hello import check_collective, check_hello, check_versions
from offbeat.weights.parity import Baseline, Probes, check_gap, gap, tolerance

SAMPLING = Sampling(max_new_tokens=3, temperature=0.7)
NUCLEUS = Sampling(max_new_tokens=3, top_p=0.9)


def rollout(*logprobs: float) -> Rollout:
    values = np.array(logprobs, np.float32)
    return Rollout(
        prompt_id="p/3", sample_index=1, epoch=0, prompt_token_ids=np.array([1], np.int32), finish_reason="length",
        token_ids=np.arange(len(values), dtype=np.int32), logprobs=values, versions=((1, len(values)),),
        engine="engine-0", started_s=0, finished_s=0,
    )  # fmt: skip


def scored(*logprobs: float) -> np.ndarray:
    return np.array(logprobs, np.float32)


def test_the_largest_gap_is_found_with_its_place() -> None:
    found = gap("engine-0", [rollout(-1, -2), rollout(-3)], [scored(-1, -2.5), scored(-3.25)], SAMPLING)
    assert found.max == pytest.approx(0.5)
    assert found.mean == pytest.approx(0.25)
    assert "prompt p/3, sample 1, token 1: engine -2.00000, trainer -2.50000" in found.where


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_fails_the_probe(bad: float) -> None:
    with pytest.raises(WeightSyncError, match="not finite"):
        gap("engine-0", [rollout(bad)], [scored(-1)], NUCLEUS)
    with pytest.raises(WeightSyncError, match="not finite"):
        gap("engine-0", [rollout(-1)], [scored(bad)], SAMPLING)


def test_a_probe_of_nothing_is_no_probe() -> None:
    with pytest.raises(WeightSyncError, match="0 samples"):
        gap("engine-0", [], [], SAMPLING)
    with pytest.raises(WeightSyncError, match="2 logprobs, the trainer gave 1"):
        gap("engine-0", [rollout(-1, -1)], [scored(-1)], SAMPLING)


def test_one_token_outside_the_trainers_nucleus_is_let_pass_and_many_are_not() -> None:
    values = [-1.0] * 40
    one = gap("engine-0", [rollout(*values)], [scored(*values[1:], -np.inf)], NUCLEUS)
    assert one.max == 0
    with pytest.raises(WeightSyncError, match="20 of 40 sampled tokens"):
        gap("engine-0", [rollout(*values)], [scored(*values[:20], *[-np.inf] * 20)], NUCLEUS)


def test_tolerances_follow_the_rule() -> None:
    assert tolerance("float32", None, None) == tolerance("float32", 9.0, None) == 1e-3
    assert tolerance("bfloat16", None, None) == 0.5
    assert tolerance("bfloat16", 0.1, None) == pytest.approx(0.3)
    assert tolerance("bfloat16", 0.4, None) == 0.5
    assert tolerance("bfloat16", 0.0, None) == 0.05
    assert tolerance("bfloat16", 0.1, 2.0) == tolerance("float32", None, 2.0) == 2.0


def test_a_mismatch_is_told_in_words() -> None:
    found = gap("engine-7", [rollout(-1)], [scored(-2)], SAMPLING)
    check_gap("engine-7", found, 1.0, version=3, sampling=SAMPLING)
    with pytest.raises(WeightSyncError) as caught:
        check_gap("engine-7", found, 0.999, version=3, sampling=SAMPLING)
    for words in ("engine-7", "version 3", "up to 1 ", "allowed is 0.999", "Likely causes", "Nothing was committed"):
        assert words in str(caught.value)


def trainer(vocab: int = 64) -> TrainerDescription:
    return TrainerDescription(
        torch_version="2", parameters=1, vocab_size=vocab, dtype="float32", device="cpu", max_length=128,
        weights_version=4, optimizer_updates=4,
    )  # fmt: skip


def engine(vocab: int = 64, version: int = 4, dtype: str = "float32", state: str = "serving") -> EngineDescription:
    return EngineDescription(
        engine="hf", engine_version="1", torch_version="2", weights_version=version, state=state, vocab_size=vocab,
        dtype=dtype, device="cpu", capabilities=(), max_length=128,
    )  # fmt: skip


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    check_hello(trainer(), [engine(), engine(version=-1)], dtype="float32")
    with pytest.raises(WeightSyncError) as caught:
        check_hello(trainer(), [engine(), engine(vocab=63, version=9, dtype="bfloat16")], dtype="float32")
    for words in ("engine 1", "vocabulary of 63", "trainer's is 64", "bfloat16, asked was float32", "version 9"):
        assert words in str(caught.value)


def test_unequal_nccl_is_refused_with_both_versions_and_the_remedy() -> None:
    check_collective("gloo", {"a": "torch 2.11 gloo", "b": "torch 2.13 gloo"})
    check_collective("nccl", {"a": "nccl 2.27.3", "b": "nccl 2.27.3"})
    with pytest.raises(WeightSyncError, match=r"nccl 2\.27\.3.*nccl 2\.26\.1.*Install the same torch.*gloo"):
        check_collective("nccl", {"trainer-0": "nccl 2.27.3", "engine-0": "nccl 2.26.1"})


def test_an_engine_whose_version_does_not_move_is_an_error_B168() -> None:
    check_versions(4, {"engine-0": engine()})
    for wrong in (engine(version=3), engine(state="probing")):
        with pytest.raises(WeightSyncError, match="do not follow the trainer"):
            check_versions(4, {"engine-0": engine(), "engine-1": wrong})


def probed(probes: Probes, versions: range, gap: float = 0.01) -> list[int]:
    """The versions at which a run of these syncs probes."""
    found: list[int] = []
    for version in versions:
        if probes.due(version, "bfloat16"):
            found.append(version)
            probes.passed(version, "bfloat16", gap)
    return found


@pytest.mark.parametrize(("every", "wanted"), [(1, [*range(13)]), (4, [0, 4, 8, 12]), (0, [0])])
def test_probes_come_at_the_first_sync_and_every_nth(every: int, wanted: list[int]) -> None:
    assert probed(Probes(every), range(13)) == wanted


@pytest.mark.parametrize("every", [0, 1, 4, 5])
def test_a_resume_probes_its_first_sync_and_then_where_the_run_would_have(every: int) -> None:
    unbroken = probed(Probes(every), range(30))
    for saved_at in range(1, 29):
        first = Probes(every)
        probed(first, range(saved_at), gap=0.01)
        # The version at hand may have been synced before the save or not: it is synced again in any case.
        for extra in (0, 1):
            probed(first, range(saved_at, saved_at + extra), gap=0.01)
            resumed = Probes(every, first.baseline)
            assert probed(resumed, range(saved_at, 30), gap=0.4) == sorted(
                {saved_at, *(version for version in unbroken if version >= saved_at)}
            )
            assert resumed.baseline is not None
            assert resumed.baseline.gap == 0.01, "the limit stays that of the first sync of the run"


def test_a_baseline_of_another_dtype_is_not_gone_on_with() -> None:
    probes = Probes(4, Baseline("float32", 1e-6, 8))
    assert probes.due(9, "bfloat16")
    assert probes.baseline is None
    probes.passed(9, "bfloat16", 0.02)
    assert probes.baseline == Baseline("bfloat16", 0.02, 9)


def test_a_probe_whose_commit_failed_runs_again() -> None:
    probes = Probes(4)
    assert probed(probes, range(5)) == [0, 4]
    assert probes.due(4, "bfloat16")


@pytest.mark.parametrize("every", [0, 20])
def test_the_sync_after_one_that_failed_is_probed(every: int) -> None:
    probes = Probes(every)
    assert probed(probes, range(5)) == [0]
    probes.failed()
    assert probed(probes, range(5, 9)) == [5]
    assert probes.baseline is not None
    assert probes.baseline.gap == 0.01
