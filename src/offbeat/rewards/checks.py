"""Are the configured reward functions there, and do the rows have what they ask for? Answered without running them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offbeat.data.columns import columns_everywhere
from offbeat.data.prompts import PromptSource
from offbeat.errors import ConfigError
from offbeat.rewards.functions import check_columns, inspect_function


def check_rewards(sources: Iterable[PromptSource]) -> None:
    """Check every function of every source (or held-out set). Raises one `ConfigError` with all problems."""
    problems: list[str] = []
    for source in sources:
        columns = columns_everywhere(source.rows) | ({"answer"} if source.section.answer is not None else set())
        ordered = [name for name in source.rows.rows[0] if name in columns]
        ordered += sorted(columns - set(ordered))
        for spec in source.section.rewards:
            try:
                signature = inspect_function(spec)
                if signature is not None:
                    check_columns(spec, signature, ordered, source.name)
                if spec.startswith("reasoning_gym") and ":" not in spec:
                    _check_gym(spec, source)
            except ConfigError as error:
                problems.extend(error.problems)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))


def _check_gym(spec: str, source: PromptSource) -> None:
    row = source.rows.rows[0]
    metadata: Any = row.get("metadata")
    if "reasoning_gym" in row or (isinstance(metadata, dict) and "source_dataset" in metadata):
        return
    raise ConfigError(
        f"rewards: {spec!r} grades rows of reasoning-gym tasks only, and {source.name} ({source.rows.source}) has no "
        "column metadata with source_dataset; use exact_match, math_verify or a function of your own."
    )
