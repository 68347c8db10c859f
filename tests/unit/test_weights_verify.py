"""The digest: equal for equal bytes however they are sliced, and different after every fault that we could think of."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.weights.verify import Digest, K, all_finite, block_factor, digest, splitmix

SIZES = [0, 1, 2, 3, 4, 5, 4 * K - 1, 4 * K, 4 * K + 1, 9 * K * 4 + 7]


def by_hand(data: bytes) -> str:
    """The formula of the module's docstring, in Python integers."""
    total = len(data) * 0x9E3779B97F4A7C15
    padded = data + bytes(-len(data) % 4)
    for index in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * index : 4 * index + 4], "little", signed=True)
        total += word * (splitmix(index % K) | 1) * block_factor(index // K)
    return f"{total & (1 << 64) - 1:016x}"


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_stated_formula(size: int) -> None:
    data = random_bytes(size)
    assert digest(data) == by_hand(bytes(data.tolist()))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4 * K * 3), st.lists(st.integers(0, 4 * K * 3 // 64), max_size=5), st.randoms())
def test_slices_in_any_order_add_up_to_the_whole(size: int, cuts: list[int], order: object) -> None:
    data = random_bytes(size)
    edges = sorted({0, size, *(64 * cut for cut in cuts if 64 * cut < size)})
    slices = list(itertools.pairwise(edges))
    order.shuffle(slices)  # pyright: ignore[reportAttributeAccessIssue]  # hypothesis gives a random.Random
    result = Digest(size)
    for start, end in slices:
        result.add(data[start:end], start)
    assert result.text() == digest(data)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64]
)
def test_every_dtype_and_memory_layout_gives_the_digest_of_its_row_major_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randn(37, 53).mul(10).to(dtype)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor) == digest(torch.cat([tensor[:1], tensor])[1:])  # another storage offset
    assert digest(torch.zeros(0, dtype=dtype)) == digest(torch.zeros(0, 3, dtype=dtype))


@pytest.mark.parametrize("at", [0, 1, 31, 4 * K * 8 - 1, 4 * K * 8, 100_000, 300_007])
def test_any_flipped_bit_changes_it(at: int) -> None:
    data = random_bytes(40_000)
    before = digest(data)
    data[at // 8] ^= 1 << at % 8
    assert digest(data) != before


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 49_999), st.integers(0, 49_999))
def test_exchanged_elements_change_it(one: int, two: int) -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    other = values.clone()
    other[one], other[two] = values[two], values[one]
    assert (digest(other) != digest(values)) == (not torch.equal(other, values))


def test_faults_of_real_loaders_change_it() -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    faults = {
        "a block of zeros": torch.cat([values[:8], torch.zeros(8, 512), values[16:]]),
        "shifted by one": values.roll(1),
        "rows exchanged": values[torch.tensor([1, 0, *range(2, 64)])],
        "halves exchanged": torch.cat([values[32:], values[:32]]),
        "whole blocks exchanged": values.view(-1, K)[[1, 0, 2, 3]].view(64, 512),
        "transposed": values.t().contiguous(),
        "negated": -values,
        "columns reversed": values.flip(1),
        "rounded": values.bfloat16().float(),
        "all zero": torch.zeros(64, 512),
        "one shorter": values.reshape(-1)[:-1],
    }
    found = {name: digest(tensor) for name, tensor in faults.items()}
    assert digest(values) not in found.values()
    assert len(set(found.values())) == len(found)


def test_values_with_many_zero_bits_are_told_apart_too() -> None:
    values = torch.arange(20_000).bfloat16().float()  # the low half of every word is zero
    seen = {digest(values)}
    for shift in (1, 2, 3, K, 2 * K):
        seen.add(digest(values.roll(shift)))
    assert len(seen) == 6


def test_zeros_of_other_sizes_are_told_apart() -> None:
    assert len({digest(torch.zeros(size, dtype=torch.uint8)) for size in range(100)}) == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_no_number_is_seen_in_any_place(dtype: torch.dtype, value: float) -> None:
    sound = torch.linspace(-3, 3, 1001).to(dtype)
    assert all_finite(sound)
    if dtype == torch.float8_e4m3fn and math.isinf(value):
        return  # it has no infinities
    for place in (0, 500, 1000):
        broken = sound.clone()
        broken[place] = value
        assert not all_finite(broken)


def test_what_holds_no_float_or_nothing_is_finite() -> None:
    assert all_finite(torch.tensor([1, 2, 3]))
    assert all_finite(torch.tensor(True))
    assert all_finite(torch.zeros(0, 3))
