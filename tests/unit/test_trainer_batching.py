"""Groups to updates in the controller, sequences to micro-batches in the trainer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.batching import make_batch
from offbeat.config import LossSection
from offbeat.errors import RewardError, RunError
from offbeat.trainer.batching import micro_batches, pack
from offbeat.types import Prompt, Rollout, Sampling, Scored, SupervisedSample

SAMPLING = Sampling(max_new_tokens=16, stop_token_ids=(5, 6))


def scored(
    prompt_id: str, index: int, reward: float, *, epoch: int = 0, tokens: tuple[int, ...] = (7, 8, 6), prompt: int = 9
) -> Scored:
    prompt_ids = np.asarray([prompt], dtype=np.int32)
    rollout = Rollout(
        prompt_id=prompt_id,
        sample_index=index,
        epoch=epoch,
        prompt_token_ids=prompt_ids,
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        versions=((0, len(tokens)),),
        finish_reason="stop",
        engine="engine-0",
        started_s=0.0,
        finished_s=0.0,
    )
    owner = Prompt(id=prompt_id, epoch=epoch, source="t", token_ids=prompt_ids, text="", columns={})
    return Scored(rollout=rollout, prompt=owner, text="", reward=reward, parts={})


def batch(items: list[Scored], *, updates: int = 1, epochs: int = 1, **loss: object):
    return make_batch(
        0,
        items,
        SAMPLING,
        loss=LossSection(scale_by_std=False, **loss),  # pyright: ignore[reportArgumentType] - any field of the section
        updates_per_step=updates,
        epochs_per_batch=epochs,
    )


def advantages(items: list[Scored]) -> list[float]:
    made = batch(items)
    return [float(s.advantages[-1]) for s in made.minibatches[0].samples]


def test_equal_prompts_with_other_ids_are_two_groups_B099() -> None:
    """The same prompt tokens twice, other answers: the baseline of one is not that of the other."""
    items = [scored("a", 0, 1.0), scored("b", 0, 5.0), scored("a", 1, 0.0), scored("b", 1, 4.0)]
    assert advantages(items) == [0.5, -0.5, 0.5, -0.5]


def test_one_prompt_with_unequal_tokens_is_one_group_B099() -> None:
    items = [scored("a", index, float(index), prompt=9 + index) for index in range(3)]
    assert advantages(items) == [-1.0, 0.0, 1.0]


def test_epochs_of_one_prompt_are_two_groups() -> None:
    items = [scored("a", i, float(i + 10 * e), epoch=e) for e in (0, 1) for i in (0, 1)]
    assert advantages(items) == [-0.5, 0.5, -0.5, 0.5]


def test_groups_may_be_incomplete_and_scattered_B024() -> None:
    items = [scored("a", 0, 0.0), scored("b", 2, 3.0), scored("a", 3, 1.0), scored("b", 0, 0.0), scored("b", 1, 0.0)]
    made = batch(items)
    by_group = {s.advantages[0].item() for s in made.minibatches[0].samples}
    assert by_group == {-0.5, 0.5, 2.0, -1.0}


def test_groups_without_spread_leave_numerator_and_denominator_B159() -> None:
    items = [scored("dull", i, 1.0) for i in range(4)] + [scored("a", i, float(i)) for i in range(2)]
    made = batch(items)
    assert len(made.minibatches[0].samples) == 2
    assert made.minibatches[0].denominator == 6.0


def test_no_group_with_spread_leaves_empty_updates_of_denominator_zero_B041() -> None:
    made = batch([scored(p, i, 1.0) for p in "ab" for i in range(2)], updates=2, epochs=2)
    assert [(m.samples, m.denominator) for m in made.minibatches] == [((), 0.0)] * 4


def test_groups_are_dealt_whole_and_evenly_over_updates() -> None:
    items = [scored(p, i, float(i)) for i in range(2) for p in "abcde"]
    made = batch(items, updates=2, epochs=2)
    assert [len(m.samples) for m in made.minibatches] == [4, 6, 4, 6]
    for minibatch in made.minibatches:
        assert sum(float(s.advantages[0]) for s in minibatch.samples) == 0.0  # whole groups
    few = batch([scored("a", i, float(i)) for i in range(2)], updates=3)
    assert sorted(len(m.samples) for m in few.minibatches) == [0, 0, 2]


@pytest.mark.parametrize("length", [1, 2, 16])
def test_the_advantage_stands_at_every_token_the_last_included_B069(length: int) -> None:
    made = batch([scored("a", i, float(i), tokens=(7,) * length) for i in range(2)])
    sample = made.minibatches[0].samples[1]
    assert sample.advantages.tolist() == [0.5] * length
    assert sample.loss_mask.tolist() == [1] * length


def test_a_sample_twice_is_refused() -> None:
    with pytest.raises(RunError, match=r"sample 1 of prompt 'a' twice"):
        batch([scored("a", 1, 0.0), scored("a", 1, 0.0)])


def test_a_reward_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(RewardError, match=r"'a', sample 0, is nan"):
        batch([scored("a", 0, float("nan")), scored("a", 1, 0.0)])


def test_no_samples_are_refused() -> None:
    with pytest.raises(RunError, match="no samples"):
        batch([])


def sequences(lengths: list[int], prompt: int = 3) -> list[SupervisedSample]:
    return [
        SupervisedSample(
            prompt_token_ids=np.arange(100, 100 + prompt, dtype=np.int32),
            token_ids=np.arange(1000 * (row + 1), 1000 * (row + 1) + length, dtype=np.int32),
        )
        for row, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 2000))
def test_packing_holds_every_row_once_within_the_budget_B122(lengths: list[int], budget: int) -> None:
    packs = pack(np.asarray(lengths, dtype=np.int64), budget)
    assert sorted(row for rows in packs for row in rows.tolist()) == list(range(len(lengths)))
    for rows in packs:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


@pytest.mark.parametrize(("budget", "split"), [(1, [1, 1, 1, 1]), (2 * 203, [2, 2]), (4 * 203, [4]), (3 * 203, [3, 1])])
def test_the_splits_of_four_lengths(budget: int, split: list[int]) -> None:
    made = list(micro_batches(sequences([1, 50, 3, 200]), budget))
    assert [len(micro.rows) for micro in made] == split


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 100), st.integers(1, 4))
def test_scored_positions_predict_exactly_the_continuation(lengths: list[int], budget: int, prompt: int) -> None:
    given_sequences = sequences(lengths, prompt)
    seen: list[int] = []
    for micro in micro_batches(given_sequences, budget):
        following = np.roll(micro.ids_BL, -1, axis=1)
        assert np.array_equal(following[micro.scored_BL], micro.targets_N)
        wanted = [given_sequences[row].token_ids for row in micro.rows]
        assert np.array_equal(micro.targets_N, np.concatenate(wanted))
        assert np.array_equal(micro.sample_N, np.repeat(np.arange(len(wanted)), [len(w) for w in wanted]))
        columns = np.flatnonzero(micro.scored_BL.any(0))
        assert columns.min() >= micro.first_column
        assert columns.max() == micro.last_column
        seen.extend(micro.rows)
    assert sorted(seen) == [row for row, length in enumerate(lengths) if length]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        list(micro_batches(sequences([2], prompt=0), 10))
