"""One forward pass over a micro-batch: the logprob of each continuation token under the current weights.

Rows are padded right and the model is causal, so no real token can see padding, whatever it contains. The attention
mask is therefore all ones: one with holes would only keep the fast causal kernels from running. Positions count from 0
in every row. Only the columns that predict a continuation token go through the output head.

Shapes: B rows, L columns, N continuation tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.algorithms.logprobs import TokenLogprobs, token_logprobs
from offbeat.config import Dtype
from offbeat.trainer.batching import MicroBatch
from offbeat.types import Sampling


class Scorer:
    """Scores micro-batches with one model, which it does not own. Differentiable unless under `torch.no_grad`."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: Dtype) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_columns = "logits_to_keep" in accepted

    def score(self, micro: MicroBatch, sampling: Sampling, *, entropy: bool = False) -> TokenLogprobs:
        """In the order of `micro.targets_N`."""
        targets_N = self.tensor(micro.targets_N)
        logits_NV = self._logits(micro)
        return token_logprobs(logits_NV, targets_N, sampling, entropy=entropy)

    def tensor(self, array: Any) -> Tensor:
        """A numpy array on the model's device."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _logits(self, micro: MicroBatch) -> Tensor:
        ids_BL = self.tensor(micro.ids_BL)
        scored_BC = self.tensor(micro.scored_BL[:, micro.first_column : micro.last_column + 1])
        arguments: dict[str, Any] = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "use_cache": False}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(ids_BL.shape[1], device=self._device).expand_as(ids_BL)
        if self._takes_columns:
            # Columns, not a mask of rows and columns: every release that we support understands them.
            arguments["logits_to_keep"] = torch.arange(micro.first_column, micro.last_column + 1, device=self._device)
        # Master weights are float32 and stay so: bfloat16 compute is autocast.
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == "bfloat16"):
            logits: Tensor = self._model(**arguments).logits
        if not self._takes_columns:
            logits = logits[:, micro.first_column : micro.last_column + 1]
        return logits[scored_BC]
