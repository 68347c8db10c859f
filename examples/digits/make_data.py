"""Makes everything else in this folder: a model folder without weights and three small data sets. Deterministic.

    python examples/digits/make_data.py [folder]

The task: `3152=` is answered by its digits in ascending order, `1235`, and the end-of-text token. Prompts have 4 to 7
digits. Three quarters of the demonstrations in `warmup.jsonl` are sorted the wrong way round on purpose: after the
supervised warm-up the model answers rightly now and then, and reinforcement learning has something to select.
Training, held-out and warm-up prompts are disjoint.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

from offbeat.testing.tiny_model import tiny_qwen3

SEED = 20261201
LENGTHS = range(4, 8)
ROWS = {"train": 4096, "heldout": 512, "warmup": 8192}
WRONG_DEMONSTRATIONS = 0.75


def distinct_numbers(count: int, dice: random.Random) -> list[str]:
    """Different strings of digits, each length equally often, in random order. A digit may occur several times."""
    seen: set[str] = set()
    while len(seen) < count:
        length = LENGTHS[len(seen) % len(LENGTHS)]
        seen.add("".join(dice.choice(string.digits) for _ in range(length)))
    numbers = sorted(seen)
    dice.shuffle(numbers)
    return numbers


def rows() -> dict[str, list[dict[str, str]]]:
    """The three data sets, by name."""
    dice = random.Random(SEED)
    numbers = iter(distinct_numbers(sum(ROWS.values()), dice))
    made: dict[str, list[dict[str, str]]] = {}
    for name, count in ROWS.items():
        made[name] = []
        for _ in range(count):
            number = next(numbers)
            wrong = name == "warmup" and dice.random() < WRONG_DEMONSTRATIONS
            made[name].append({"prompt": f"{number}=", "answer": "".join(sorted(number, reverse=wrong))})
    return made


def write(folder: Path) -> None:
    """Write all files of the example into `folder`."""
    tiny_qwen3(folder, hidden=128, init_std=0.06, weights=False)
    for name, data in rows().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
