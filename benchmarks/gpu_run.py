"""A run on one GPU that trainer and engine share: step times and the sync of a larger random model over gloo.

    python benchmarks/gpu_run.py [--hidden 1024] [--layers 16] [--steps 6]

Absolute times, of the GPU that the header names. Both sides compute on it, so overlap gains little here: it shows
that the whole system runs on a GPU, what a sync costs, and that both sides agree. Without a GPU it does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import offbeat
from offbeat.metrics.display import SilentDisplay
from offbeat.testing.tiny_model import tiny_qwen3

REWARD = "def coin(completion: str) -> float:\n    return float(sum(completion.encode()) % 2)\n"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here")
        return
    print(f"{torch.cuda.get_device_name(0)} · torch {torch.__version__}")
    for dtype in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
            folder = Path(name)
            tiny_qwen3(
                folder / "model",
                vocab=32768,
                hidden=arguments.hidden,
                layers=arguments.layers,
                max_length=512,
                init_std=0.02,
                weights=False,
            )
            (folder / "reward.py").write_text(REWARD)
            rows = [json.dumps({"prompt": f"{number:06d}="}) for number in range(256)]
            (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
            result = offbeat.run(
                config(folder, dtype, arguments.steps), run_dir=folder / "run", display=SilentDisplay()
            )
        report(dtype, [dict(record) for record in result.history])


def report(dtype: str, history: list[dict[str, float]]) -> None:
    counted = history[2:]

    def median(key: str) -> float:
        return statistics.median(record[key] for record in counted)

    size, sync_s = median("sync_bytes"), median("time_sync_s")
    rate = median("tokens_generated") / median("time_generate_s")
    gap = max(record["logprob_gap_max"] or 0.0 for record in history)
    print(f"{dtype}: step {median('time_step_s'):.2f} s · overlap {median('overlap'):.2f} · gap max {gap:.2g}")
    print(f"  generate {median('time_generate_s'):.2f} s ({rate:,.0f} tokens/s) · train {median('time_train_s'):.2f} s")
    print(f"  sync {sync_s:.2f} s of {size / 1e9:.2f} GB ({size / sync_s / 1e9:.2f} GB/s)", flush=True)


def config(folder: Path, dtype: str, steps: int) -> dict[str, object]:
    return {
        "model": str(folder / "model"),
        "init": "random",
        "steps": steps,
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "sampling": {"max_new_tokens": 256},
        "data": [
            {
                "source": str(folder / "rows.jsonl"),
                "format": "text",
                "max_prompt_tokens": 32,
                "rewards": {f"{folder / 'reward.py'}:coin": 1.0},
            }
        ],
        "rollout": {"device": "cuda:0"},
        "trainer": {"device": "cuda:0", "dtype": dtype, "lr": 1e-6, "micro_batch_tokens": 16384},
        "weights": {"parity_every": 1},
    }


if __name__ == "__main__":
    main()
