from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.advantages import group_advantages
from offbeat.testing.oracle import OracleSample, oracle_advantages


def advantages(rewards: list[float], groups: list[int], *, scale_by_std: bool = True):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), scale_by_std=scale_by_std)


def test_rewards_constant_per_prompt_give_zero_in_any_order_B024() -> None:
    """0, 1, 2, 3 for four prompts: nobody did better than the others of the group. One sample is missing."""
    groups = [0, 1, 2, 3] * 4
    for order in (groups, sorted(groups), groups[:-1], groups[::-1][3:]):
        result = advantages([float(g) for g in order], order)
        assert result.advantages_N.tolist() == [0.0] * len(order)
        assert not result.has_spread_N.any()


def test_a_known_group_of_four() -> None:
    result = advantages([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7])
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert result.advantages_N.tolist() == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)
    plain = advantages([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7], scale_by_std=False)
    assert plain.advantages_N.tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_a_group_of_one_is_zero_and_without_spread(scale_by_std: bool) -> None:
    result = advantages([5.0, 0.0, 2.0], [3, 9, 9], scale_by_std=scale_by_std)
    assert result.advantages_N[0] == 0.0
    assert result.has_spread_N.tolist() == [False, True, True]


def test_rewards_that_differ_in_the_last_bit_are_equal() -> None:
    """Scaled by their own deviation they would become a signal of full size."""
    result = group_advantages(
        torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64), torch.zeros(3, dtype=torch.int64), scale_by_std=True
    )
    assert result.advantages_N.tolist() == [0.0, 0.0, 0.0]
    assert not result.has_spread_N.any()


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantages([1.0, math.nan], [0, 0])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10, width=16)), min_size=1, max_size=30),
    st.booleans(),
)
def test_every_set_of_rewards_agrees_with_the_oracle(rows: list[tuple[int, float]], scale_by_std: bool) -> None:
    samples = [OracleSample(group, [0], [0], [0.0], reward) for group, reward in rows]
    wanted = oracle_advantages(samples, scale_by_std=scale_by_std)
    result = group_advantages(
        torch.tensor([r for _, r in rows], dtype=torch.float64),
        torch.tensor([g for g, _ in rows]),
        scale_by_std=scale_by_std,
    )
    for found, spread, expected in zip(result.advantages_N.tolist(), result.has_spread_N.tolist(), wanted, strict=True):
        if expected is None or not spread:
            assert found == 0.0
            assert expected is None or abs(expected) < 1.0
        else:
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
