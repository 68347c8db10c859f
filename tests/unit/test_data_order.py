"""Which row comes when."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.order import permutation, shares, slots

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 500), st.integers(1, 60))
def test_any_window_is_the_same_part_of_one_endless_sequence(weights: list[float], first: int, count: int):
    parts = shares(weights)
    assert slots(parts, first, count) == slots(parts, 0, first + count)[first:]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_every_source_gives_its_rows_one_after_the_other_and_its_share_of_them(weights: list[float]):
    parts = shares(weights)
    taken = slots(parts, 0, 400)
    for source, part in enumerate(parts):
        ordinals = [ordinal for index, ordinal in taken if index == source]
        assert ordinals == list(range(len(ordinals)))
        assert abs(len(ordinals) - 400 * part) <= 1 + len(parts) / 2


def test_weights_of_one_to_three_mix_evenly():
    assert Counter(source for source, _ in slots(shares([1, 3]), 1000, 40)) == {0: 10, 1: 30}


def test_seed_and_epoch_both_change_the_order_B171():
    orders = {tuple(permutation(seed, "data", epoch, 50).tolist()) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(permutation(1, "other", 0, 50)) not in orders


def test_the_order_is_what_it_was_in_earlier_releases():
    # A saved run goes on in this order: these values must never change.
    assert permutation(0, "data", 0, 8).tolist() == [0, 1, 5, 7, 6, 4, 3, 2]
    assert not permutation(0, "data", 0, 8).flags.writeable
    assert np.array_equal(permutation(0, "data", 0, 8), permutation(0, "data", 0, 8))
