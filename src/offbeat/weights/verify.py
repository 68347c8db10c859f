"""An order-sensitive digest of a tensor's bytes, equal on every device: integer arithmetic in torch, nothing else.

The bytes are read as little-endian int32 words w₀, w₁, … (the last one padded with zero bytes), and

    digest = size · A  +  Σᵢ wᵢ · M[i mod K] · C[i div K]     (mod 2⁶⁴)

with M and C odd and pseudo-random (splitmix64). A multilinear hash: changing any one word always changes the digest
(the factor is odd), and two different tensors of one size agree with a chance of at most about 2⁻³². Exchanged
elements, shifts, blocks of zeros and exchanged tensors change it. It guards against faults, not against forgery.

Sums mod 2⁶⁴ do not depend on their order, so a digest can be put together from slices that start on a multiple of
`ALIGN` bytes: the sender adds up slices as they leave in buckets, the engine takes whole tensors from its model's
memory.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

K = 8192
"""Words of a block: M and the products of eight blocks stay in a core's second-level cache."""
_ROWS = 8
_MASK = (1 << 64) - 1
_SIZE_FACTOR = 0x9E3779B97F4A7C15

NOT_FINITE = (
    "has values that are NaN or infinite in the trainer's memory; continue from an earlier checkpoint "
    "(offbeat resume RUN --step N) with a lower trainer.lr"
)
"""What to say of a tensor that is not `all_finite`."""


class Digest:
    """The digest of one tensor, added up from slices given in any order."""

    def __init__(self, size: int) -> None:
        self._sum = size * _SIZE_FACTOR & _MASK

    def add(self, data: Tensor, start: int) -> None:
        """Add `data` (uint8, flat, contiguous), which lies at byte `start` (a multiple of 4) of the tensor."""
        if start % 4:
            raise AssertionError(f"slice at byte {start}: slices start on a multiple of 4 bytes")
        whole = data.numel() - data.numel() % 4
        self._sum = (self._sum + _words_sum(_as_words(data[:whole]), start // 4)) & _MASK
        if whole < data.numel():
            tail = torch.zeros(4, dtype=torch.uint8, device=data.device)
            tail[: data.numel() - whole] = data[whole:]
            self._sum = (self._sum + _words_sum(tail.view(torch.int32), (start + whole) // 4)) & _MASK

    def text(self) -> str:
        """16 hexadecimal digits."""
        return f"{self._sum:016x}"


def digest(tensor: Tensor) -> str:
    """Digest of a tensor's bytes in row-major order, whatever its memory layout and device."""
    flat = tensor.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8)
    result = Digest(data.numel())
    result.add(data, 0)
    return result.text()


def _as_words(data: Tensor) -> Tensor:
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _words_sum(words: Tensor, first: int) -> int:
    """Σ wᵢ · M · C over int32 words whose index in the tensor starts at `first`."""
    total = 0
    position, end = first, first + words.numel()
    if position % K and position < end:  # up to the next block boundary
        size = min(K - position % K, end - position)
        total += _block_sums(words[:size].unsqueeze(0), position % K)[0] * block_factor(position // K)
        position += size
    blocks = (end - position) // K
    if blocks:
        begin = position - first
        sums = _block_sums(words[begin : begin + blocks * K].view(blocks, K), 0)
        total += sum(s * block_factor(position // K + n) for n, s in enumerate(sums))
        position += blocks * K
    if position < end:
        total += _block_sums(words[position - first :].unsqueeze(0), 0)[0] * block_factor(position // K)
    return total & _MASK


def _block_sums(words_RK: Tensor, offset: int) -> list[int]:
    """Σⱼ words[r, j] · M[offset + j] for each row, mod 2⁶⁴ as signed integers."""
    rows, width = words_RK.shape
    factors = _word_factors(str(words_RK.device))[offset : offset + width]
    step = _ROWS if words_RK.device.type == "cpu" else 1024
    products = torch.empty((min(step, rows), width), dtype=torch.int64, device=words_RK.device)
    sums = torch.empty(rows, dtype=torch.int64, device=words_RK.device)
    for row in range(0, rows, step):
        part = words_RK[row : row + step]
        into = products[: part.shape[0]]
        into.copy_(part)  # int64 first: the product must not wrap at 32 bits
        into.mul_(factors)
        torch.sum(into, 1, out=sums[row : row + step])
    return sums.tolist()


def splitmix(index: int) -> int:
    """The splitmix64 output function (Steele, Lea, Flood 2014) at `index`."""
    z = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=16)
def _word_factors(device: str) -> Tensor:
    values = [splitmix(index) | 1 for index in range(K)]
    signed = [value - (1 << 64) if value >> 63 else value for value in values]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=1 << 17)
def block_factor(block: int) -> int:
    return splitmix((1 << 32) + block) | 1


def all_finite(values: Tensor) -> bool:
    """No NaN and no infinity among them. One pass: the extremes of what has a NaN are NaN."""
    if not values.is_floating_point() or not values.numel():
        return True
    low, high = torch.aminmax(values if values.itemsize > 1 else values.float())  # none for float8
    return math.isfinite(low) and math.isfinite(high)
