"""A run that is over in seconds: a project folder with a tiny model, twelve rows and a reward.

write_project(folder)                 model/ train.jsonl rewards.py
write_config(folder, steps=3)         run.toml, on top of `BASE`
records(run), steps_of(run)           what metrics.jsonl has
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.testing.tiny_model import tiny_qwen3

BASE: dict[str, Any] = {
    "model": "model",
    "steps": 3,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "sampling": {"max_new_tokens": 6},
    "data": [
        {
            "source": "train.jsonl",
            "format": "text",
            "answer": "answer",
            "max_prompt_tokens": 16,
            "rewards": {"rewards.py:length": 1.0},
        }
    ],
    "rollout": {"threads": 1, "device": "cpu"},
    "trainer": {"threads": 1, "device": "cpu", "dtype": "float32", "lr": 1e-3, "warmup_steps": 0},
    "checkpoint": {"every_steps": 1},
}
REWARDS = """
def length(completion: str) -> float:
    return float(len(completion) % 5)


def broken(completion: str) -> float:
    raise LookupError("no such key in the answer sheet")
"""


def write_project(folder: Path) -> Path:
    """What a config of `write_config` refers to."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers draws a progress bar
        tiny_qwen3(folder / "model", layers=1)
    write_rows(folder / "train.jsonl", [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(12)])
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, name: str = "run", **changes: Any) -> Path:
    """`changes` are merged into `BASE`, section by section; None removes a key."""
    path = folder / f"{name}.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in merge(BASE, changes).items()))
    return path


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return {key: value for key, value in merged.items() if value is not None}


def toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(inner) for inner in value) + "]"
    return json.dumps(value)


def records(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[int]:
    """The steps that metrics.jsonl has, in order; the line of a last evaluation left out."""
    return [record["step"] for record in records(run) if "reward_mean" in record]
