"""Side by side: `transformers` `generate` and offbeat's own sampler on the same batch, as a ratio of times.

    python benchmarks/generate.py [--threads 1] [--device cpu] [--dtype float32] [--rounds 5] [--case tiny-10]

`generate` runs as fast as it sensibly can: one left-padded batch, sampling, `num_return_sequences` (its prompts are
expanded before the prefill), no scores kept. offbeat returns logprobs on top. Rounds alternate between the two, and
the median of the per-round ratios is printed: above 1, offbeat is faster.

Long-tailed lengths need samples that end at different times without a trained model: a stop id that is sampled with
a known probability at every step. Both sides use the same stop ids, so lengths have the same distribution.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from offbeat.rollout.hf import HfSampler
from offbeat.types import GenerateRequest, Sampling


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    feed_forward: int


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    prompts: int
    samples: int
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    new_tokens: int
    stop_probability: float
    """At every step; 0: all samples have `new_tokens` tokens."""


TINY = Shape(vocabulary=78, hidden=128, layers=2, heads=4, head_dim=32, feed_forward=384)
SMALL = Shape(vocabulary=16384, hidden=512, layers=8, heads=8, head_dim=64, feed_forward=1536)

CASES = (
    Case("tiny-10", TINY, 16, 16, (5, 8), 10, 0.0),
    Case("tiny-10-tail", TINY, 16, 16, (5, 8), 10, 0.15),
    Case("tiny-64", TINY, 16, 16, (5, 8), 64, 0.0),
    Case("tiny-64-tail", TINY, 16, 16, (5, 8), 64, 0.06),
    Case("small-64", SMALL, 4, 8, (24, 32), 64, 0.0),
    Case("small-64-tail", SMALL, 4, 8, (24, 32), 64, 0.06),
)


def build(shape: Shape, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A random model with nearly uniform next-token distributions, so that a stop id has a known probability."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.feed_forward,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.002,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval()


def prompts_of(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    low, high = case.prompt_tokens
    return [
        rng.integers(1, case.shape.vocabulary, rng.integers(low, high + 1)).astype(np.int32)
        for _ in range(case.prompts)
    ]


def stop_ids(case: Case) -> list[int]:
    return list(range(1, 1 + round(case.stop_probability * case.shape.vocabulary)))


def library(model: Any, case: Case) -> Callable[[int], int]:
    """Number of sampled tokens of one `generate` call on the batch."""
    prompts = prompts_of(case)
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, width - len(prompt) :] = 1
    tokens, mask, stops = tokens.to(model.device), mask.to(model.device), stop_ids(case)

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        output = model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=case.samples,
            max_new_tokens=case.new_tokens,
            eos_token_id=stops or None,
            pad_token_id=0,
        )
        sampled = output[:, width:].cpu().numpy()
        if not stops:
            return sampled.size
        is_stop = np.isin(sampled, stops)
        return int(np.where(is_stop.any(1), is_stop.argmax(1) + 1, sampled.shape[1]).sum())

    return run


def offbeat(model: PreTrainedModel, case: Case) -> Callable[[int], int]:
    sampler = HfSampler(model, max_rows=case.prompts * case.samples)
    sampling = Sampling(max_new_tokens=case.new_tokens, stop_token_ids=tuple(stop_ids(case)))
    prompts = prompts_of(case)

    def run(seed: int) -> int:
        requests = [
            GenerateRequest(
                prompt_id=str(i),
                epoch=0,
                token_ids=prompt,
                seeds=tuple(seed * 1_000_000 + i * 1000 + j for j in range(case.samples)),
            )
            for i, prompt in enumerate(prompts)
        ]
        return sum(len(rollout.token_ids) for rollout in sampler.generate(requests, sampling, 0))

    return run


def timed(run: Callable[[int], int], seed: int) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = run(seed)
    return time.perf_counter() - start, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'case':<16}{'generate s':>12}{'offbeat s':>12}{'tokens':>16}{'ratio':>8}{'ratio/token':>13}")
    for case in CASES:
        if options.case in (None, case.name):
            print_case(case, build(case.shape, options.device, getattr(torch, options.dtype)), options.rounds)


def print_case(case: Case, model: PreTrainedModel, rounds: int) -> None:
    theirs, ours = library(model, case), offbeat(model, case)
    for run in (theirs, ours):
        timed(run, 0)  # memory and libraries are warm afterwards
    pairs = [(timed(theirs, seed), timed(ours, seed)) for seed in range(1, rounds + 1)]
    ratio = statistics.median(a[0] / b[0] for a, b in pairs)
    per_token = statistics.median((a[0] / a[1]) / (b[0] / b[1]) for a, b in pairs)
    their_s = statistics.median(a[0] for a, _ in pairs)
    our_s = statistics.median(b[0] for _, b in pairs)
    tokens = f"{sum(a[1] for a, _ in pairs) // rounds}/{sum(b[1] for _, b in pairs) // rounds}"
    print(f"{case.name:<16}{their_s:>12.3f}{our_s:>12.3f}{tokens:>16}{ratio:>8.2f}{per_token:>13.2f}", flush=True)


if __name__ == "__main__":
    main()
