"""One step off-policy against on-policy, the same work side by side: how much of the shorter side is hidden.

    python benchmarks/overlap.py [--steps 12] [--rounds 2]

One core a side (one engine and one trainer, one thread each), both loops with real processes, rounds interleaved so
that other load on the machine hits both. Two shapes of lengths: equal (a large vocabulary: the end token is hardly ever
sampled) and long-tailed (a small one: lengths are geometric). `epochs` is chosen by a calibration run so that the
sides are within 20 % of each other, where overlap matters most: the best possible ratio is then 0.5 plus the sync.
Prints one line a shape with the ratio of median step times, and says whether it is at most 0.75.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offbeat
from offbeat.metrics.display import SilentDisplay
from offbeat.testing.tiny_model import tiny_qwen3

BOUND = 0.75
SKIP = 2
"""Steps at the start that are not counted: the first has no overlap, and memory is still growing."""
REWARD = "def coin(completion: str, prompt: str) -> float:\n    return float(sum(completion.encode()) % 2)\n"


@dataclass(frozen=True)
class Shape:
    name: str
    vocab: int
    max_new_tokens: int
    prompts: int


SHAPES = (Shape("equal lengths", 400, 32, 4), Shape("long-tailed lengths", 40, 160, 12))


def config(folder: Path, shape: Shape, max_staleness: int, steps: int, epochs: int) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "steps": steps,
        "prompts_per_step": shape.prompts,
        "samples_per_prompt": 8,
        "max_staleness": max_staleness,
        "epochs_per_batch": epochs,
        "sampling": {"max_new_tokens": shape.max_new_tokens},
        "data": [
            {
                "source": str(folder / "rows.jsonl"),
                "format": "text",
                "max_prompt_tokens": 32,
                "rewards": {f"{folder / 'reward.py'}:coin": 1.0},
            }
        ],
        "rollout": {"threads": 1},
        "trainer": {"threads": 1, "dtype": "float32", "lr": 1e-6, "micro_batch_tokens": 4096},
        "weights": {"parity_every": 0},
    }


def prepare(folder: Path, shape: Shape) -> None:
    tiny_qwen3(folder / "model", vocab=shape.vocab, hidden=128, layers=2, max_length=256, init_std=0.01)
    (folder / "reward.py").write_text(REWARD)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(256):
            file.write(json.dumps({"prompt": f"{number:06d}="}) + "\n")


def run(folder: Path, shape: Shape, max_staleness: int, steps: int, epochs: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as run_dir:
        settings = config(folder, shape, max_staleness, steps, epochs)
        result = offbeat.run(settings, run_dir=Path(run_dir) / "run", display=SilentDisplay())
    return [dict(record) for record in result.history][SKIP:]


def median(records: list[dict[str, Any]], key: str) -> float:
    return statistics.median(record[key] for record in records)


def calibrate(folder: Path, shape: Shape) -> int:
    """Passes over each batch that make training take about as long as generation."""
    records = run(folder, shape, 0, SKIP + 3, 1)
    return max(1, round(median(records, "time_generate_s") / median(records, "time_train_s")))


def measure(shape: Shape, steps: int, rounds: int) -> float:
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        folder = Path(name)
        prepare(folder, shape)
        epochs = calibrate(folder, shape)
        records: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        for _ in range(rounds):
            for max_staleness in (0, 1):
                records[max_staleness] += run(folder, shape, max_staleness, SKIP + steps, epochs)
    on_policy, one_step = median(records[0], "time_step_s"), median(records[1], "time_step_s")
    generate, train = median(records[0], "time_generate_s"), median(records[0], "time_train_s")
    ratio = one_step / on_policy
    print(
        f"{shape.name:<20} one-step ÷ on-policy = {ratio:.2f} (bound {BOUND}) · sides train ÷ generate = "
        f"{train / generate:.2f} · overlap {median(records[1], 'overlap'):.2f} · "
        f"mean length {median(records[0], 'response_length_mean'):.0f} · {len(records[1])} steps each",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    ratios = [measure(shape, arguments.steps, arguments.rounds) for shape in SHAPES]
    sys.exit(0 if max(ratios) <= BOUND else 1)


if __name__ == "__main__":
    main()
