"""The keys and values of the samples that are being computed: rows come, grow by one column a step, and leave.

Rows are right-aligned: every row's newest token is in the last column, so columns left of a row's first token are
padding and masked.

    column     start                  end
    row 0      .  .  p  p  p  g  g  g          p prompt, g sampled, . padding (any finite number)
    row 1      p  p  p  p  p  g  g  g
    row 2      .  .  .  .  .  p  p  g          joined later

`BufferedRows` holds them in buffers with room to grow, as layers of a transformers `Cache`: a step writes one column
in place instead of copying everything (`DynamicCache` concatenates), rows leave by moving the last ones into the gaps,
and leading columns that no row needs are dropped for free. It is for models whose layers all attend to everything.
`LibraryRows` is for all others (sliding windows, linear attention): the library's own cache, whose rows can be
selected but not joined, so that a new batch starts when the old one is done.

Shapes: B rows, H key/value heads, L columns, D head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import LongTensor, Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer


class KvRows(Protocol):
    """Keys and values of the rows in the batch."""

    joins: bool
    """True: rows can join while others are there."""

    @property
    def cache(self) -> Cache:
        """What the model's forward takes and appends to."""
        ...

    def join(self, prefilled: Cache, index_B: Tensor) -> None:
        """Append rows: copies of the rows `index_B` of a cache of prompts, aligned to the right."""
        ...

    def keep(self, order_B: Tensor) -> None:
        """Row i becomes what was row `order_B[i]`. Each kept row is in its old place or moves to a lower one."""
        ...

    def trim(self, columns: int) -> None:
        """Forget that many leading columns (only called where `joins`)."""
        ...


class RowLayer(DynamicLayer):
    """One layer: `keys` and `values` (B, H, L, D) are views of the used part of a larger buffer.

    Args:
        capacity_rows: most rows at a time.
        spare_columns: columns to allocate beyond those in use, at least; half of the width when that is more.
    """

    def __init__(self, capacity_rows: int, spare_columns: int) -> None:
        super().__init__()
        self.capacity_rows = capacity_rows
        self.spare_columns = spare_columns
        self.rows = 0
        self.start = 0
        self.end = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.end + key_states.shape[-2]
        keys, values = self._reserve(key_states, value_states, left=0, right=end - self.end)
        keys[: self.rows, :, self.end : self.end + key_states.shape[-2]] = key_states
        values[: self.rows, :, self.end : self.end + key_states.shape[-2]] = value_states
        self.end += key_states.shape[-2]
        return self._view(keys, values)

    def join(self, prompt_keys: Tensor, prompt_values: Tensor, index_B: Tensor) -> None:
        width = prompt_keys.shape[-2]
        missing = max(0, width - (self.end - self.start))
        keys, values = self._reserve(prompt_keys, prompt_values, left=missing, right=0)
        self.start -= missing
        rows = slice(self.rows, self.rows + len(index_B))
        for buffer, prompts in ((keys, prompt_keys), (values, prompt_values)):
            # Padding is masked, but must be finite: NaN, which fresh memory may hold, times a weight of zero is NaN.
            buffer[: self.rows, :, self.start : self.start + missing] = 0
            buffer[rows, :, self.start : self.end - width] = 0
            buffer[rows, :, self.end - width : self.end] = prompts.index_select(0, index_B)
        self.rows += len(index_B)
        self._view(keys, values)

    def keep(self, from_rows: Tensor, to_rows: Tensor, rows: int) -> None:
        keys, values = self._buffers()
        if len(from_rows):
            used = slice(self.start, self.end)
            keys[to_rows, :, used] = keys[from_rows, :, used]
            values[to_rows, :, used] = values[from_rows, :, used]
        self.rows = rows
        self._view(keys, values)

    def trim(self, columns: int) -> None:
        self.start += columns
        self._view(*self._buffers())

    def _buffers(self) -> tuple[Tensor, Tensor]:
        assert self._keys is not None, "rows join before anything else happens to them"
        assert self._values is not None
        return self._keys, self._values

    def _view(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = keys[: self.rows, :, self.start : self.end]
        self.values = values[: self.rows, :, self.start : self.end]
        return self.keys, self.values

    def _reserve(self, key_like: Tensor, value_like: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
        """Buffers with that many free columns on either side of the used ones (start and end may move)."""
        if self._keys is not None and self.start >= left and self.end + right <= self._keys.shape[-2]:
            return self._buffers()
        width = left + (self.end - self.start) + right
        columns = width + max(self.spare_columns, width // 2 if self._keys is not None else 0)
        # Where the left side had to grow, it will again: a part of the spare columns goes there.
        new_start = left + ((columns - width) // 4 if left and self._keys is not None else 0)
        self._keys = self._moved(self._keys, key_like, columns, new_start)
        self._values = self._moved(self._values, value_like, columns, new_start)
        self.start, self.end = new_start, new_start + (self.end - self.start)
        self.device, self.dtype, self.is_initialized = key_like.device, key_like.dtype, True
        return self._buffers()

    def _moved(self, old: Tensor | None, like: Tensor, columns: int, start: int) -> Tensor:
        new = like.new_empty(self.capacity_rows, like.shape[1], columns, like.shape[-1])
        if old is not None:
            used = old[: self.rows, :, self.start : self.end]
            new[: self.rows, :, start : start + used.shape[-2]] = used
        return new


class BufferedRows:
    """Rows in growing buffers; they join and leave at any step."""

    joins = True

    def __init__(self, layers: int, capacity_rows: int, spare_columns: int) -> None:
        self._layers = [RowLayer(capacity_rows, spare_columns) for _ in range(layers)]
        self.cache = Cache(layers=list(self._layers))

    def join(self, prefilled: Cache, index_B: Tensor) -> None:
        for mine, prompts in zip(self._layers, prefilled.layers, strict=True):
            assert isinstance(prompts, DynamicLayer), "buffered rows are for models that have no other kind"
            assert prompts.keys is not None
            assert prompts.values is not None
            mine.join(prompts.keys, prompts.values, index_B)

    def keep(self, order_B: Tensor) -> None:
        to_rows = torch.arange(len(order_B), device=order_B.device)
        moved = order_B != to_rows
        from_rows, to_rows = order_B[moved], to_rows[moved]
        for layer in self._layers:
            layer.keep(from_rows, to_rows, len(order_B))

    def trim(self, columns: int) -> None:
        for layer in self._layers:
            layer.trim(columns)


class LibraryRows:
    """Rows in the library's own cache: one batch at a time."""

    joins = False

    def __init__(self) -> None:
        self._cache: Cache | None = None

    @property
    def cache(self) -> Cache:
        assert self._cache is not None, "rows join before a step"
        return self._cache

    def join(self, prefilled: Cache, index_B: Tensor) -> None:
        # The one method for choosing rows that every kind of layer has; it takes any number of them.
        prefilled.reorder_cache(cast("LongTensor", index_B))
        self._cache = prefilled

    def keep(self, order_B: Tensor) -> None:
        self.cache.reorder_cache(cast("LongTensor", order_B))

    def trim(self, columns: int) -> None:
        raise AssertionError("columns of this cache are the library's own business")


def attends_to_everything(config: Any) -> bool:
    """True when every layer of this model keeps all keys and values: then its rows can be buffered."""
    layers = DynamicCache(config=config).layers
    types = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers) and set(types) == {"full_attention"}
