"""Drawing tokens: the right distribution, numbers that belong to the sample, and truncation against an oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.truncation import sampled_logits, truncate
from offbeat.errors import ConfigError
from offbeat.rollout.sampling import check_sampling, draw, take_most_likely, uniforms
from offbeat.types import Sampling, sample_seed

INF = float("inf")


def sampling(**values: float) -> Sampling:
    return Sampling(max_new_tokens=8, **values)  # type: ignore[arg-type]  # top_k comes as an int


def draw_many(logits: torch.Tensor, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    numbers = uniforms(np.arange(count, dtype=np.uint64) + np.uint64(seed), np.zeros(count))
    tokens, logprobs = draw(logits.expand(count, -1), torch.from_numpy(numbers))
    return tokens.numpy(), logprobs.numpy()


def oracle_nucleus(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Token by token in float64, in the documented order: min-p, top-k, top-p over what is left."""
    kept = set(range(len(logits)))
    weights = [math.exp(value - max(logits)) for value in logits]
    if min_p:
        kept = {i for i in kept if weights[i] >= min_p * (1 - 1e-9)}
    if top_k:
        limit = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        kept = {i for i in kept if logits[i] >= limit}
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, set[int]()
    for i in sorted(kept, key=lambda i: -logits[i]):
        if mass >= top_p:
            break
        nucleus.add(i)
        mass += weights[i] / total
    return nucleus if top_p < 1 else kept


@pytest.mark.parametrize("vocabulary", [5, 256, 700])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(1, vocabulary, generator=generator)
    count = 20_000
    tokens, _ = draw_many(logits, count)
    expected = logits[0].double().softmax(0).numpy() * count
    chi_square = float(((np.bincount(tokens, minlength=vocabulary) - expected) ** 2 / expected).sum())
    degrees = vocabulary - 1
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


def test_reported_logprobs_are_those_of_a_float64_log_softmax() -> None:
    logits = 5 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(logits, torch.linspace(0, 1 - 1e-9, 64, dtype=torch.float64))
    expected = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_of_probability_zero_is_never_drawn_at_the_edges(number: float) -> None:
    logits = torch.full((1, 600), -INF)
    logits[0, [3, 299, 300]] = torch.tensor([0.0, 1.0, 0.0])
    tokens, logprobs = draw(logits, torch.tensor([number], dtype=torch.float64))
    assert tokens.item() == {0.0: 3, 0.5: 299, 1 - 2.0**-53: 300}[number]
    assert math.isfinite(logprobs.item())


def test_a_large_vocabulary_has_its_tail_of_tiny_probabilities() -> None:
    """In float32 a cumulative sum near 1 no longer moves by 2^-26: those tokens would be lost."""
    logits = torch.zeros(1, 1 << 15)
    logits[0, 1:] = -26 * math.log(2)
    share = ((1 << 15) - 1) * 2.0**-26
    at = 1 / (1 + share) + np.array([0.25, 0.5, 0.75]) * share / (1 + share)
    tokens, _ = draw(logits.expand(3, -1), torch.from_numpy(at))
    assert np.allclose(tokens.numpy() / (1 << 15), [0.25, 0.5, 0.75], atol=1e-3)


def test_a_row_of_nans_gives_a_nan_logprob_and_leaves_its_neighbours_alone() -> None:
    logits = torch.zeros(2, 4)
    logits[0] = math.nan
    tokens, logprobs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert math.isnan(logprobs[0].item())
    assert tokens[1].item() == 2
    assert logprobs[1].item() == pytest.approx(math.log(0.25))


def test_numbers_depend_on_seed_and_position_only() -> None:
    seeds = np.array([sample_seed(0, f"data/{i}", 0, 0) for i in range(50)], dtype=np.uint64)
    together = uniforms(seeds, np.full(50, 7))
    alone = [uniforms(seeds[i : i + 1], np.array([7]))[0] for i in reversed(range(50))]
    assert together.tolist() == alone[::-1]


def test_numbers_follow_splitmix64() -> None:
    """Published outputs of SplitMix64 started at 1234567; here the start is the mixed seed, so it is unmixed first."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    start = _unmix(1234567)
    numbers = uniforms(np.full(3, start, dtype=np.uint64), np.arange(3))
    assert numbers.tolist() == [(value >> 11) * 2.0**-53 for value in published]


def _unmix(value: int) -> int:
    """Inverse of SplitMix64's output function."""
    mask = (1 << 64) - 1

    def unshift(x: int, bits: int) -> int:
        result = x
        for _ in range(64 // bits + 1):
            result = x ^ (result >> bits)
        return result

    value = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    value = unshift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    return unshift(value, 30)


def test_numbers_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    grid = np.stack([uniforms(np.full(400, seed, dtype=np.uint64), np.arange(400)) for seed in range(400)])
    flat = grid.ravel()
    assert abs(flat.mean() - 0.5) < 5 / math.sqrt(12 * flat.size)
    limit = 5 / math.sqrt(flat.size)
    assert abs(np.corrcoef(grid[1:].ravel(), grid[:-1].ravel())[0, 1]) < limit
    assert abs(np.corrcoef(grid[:, 1:].ravel(), grid[:, :-1].ravel())[0, 1]) < limit
    # Seed s at position p + 1 is not seed s + 1 at position p.
    assert abs(np.corrcoef(grid[1:, :-1].ravel(), grid[:-1, 1:].ravel())[0, 1]) < limit
    assert len(np.unique(flat)) == flat.size


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    st.floats(0.1, 3),
)
@settings(max_examples=100, deadline=None)
def test_temperature_scales_logits_not_logprobs_B127(values: list[float], temperature: float) -> None:
    logits = sampled_logits(torch.tensor(values), sampling(temperature=temperature))
    scaled = [value / temperature for value in values]
    normaliser = max(scaled) + math.log(math.fsum(math.exp(value - max(scaled)) for value in scaled))
    assert torch.allclose(logits.log_softmax(-1), torch.tensor([value - normaliser for value in scaled]), atol=2e-5)


def test_large_bfloat16_logits_are_normalised_in_float32_B007() -> None:
    logits = (60 * torch.rand(4, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    result = sampled_logits(logits, sampling(temperature=0.7))
    expected = (logits.double() / 0.7).log_softmax(-1)
    assert result.dtype == torch.float32
    assert torch.allclose(result.log_softmax(-1).double(), expected, atol=1e-4)


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    st.integers(0, 13),
    st.sampled_from([1.0, 0.93, 0.51, 0.2, 0.01]),
    st.sampled_from([0.0, 0.013, 0.21, 0.77]),
)
@settings(max_examples=150, deadline=None)
def test_truncation_keeps_what_a_token_by_token_oracle_keeps(
    values: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    logits = [value / 4 for value in values]
    kept = truncate(torch.tensor([logits]), sampling(top_k=top_k, top_p=top_p, min_p=min_p))[0]
    nucleus = oracle_nucleus(logits, top_k, top_p, min_p)
    lowest = min(logits[i] for i in nucleus)
    # Ties with the last token that stays, stay.
    expected = [value if value >= lowest else -INF for value in logits]
    assert kept.tolist() == expected


def test_top_k_of_two_has_the_known_probabilities_B049() -> None:
    logits = torch.tensor([0.0, math.log(3), math.log(6), 0.0, 0.0, 0.0, 0.0, math.log(2)])
    truncated = sampled_logits(logits, sampling(top_k=2)).expand(1, -1)
    tokens, logprobs = draw_many(truncated, 3000)
    assert set(tokens) == {1, 2}
    assert np.allclose(np.exp(logprobs[tokens == 2]), 2 / 3)
    assert np.allclose(np.exp(logprobs[tokens == 1]), 1 / 3)
    assert (tokens == 2).mean() == pytest.approx(2 / 3, abs=0.05)


def test_nothing_is_copied_when_nothing_is_truncated() -> None:
    logits = torch.randn(2, 5)
    assert truncate(logits, sampling()) is logits
    assert sampled_logits(logits, sampling()) is logits


def test_truncation_passes_gradients_of_the_tokens_that_stay() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0], requires_grad=True)
    truncate(logits, sampling(top_k=2)).log_softmax(-1)[0].backward()
    assert logits.grad is not None
    expected = [1 - 1 / (1 + math.exp(-1)), -1 + 1 / (1 + math.exp(-1)), 0.0]
    assert torch.allclose(logits.grad, torch.tensor(expected))


def test_greedy_takes_the_largest_and_reports_its_logprob_at_temperature_one() -> None:
    logits = sampled_logits(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), sampling(temperature=0.0))
    tokens, logprobs = take_most_likely(logits)
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(math.log(math.exp(3) / (math.exp(1) + 2 * math.exp(3) + 1)))


def test_every_value_that_makes_no_distribution_is_named_at_once() -> None:
    wrong = Sampling(max_new_tokens=0, temperature=-1.0, top_p=0.0, top_k=-1, min_p=1.0)
    with pytest.raises(ConfigError) as caught:
        check_sampling(wrong)
    assert [text.split(" =")[0] for text in caught.value.problems] == [
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ]
