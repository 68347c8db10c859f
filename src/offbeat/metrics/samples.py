"""One object a sample for samples.jsonl: all that is needed to look at it, or to score it again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from offbeat.types import Scored

Json: TypeAlias = dict[str, Any]

TEXT_LIMIT = 200_000
"""Characters of one text; of a longer one, its two ends are kept."""


def sample_objects(
    step: int,
    scored: Sequence[Scored],
    advantages: Sequence[float | None] | None = None,
    *,
    evaluation: str | None = None,
) -> list[Json]:
    """Objects in order of `scored`. `advantages[i]` belongs to `scored[i]`; null where none are known.

    `evaluation` is the name of the held-out set, null for training samples.
    """
    found: Sequence[float | None] = [None] * len(scored) if advantages is None else advantages
    return [_sample(step, one, advantage, evaluation) for one, advantage in zip(scored, found, strict=True)]


def _sample(step: int, scored: Scored, advantage: float | None, evaluation: str | None) -> Json:
    rollout = scored.rollout
    return {
        "step": step,
        "eval": evaluation,
        "prompt_id": rollout.prompt_id,
        "sample_index": rollout.sample_index,
        "epoch": rollout.epoch,
        "source": scored.prompt.source,
        "row": scored.prompt.row_digest,
        "prompt": bounded(scored.prompt.text),
        "completion": bounded(scored.text),
        "reward": scored.reward,
        "parts": scored.parts,
        "errors": [bounded(error, 2_000) for error in scored.errors],
        "advantage": advantage,
        "finish_reason": rollout.finish_reason,
        "versions": rollout.versions,
        "engine": rollout.engine,
        "prompt_tokens": len(rollout.prompt_token_ids),
        "completion_tokens": len(rollout.token_ids),
    }


def bounded(text: str, limit: int = TEXT_LIMIT) -> str:
    """At most about `limit` characters, with a mark where some were left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
