"""Staleness from the versions that samples carry."""

from __future__ import annotations

import pytest
from sample_values import scored

from offbeat.errors import RunError
from offbeat.staleness import check, staleness, staleness_range, updates_behind_max


def test_staleness_counts_from_the_oldest_token() -> None:
    assert staleness(scored(versions=[3, 3, 5]).rollout, 6) == 3
    assert staleness(scored(versions=[6]).rollout, 6) == 0
    assert staleness(scored(versions=[]).rollout, 6) is None


def test_the_range_is_over_the_batch_and_leaves_out_samples_without_tokens() -> None:
    batch = [scored(versions=[3, 4]), scored(versions=[5]), scored(versions=[])]
    assert staleness_range(batch, 5) == (0, 2)
    assert staleness_range([scored(versions=[])], 5) is None
    assert staleness_range([], 5) is None


@pytest.mark.parametrize(("bound", "version"), [(0, 4), (1, 5), (2, 6)])
def test_a_sample_at_the_bound_may_be_trained_on(bound: int, version: int) -> None:
    check([scored(versions=[4, 4])], version, bound)


@pytest.mark.parametrize(("bound", "version"), [(0, 5), (1, 6), (2, 7)])
def test_a_sample_beyond_the_bound_is_refused_with_its_name_version_and_the_bound(bound: int, version: int) -> None:
    batch = [scored("data/1", versions=[version]), scored("data/7", 3, versions=[4, 5], epoch=2)]
    with pytest.raises(RunError) as caught:
        check(batch, version, bound)
    message = str(caught.value)
    assert "data/7 #3 (epoch 2" in message
    assert f"version 4, {version - 4} behind version {version}" in message
    assert f"max_staleness = {bound}" in message


def test_with_bound_zero_every_sample_must_have_the_trainers_own_version_B146() -> None:
    check([scored(versions=[2, 2]), scored(versions=[2])], 2, 0)
    with pytest.raises(RunError, match="1 behind version 2"):
        check([scored(versions=[2, 2]), scored(versions=[2, 1])], 2, 0)


def test_a_sample_from_the_future_is_refused() -> None:
    with pytest.raises(RunError, match="version 6, which is newer than version 5"):
        check([scored(versions=[5, 6])], 5, 1)


@pytest.mark.parametrize(
    ("sampled_at", "trained_at", "updates_per_step", "behind"),
    [(3, 3, 1, 0), (2, 3, 1, 1), (3, 3, 2, 1), (2, 3, 2, 3), (3, 3, 4, 3), (2, 3, 4, 7)],
)
def test_the_lag_in_updates_is_that_of_the_last_update_of_the_step(
    sampled_at: int, trained_at: int, updates_per_step: int, behind: int
) -> None:
    updates_at = {version: version * updates_per_step for version in range(5)}
    done = updates_at[trained_at] + updates_per_step
    assert updates_behind_max([scored(versions=[sampled_at])], updates_at, done) == behind


def test_updates_that_were_skipped_do_not_count_as_lag() -> None:
    # Version 3 was published after the only update of its step was skipped: its weights are those of version 2.
    assert updates_behind_max([scored(versions=[2])], {2: 2, 3: 2}, 3) == 0
    assert updates_behind_max([scored(versions=[])], {2: 2}, 3) is None
