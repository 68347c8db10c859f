"""Real runs for the equivalence tests, with what they sampled, and the same run in one process.

The model is tiny and random, the data is rows of text in order, and every value that decides what is learned is set
here, for both sides, so that a default that changes changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning_reward import liked
from transformers import AutoModelForCausalLM, AutoTokenizer

import offbeat
from offbeat.metrics.display import Display
from offbeat.recording import RunRecorder
from offbeat.rollout.hf import HfSampler
from offbeat.stages import Trained
from offbeat.testing.oracle import OracleSample
from offbeat.testing.reference import ReferenceSettings
from offbeat.testing.tiny_model import tiny_qwen3
from offbeat.training import RunResult
from offbeat.types import GenerateRequest, Rollout, Sampling, sample_seed

STEPS = 5
PROMPTS = 6
SAMPLES = 4
NEW_TOKENS = 8
TEMPERATURE = 0.8
STOPS = (1, 3, 4, 5, 20, 21)
"""`<eos>` and some characters, so that samples have every length."""
TRAINER: Mapping[str, Any] = {
    "lr": 6e-3,
    "warmup_steps": 2,
    "betas": [0.9, 0.99],
    # As large as the gradient's elements: AdamW then sees the scale of a gradient, and does not make a full step of the
    # sign of one that is nothing but rounding.
    "eps": 1e-2,
    "weight_decay": 0.01,
    "max_grad_norm": 2.0,
}
LOSS: Mapping[str, Any] = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2}


def inputs(folder: Path) -> Path:
    """A model and its data, to be shared by several runs."""
    tiny_qwen3(folder / "model", seed=7)
    rows = [f"{chr(ord('a') + number % 26)}{number * 37}=" for number in range(2 * STEPS * PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows[::-2]))
    return folder


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    """A config. A section in `changes` is merged into the one here."""
    base: dict[str, Any] = {
        "model": str(folder / "model"),
        "steps": STEPS,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_staleness": 0,
        "seed": 3,
        "sampling": {"max_new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "stop_token_ids": list(STOPS)},
        "data": [
            {
                "name": "rows",
                "source": str(folder / "train.jsonl"),
                "format": "text",
                "max_prompt_tokens": 16,
                "shuffle": False,
            }
        ],
        "rollout": {"device": "cpu", "threads": 1},
        # Several micro-batches an update.
        "trainer": {**TRAINER, "device": "cpu", "threads": 1, "dtype": "float32", "micro_batch_tokens": 64},
        "loss": dict(LOSS),
        "weights": {"parity_every": 1, "timeout_s": 60.0},
        "limits": {"start_s": 120.0, "generate_s": 60.0, "update_s": 60.0},
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and key in base else value
    return base


def heldout(folder: Path, every_steps: int = 1) -> dict[str, Any]:
    """An [[eval]] section."""
    return {"name": "heldout", "source": str(folder / "heldout.jsonl"), "every_steps": every_steps}


@dataclass(frozen=True)
class Observed:
    """A finished run, and what each step was trained on."""

    result: RunResult
    trained: list[Trained]

    def rollouts(self, step: int) -> list[Rollout]:
        return [scored.rollout for scored in self.trained[step].scored]

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the newest checkpoint."""
        assert self.result.checkpoint is not None
        return weights_of(self.result.checkpoint)


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load(checkpoint / "trainer-0" / "model").state_dict()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(config: Mapping[str, Any], run_dir: Path, display: Display | None = None) -> Observed:
    """Through `offbeat.run`, with all its processes."""
    steps: list[Trained] = []

    class Listening(RunRecorder):
        def trained(self, trained: Trained) -> None:
            steps.append(trained)
            super().trained(trained)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.training.RunRecorder", Listening)
        result = offbeat.run(config, reward=liked, run_dir=run_dir, display=display)
    return Observed(result, steps)


def settings_of(config: Mapping[str, Any]) -> ReferenceSettings:
    """The same choices for the reference. Dr. GRPO is spelled out, not looked up."""
    recipe: dict[str, Any] = {}
    if config.get("recipe") == "dr_grpo":
        recipe = {"scale_by_std": False, "aggregation": "constant"}
    return ReferenceSettings(
        steps=config["steps"],
        delay=config["max_staleness"],
        updates_per_step=config.get("updates_per_step", 1),
        max_new_tokens=NEW_TOKENS,
        temperature=TEMPERATURE,
        **{**TRAINER, "betas": tuple(TRAINER["betas"])},
        **config["loss"],
        **recipe,
    )


@dataclass
class Sampler:
    """Samples each step anew, for the reference: rows, seeds and rewards from plain Python, tokens from `HfSampler`."""

    folder: Path
    seed: int
    sampled: list[list[OracleSample]] = field(default_factory=list[list[OracleSample]])

    def __post_init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder / "model")
        self.prompts = self.read("train.jsonl")

    def __call__(self, model: Any, step: int) -> Sequence[OracleSample]:
        rows = [(f"rows/{row}", self.prompts[row]) for row in range(step * PROMPTS, (step + 1) * PROMPTS)]
        samples = [self.scored(rollout) for rollout in self.rollouts(model, rows, SAMPLES)]
        self.sampled.append(samples)
        return samples

    def heldout(self, model: Any) -> list[str]:
        """The completions of the held-out set."""
        rows = [(f"heldout/{row}", ids) for row, ids in enumerate(self.read("heldout.jsonl"))]
        return [self.text(rollout) for rollout in self.rollouts(model, rows, 1)]

    def read(self, name: str) -> list[list[int]]:
        lines = (self.folder / name).read_text().splitlines()
        return [self.tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]

    def rollouts(self, model: Any, rows: Sequence[tuple[str, list[int]]], samples: int) -> list[Rollout]:
        requests = [
            GenerateRequest(
                prompt_id=name,
                epoch=0,
                token_ids=np.asarray(ids, dtype=np.int32),
                seeds=tuple(sample_seed(self.seed, name, index, 0) for index in range(samples)),
            )
            for name, ids in rows
        ]
        sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, stop_token_ids=STOPS)
        return HfSampler(model).generate(requests, sampling, version=0)

    def text(self, rollout: Rollout) -> str:
        """A stop id that is a plain character ends the sample and is no part of its text."""
        kept = [token for token in rollout.token_ids.tolist() if token not in STOPS]
        return self.tokenizer.decode(kept, skip_special_tokens=True)

    def scored(self, rollout: Rollout) -> OracleSample:
        return OracleSample(
            group=rollout.prompt_id,
            prompt=rollout.prompt_token_ids.tolist(),
            tokens=rollout.token_ids.tolist(),
            behaviour=rollout.logprobs.tolist(),
            reward=liked(self.text(rollout)),
        )
