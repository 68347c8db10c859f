"""One forward pass of any causal language model of transformers, through the arguments that its forward really has.

Releases rename arguments (`past_key_values` became `cache`), and models differ in what they take; what a model does
not take is not passed, and where that would change the result, prompts of unequal length are not batched together.

Shapes: B rows, S new tokens a row, L columns in all, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from offbeat.errors import ModelError
from offbeat.models import positions
from offbeat.rollout.kv_rows import BufferedRows, KvRows, LibraryRows, attends_to_everything

CACHE_ARGUMENTS = ("cache", "past_key_values")
SPARE_COLUMNS = 64
"""Room allocated for sampled tokens at first; it grows by half each time it runs out."""


class ModelForward:
    """Calls the model; knows which layout of padding and cache it can work with.

    Attributes:
        buffered: rows can join and leave at any step (`BufferedRows`).
        pads: prompts of unequal length may share a batch.
        vocab_size: rows of the output head.
        max_length: longest sequence that the model has positions for; None where it has no limit.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(model.forward).parameters
        name = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
        if name is None:
            raise ModelError(
                f"{type(model).__name__} takes neither of {', '.join(CACHE_ARGUMENTS)}: the hf engine needs a causal "
                "language model with a key/value cache; use another engine for it."
            )
        self.model = model
        self.device: torch.device = model.device
        self._cache_argument = name
        self._positions = "position_ids" in parameters
        self._last_only = "logits_to_keep" in parameters
        config: Any = model.config.get_text_config()
        self._alibi = bool(getattr(config, "alibi", False))
        self.buffered = attends_to_everything(model.config)
        self.pads = self._positions and (self.buffered or _all_attention(config))
        self.layers: int = config.num_hidden_layers
        self.max_length: int | None = positions(config.to_dict())
        head: Any = model.get_output_embeddings()
        self.vocab_size: int = head.weight.shape[0] if head is not None else config.vocab_size
        # A ready-made mask saves the model's own mask building at every step; where positions come from the mask
        # (ALiBi), or where the kernel wants another form, the model builds it.
        implementation = getattr(model.config, "_attn_implementation", None)
        self._ready_mask = self.buffered and self._positions and not self._alibi and implementation in ("sdpa", "eager")

    def new_rows(self, capacity: int, new_tokens: int) -> KvRows:
        """An empty batch with room for `capacity` rows that will grow by at most `new_tokens` each."""
        if not self.buffered:
            return LibraryRows()
        return BufferedRows(self.layers, capacity, spare_columns=min(new_tokens, SPARE_COLUMNS))

    def prefill(self, tokens_BS: Tensor, first_B: Tensor) -> tuple[Tensor, Cache]:
        """Prompts, padded on the left: row b starts at column `first_B[b]`. Logits (B, V) after them, and the cache."""
        cache = DynamicCache(config=self.model.config)
        columns_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        mask_BS = (columns_S >= first_B[:, None]).long()
        positions_BS = (columns_S - first_B[:, None]).clamp_min(0)
        return self._call(tokens_BS, mask_BS, positions_BS, cache), cache

    def step(self, tokens_B: Tensor, first_B: Tensor, columns: int, cache: Cache) -> Tensor:
        """One more token a row, in column `columns`; row b starts at column `first_B[b]`. Logits (B, V) after it."""
        mask_BL = torch.arange(columns + 1, device=tokens_B.device) >= first_B[:, None]
        positions_B1 = (columns - first_B)[:, None]
        mask = self._additive(mask_BL) if self._ready_mask else mask_BL.long()
        return self._call(tokens_B[:, None], mask, positions_B1, cache)

    def _additive(self, mask_BL: Tensor) -> Tensor:
        dtype = self.model.dtype
        low = torch.finfo(dtype).min
        return torch.zeros(mask_BL.shape, dtype=dtype, device=mask_BL.device).masked_fill_(~mask_BL, low)[:, None, None]

    def _call(self, tokens_BS: Tensor, mask: Tensor, positions_BS: Tensor, cache: Cache) -> Tensor:
        arguments: dict[str, Any] = {self._cache_argument: cache, "attention_mask": mask, "use_cache": True}
        if self._positions:
            arguments["position_ids"] = positions_BS
        if self._last_only:
            arguments["logits_to_keep"] = 1
        return self.model(input_ids=tokens_BS, **arguments).logits[:, -1]


def _all_attention(config: Any) -> bool:
    """True when no layer carries a state through padding columns (linear attention, state space)."""
    types = getattr(config, "layer_types", None) or ["full_attention"]
    return all(str(name).endswith("attention") and "linear" not in str(name) for name in types)
