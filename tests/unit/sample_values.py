"""Builds scored samples for the tests beside it; only what a test speaks of has to be said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offbeat.types import FinishReason, Prompt, Rollout, Scored, run_length


def scored(
    prompt_id: str = "data/0",
    sample_index: int = 0,
    *,
    reward: float = 0.0,
    tokens: int = 3,
    versions: Sequence[int] | None = None,
    finish_reason: FinishReason = "stop",
    epoch: int = 0,
    parts: dict[str, float] | None = None,
    errors: tuple[str, ...] = (),
    text: str = "five",
    prompt_text: str = "two plus three is",
) -> Scored:
    """`versions` has one for each token; version 0 by default."""
    versions = [0] * tokens if versions is None else versions
    prompt_ids = np.arange(4, dtype=np.int32)
    return Scored(
        rollout=Rollout(
            prompt_id=prompt_id,
            sample_index=sample_index,
            epoch=epoch,
            prompt_token_ids=prompt_ids,
            token_ids=np.arange(len(versions), dtype=np.int32),
            logprobs=np.full(len(versions), -1.0, np.float32),
            versions=run_length(versions),
            finish_reason=finish_reason,
            engine="engine-0",
            started_s=0.0,
            finished_s=1.0,
        ),
        prompt=Prompt(id=prompt_id, epoch=epoch, source="data", token_ids=prompt_ids, text=prompt_text, columns={}),
        text=text,
        reward=reward,
        parts={} if parts is None else parts,
        errors=errors,
    )
