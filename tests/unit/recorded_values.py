"""Builds recorded samples for the tests beside it; only what a test speaks of has to be said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from offbeat.metrics.recorded import RecordedSample
from offbeat.metrics.writer import encode_line


def recorded(prompt_id: str = "data/0", sample_index: int = 0, **changes: Any) -> RecordedSample:
    values: dict[str, Any] = {
        "step": 0,
        "source": prompt_id.partition("/")[0],
        "prompt": "two plus three is",
        "completion": "five",
        "reward": 0.0,
        "parts": {},
        "finish_reason": "stop",
        "versions": ((0, 3),),
        "engine": "engine-0",
        "prompt_tokens": 4,
        "completion_tokens": 3,
    }
    return RecordedSample(prompt_id=prompt_id, sample_index=sample_index, **{**values, **changes})


def write_samples(path: Path, samples: list[RecordedSample]) -> Path:
    path.write_bytes(b"".join(encode_line(msgspec.to_builtins(sample)) for sample in samples))
    return path
