"""Settings of one engine process, as they travel to it. No torch here."""

from __future__ import annotations

import msgspec

from offbeat.config import Dtype

CANNOT_SAMPLE = ("recurrent_gemma", "mamba", "falcon_mamba", "rwkv", "xlnet", "minimax")
"""Model types that the hf engine refuses: their state is no cache of keys and values, and kept from step to step as one
it gives logprobs of another model."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process needs to build its model; all weights come with the first sync."""

    model: str
    """A folder, or a hub id: only its config is read."""
    revision: str | None = None
    dtype: Dtype
    """Of the weights and of the computation; logits are float32 always."""
    device: str = "auto"
    threads: int | None = None
    """CPU threads; None leaves torch's own choice."""
    max_rows: int = 256
    """Samples computed at once; memory only."""
