"""A run folder as a long run leaves it, made in seconds without a model: for the report, and for tools that read runs.

    write_run(folder, Recorded(steps=400, prompts_per_step=64, samples_per_prompt=8))

Texts are arithmetic word problems with worked answers of varied length; rewards rise, the entropy falls, one stretch is
unhealthy, so that curves, alarms and samples have something to show. The same seed gives the same files.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from offbeat.metrics.evaluation import mean_with_error, pass_at_k
from offbeat.metrics.writer import encode_line

Json: TypeAlias = dict[str, Any]

NAMES = ("Ada", "Ben", "Chloe", "Dmitri", "Elif", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mei", "Noor")
THINGS = ("apples", "marbles", "stickers", "train tickets", "pencils", "stamps", "shells", "books", "candles", "coins")
STEPS = (
    "First I work out how many {thing} there are at the start, which is {a}.",
    "Then {name} gets {b} more, so I add: {a} + {b} = {ab}.",
    "Let me check that again: {a} plus {b} is {ab}.",
    "After that {c} of the {thing} are given away, which leaves {ab} - {c} = {left}.",
    "It helps to write the numbers below each other before adding them.",
    "Wait, the question asks for what is left at the end, not for what was given away.",
    "So the {thing} that remain are {left}, as the text says that nothing else happens to them.",
)


@dataclass(frozen=True)
class Recorded:
    """The size of a run."""

    steps: int = 400
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    eval_every: int = 50
    eval_prompts: int = 200
    eval_samples: int = 4
    seed: int = 0


def write_run(folder: Path, size: Recorded) -> None:
    """config.json, metrics.jsonl, samples.jsonl, trace.json and journal.jsonl of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(size.seed)
    (folder / "config.json").write_text(json.dumps(config(size), indent=2), encoding="utf-8")
    started_s = 1_800_000_000.0
    with (
        (folder / "metrics.jsonl").open("wb") as metrics,
        (folder / "samples.jsonl").open("wb") as samples,
        (folder / "journal.jsonl").open("wb") as journal,
        (folder / "trace.json").open("w", encoding="utf-8") as trace,
    ):
        trace.write("[\n")
        for pid, name in enumerate(("controller", "trainer-0", "engine-0", "engine-1", "rewards"), 1):
            _event(trace, {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        journal.write(encode_line({"event": "started", "step": 0, "version": 0, "time": started_s}))
        clock_s = 4.0
        for step in range(size.steps + 1):
            points: Json = {}
            if step % size.eval_every == 0 or step == size.steps:
                points = _evaluate(random_, size, step, samples)
            if step == size.steps:
                metrics.write(encode_line({"step": step, "weights_version": step, **points, "nonfinite": []}))
                break
            record, seconds = _step(random_, size, step, samples)
            metrics.write(encode_line({**record, **points, "nonfinite": []}))
            for event in _events(random_, step, clock_s, record):
                _event(trace, event)
            clock_s += seconds
            journal.write(
                encode_line({"event": "trained", "step": step, "version": step + 1, "time": started_s + clock_s})
            )


def config(size: Recorded) -> Json:
    return {
        "model": "example/arithmetic-1b",
        "steps": size.steps,
        "prompts_per_step": size.prompts_per_step,
        "samples_per_prompt": size.samples_per_prompt,
        "max_staleness": 1,
        "updates_per_step": 1,
        "seed": size.seed,
        "sampling": {"max_new_tokens": 512, "temperature": 1.0, "top_p": 1.0},
        "data": [{"name": "stories", "source": "stories.jsonl", "rewards": {"rewards.py:correct": 1.0}}],
        "eval": [{"name": "heldout", "source": "heldout.jsonl", "every_steps": size.eval_every}],
        "rollout": {"engine": "hf", "replicas": 2, "device": "cuda:1"},
        "trainer": {"lr": 1e-6, "dtype": "bfloat16", "device": "cuda:0"},
    }


def _skill(size: Recorded, step: int) -> float:
    """Chance that a sample is right; it dips for a while in the last third."""
    share = step / max(1, size.steps)
    dip = 0.55 * math.exp(-(((share - 0.78) / 0.03) ** 2))
    return max(0.02, min(0.97, 0.18 + 0.75 * (1 - math.exp(-3.2 * share)) - dip))


def _step(random_: random.Random, size: Recorded, step: int, samples: Any) -> tuple[Json, float]:
    skill = _skill(size, step)
    groups = [
        _group(random_, f"stories/{random_.randrange(7500)}", step, None, skill, size.samples_per_prompt)
        for _ in range(size.prompts_per_step)
    ]
    for group in groups:
        samples.write(b"".join(encode_line(one) for one in group))
    flat = [one for group in groups for one in group]
    rewards = [one["reward"] for one in flat]
    mean = sum(rewards) / len(rewards)
    tokens = sum(one["completion_tokens"] for one in flat)
    times = _times(random_, step)
    record: Json = {
        "step": step,
        "weights_version": step,
        "reward_mean": mean,
        "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "reward/correct": sum(one["parts"]["correct"] for one in flat) / len(flat),
        "reward/boxed": sum(one["parts"]["boxed"] for one in flat) / len(flat),
        "reward_errors": sum(len(one["errors"]) for one in flat),
        "response_length_mean": tokens / len(flat),
        "truncated_fraction": sum(one["finish_reason"] == "length" for one in flat) / len(flat),
        "groups_without_spread_fraction": sum(len({one["reward"] for one in group}) == 1 for group in groups)
        / len(groups),
        "solved_groups_fraction": sum({one["reward"] for one in group} == {1.0} for group in groups) / len(groups),
        "tokens_generated": tokens,
        "tokens_trained": int(0.7 * tokens),
        "staleness_min": min(1, step),
        "staleness_max": min(1, step),
        "updates_behind_max": min(1, step),
        "loss": random_.gauss(0, 0.01),
        "lr": 1e-6 * min(1, (step + 1) / 10),
        "grad_norm": 0.3 + random_.expovariate(8),
        "entropy": 0.25 + 0.5 * math.exp(-3 * step / size.steps) + random_.gauss(0, 0.01),
        "kl_reference": None,
        "kl_engine_trainer": 0.004 + random_.expovariate(900),
        "clip_fraction_low": random_.expovariate(900),
        "clip_fraction_high": random_.expovariate(600),
        "ratio_mean": 1 + random_.gauss(0, 0.001),
        "ratio_max": 1.5 + random_.expovariate(1.5),
        "ess": 0.99 - random_.expovariate(300),
        "logprob_gap_mean": 0.002 + random_.expovariate(2000) if step % 20 == 0 else None,
        "logprob_gap_max": 0.02 + random_.expovariate(100) if step % 20 == 0 else None,
        **times,
        "sync_bytes": 2_470_000_000,
        "skipped_updates": 0,
    }
    return record, times["time_step_s"]


def _times(random_: random.Random, step: int) -> Json:
    generate, train = 7.5 + random_.gauss(0, 0.7), 6.4 + random_.gauss(0, 0.2)
    sync = {
        "time_sync_rendezvous_s": 0.02 + random_.expovariate(100),
        "time_sync_transfer_s": 0.31 + random_.expovariate(30),
        "time_sync_verify_s": 0.05 + random_.expovariate(200),
        "time_sync_probe_s": 0.4 + random_.expovariate(20) if step % 20 == 0 else 0.0,
    }
    total = sum(sync.values())
    return {
        "time_step_s": max(generate, train) + total + 0.1,
        "time_generate_s": generate,
        "time_reward_s": 0.4 + random_.expovariate(5),
        "time_train_s": train,
        "time_wait_s": max(0.0, generate - train),
        "time_sync_s": total,
        "time_evaluate_s": 0.0,
        "overlap": min(1.0, 0.93 + random_.gauss(0, 0.03)),
        **sync,
    }


def _group(
    random_: random.Random, prompt_id: str, step: int, evaluation: str | None, skill: float, n: int
) -> list[Json]:
    a, b = random_.randrange(10, 900), random_.randrange(10, 900)
    c = random_.randrange(1, a + b)
    words = {"name": random_.choice(NAMES), "thing": random_.choice(THINGS), "a": a, "b": b, "c": c}
    words |= {"ab": a + b, "left": a + b - c}
    prompt = (
        "<|im_start|>user\n{name} has {a} {thing} and gets {b} more from a friend. Then {c} of the {thing} are given "
        "away. How many {thing} are left? Put the final answer in a box.<|im_end|>\n<|im_start|>assistant\n"
    ).format(**words)
    hardness = random_.gauss(0, 1.2)
    chance = 1 / (1 + math.exp(hardness - math.log(skill / (1 - skill))))
    samples = [_sample(random_, words, random_.random() < chance) for _ in range(n)]
    mean, error = mean_with_error([one["reward"] for one in samples])
    spread = 0.0 if error is None else error * math.sqrt(n)
    base = {"step": step, "eval": evaluation, "prompt_id": prompt_id, "epoch": step // 117, "prompt": prompt}
    base |= {"source": "heldout" if evaluation else "stories", "prompt_tokens": len(prompt) // 4}
    version = step if evaluation else max(0, step - 1)
    return [
        {
            **base,
            "sample_index": index,
            **one,
            "advantage": (one["reward"] - mean) / spread if spread and not evaluation else None,
            "versions": [[version, one["completion_tokens"]]],
            "engine": f"engine-{random_.randrange(2)}",
        }
        for index, one in enumerate(samples)
    ]


def _sample(random_: random.Random, words: dict[str, Any], right: bool) -> Json:
    said = [random_.choice(STEPS).format(**words) for _ in range(2 + int(random_.expovariate(0.15)))]
    answer = words["left"] if right else words["left"] + random_.choice((-100, -10, -1, 1, 10, 100))
    boxed = random_.random() < 0.9
    said.append(f"The answer is \\boxed{{{answer}}}." if boxed else f"The answer is {answer}.")
    text = " ".join(said)
    cut = len(text) > 2000
    failed = random_.random() < 0.0005
    parts = {"correct": float(right and not cut and not failed), "boxed": float(boxed and not cut)}
    return {
        "completion": text[:2000],
        "reward": parts["correct"] + 0.1 * parts["boxed"],
        "parts": parts,
        "errors": ["correct: TimeoutError: no answer after 10 s"] if failed else [],
        "finish_reason": "length" if cut else "stop",
        "completion_tokens": 512 if cut else len(text) // 4,
    }


def _evaluate(random_: random.Random, size: Recorded, step: int, samples: Any) -> Json:
    skill = _skill(size, step)
    groups = [
        _group(random_, f"heldout/{row}", step, "heldout", skill, size.eval_samples) for row in range(size.eval_prompts)
    ]
    for group in groups:
        samples.write(b"".join(encode_line(one) for one in group))
    n = size.eval_samples
    mean, error = mean_with_error([sum(one["reward"] for one in group) / n for group in groups])
    found: Json = {f"eval/heldout/avg@{n}": mean, f"eval/heldout/avg@{n}_error": error}
    for k in (1, n):
        passed = [sum(one["reward"] >= 1 for one in group) for group in groups]
        found[f"eval/heldout/pass@{k}"], found[f"eval/heldout/pass@{k}_error"] = mean_with_error(
            [pass_at_k(n, count, k) for count in passed]
        )
    return found | {"eval/heldout/weights_version": step, "eval/heldout/prompts": size.eval_prompts}


def _events(random_: random.Random, step: int, start_s: float, record: Json) -> Iterator[Json]:
    """One step on the clock: sync, then generation of the next step beside training of this one."""
    sync_s, train_s = record["time_sync_s"], record["time_train_s"]
    yield _span(1, "step", "controller", start_s, record["time_step_s"], step)
    for pid in (2, 3, 4):
        yield _span(pid, "transfer", "sync", start_s, sync_s, step)
    begin_s = start_s + sync_s
    for pid in (3, 4):
        generate_s = record["time_generate_s"] * (1 - 0.1 * random_.random())
        yield _span(pid, "generate", "generate", begin_s, generate_s, step + 1)
        prefill_s = 0.06 * generate_s
        yield _span(pid, "prefill", "generate", begin_s, prefill_s, step + 1)
        yield _span(pid, "decode", "generate", begin_s + prefill_s, generate_s - prefill_s, step + 1)
    yield _span(2, "train", "train", begin_s, train_s, step)
    for part in range(4):
        yield _span(2, "forward_backward", "train", begin_s + 0.23 * train_s * part, 0.22 * train_s, step)
    yield _span(2, "optimizer", "train", begin_s + 0.93 * train_s, 0.06 * train_s, step)
    yield _span(5, "score", "reward", begin_s + 0.6 * train_s, record["time_reward_s"], step + 1)


def _span(pid: int, name: str, category: str, start_s: float, seconds: float, step: int) -> Json:
    span = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": 0, "args": {"step": step}}
    return span | {"ts": round(1e6 * start_s), "dur": round(1e6 * seconds)}


def _event(trace: Any, event: Json) -> None:
    trace.write(json.dumps(event) + ",\n")
