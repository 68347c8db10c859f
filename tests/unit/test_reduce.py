from __future__ import annotations

import pytest
import torch

from offbeat.algorithms.reduce import aggregation_denominator, reduce_loss, token_weights

LENGTHS = [1, 50, 3, 200]


def test_denominators_of_each_aggregation() -> None:
    assert aggregation_denominator(LENGTHS, "token_mean", max_new_tokens=256) == 254
    assert aggregation_denominator(LENGTHS, "sequence_mean", max_new_tokens=256) == 4
    assert aggregation_denominator(LENGTHS, "constant", max_new_tokens=256) == 4 * 256


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_nothing_to_train_is_denominator_zero_B041(aggregation: str) -> None:
    assert aggregation_denominator([], aggregation, max_new_tokens=8) == 0.0  # pyright: ignore[reportArgumentType] - parametrised text
    assert aggregation_denominator([0, 0], aggregation, max_new_tokens=8) == 0.0  # pyright: ignore[reportArgumentType] - parametrised text


def test_a_sample_without_trained_tokens_is_in_no_denominator() -> None:
    assert aggregation_denominator([0, 4], "sequence_mean", max_new_tokens=8) == 1.0
    assert aggregation_denominator([0, 4], "constant", max_new_tokens=8) == 8.0


def test_sequence_mean_weighs_each_sample_alike() -> None:
    mask = torch.tensor([True, True, False, True, False])
    weights = token_weights(mask, torch.tensor([0, 0, 0, 1, 1]), "sequence_mean")
    assert weights.tolist() == [0.5, 0.5, 0.0, 1.0, 0.0]
    assert token_weights(mask, torch.tensor([0, 0, 0, 1, 1]), "token_mean").tolist() == [1, 1, 0, 1, 0]


def test_a_masked_token_that_is_not_finite_does_not_reach_the_loss() -> None:
    loss = reduce_loss(torch.tensor([1.0, float("nan"), float("inf")]), torch.tensor([1.0, 0.0, 0.0]), 2.0)
    assert float(loss) == 0.5
