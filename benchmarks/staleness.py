"""Does staleness cost anything? On-policy against one step off-policy, paired seeds, non-inferiority test.

    python benchmarks/staleness.py [--seeds 12] [--jobs 1] [--steps 80] [--items 2048] [--out FOLDER]

The quickstart's task. One supervised warm-up makes the starting weights; from these, each seed trains once with
`max_staleness = 0` and once with 1: the same prompts in the same order, the same random numbers for the same sample.
Every run is evaluated on the same held-out prompts, generated for this and disjoint from all training data.

Per sample: accuracy after the last step, difference within each pair (stale minus on-policy). One step off-policy is
called non-inferior when the one-sided 95 % lower bound of the mean difference (Student's t over the pairs) is above
-MARGIN. Per wall-clock: accuracy at the time at which the faster of the pair ended, read off the curve of evaluations
over the sum of step times; evaluations do not count. Runs of a pair go side by side when --jobs allows, so that other
load hits both; a time ratio is only meaningful when each process has a core of its own.

Writes staleness.json (every number), staleness.md (the table) and staleness.png into --out, and prints the table.
Finished runs are kept in --out and not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

import offbeat
from offbeat.config import read_toml
from offbeat.metrics.display import SilentDisplay
from offbeat.metrics.writer import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "quickstart.toml"
MARGIN = 0.05
LEVELS = (0, 1)
# Student's t, one-sided 95 %, by degrees of freedom.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)


@dataclass(frozen=True)
class Curve:
    """One run: held-out accuracy at some steps, and the training time until then."""

    seed: int
    staleness: int
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    seconds: tuple[float, ...]
    """Sum of `time_step_s` up to the step."""
    rewards: tuple[float, ...]
    """Mean reward of every step."""

    def at(self, seconds: float) -> float:
        """Accuracy at a time, linear between evaluations."""
        for i in range(1, len(self.seconds)):
            if seconds <= self.seconds[i]:
                low, high = self.seconds[i - 1], self.seconds[i]
                share = (seconds - low) / (high - low) if high > low else 1.0
                return self.accuracy[i - 1] + share * (self.accuracy[i] - self.accuracy[i - 1])
        return self.accuracy[-1]


@dataclass(frozen=True)
class Verdict:
    """Stale minus on-policy over pairs."""

    pairs: int
    mean: float
    deviation: float
    lower: float
    """One-sided 95 % bound of the mean difference."""

    @property
    def non_inferior(self) -> bool:
        return self.lower > -MARGIN


def compare(differences: Sequence[float]) -> Verdict:
    """Paired one-sided t test. Needs 2 to 16 pairs."""
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    lower = mean - T_95[len(differences) - 2] * deviation / math.sqrt(len(differences))
    return Verdict(len(differences), mean, deviation, lower)


def write_heldout(path: Path, items: int) -> None:
    """Prompts of the example's kind that occur in none of its files. A fixed seed: the same for every run."""
    known: set[str] = set()
    for name in ("train", "warmup", "heldout"):
        lines = (EXAMPLE.parent / "digits" / f"{name}.jsonl").read_text().splitlines()
        known |= {json.loads(line)["prompt"] for line in lines}
    rng, rows = random.Random(20261201), list[str]()
    while len(rows) < items:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(4, 7)))
        if f"{digits}=" not in known:
            known.add(f"{digits}=")
            rows.append(json.dumps({"prompt": f"{digits}=", "answer": "".join(sorted(digits))}))
    path.write_text("\n".join(rows) + "\n")


def config(**changes: Any) -> dict[str, Any]:
    """The example's values with others in place, on the CPU; None removes one."""
    values = {**read_toml(EXAMPLE), **changes}
    for section in ("rollout", "trainer"):
        values[section] = {**values[section], "device": "cpu"}
    return {key: value for key, value in values.items() if value is not None}


def train(values: dict[str, Any], run: Path) -> Path:
    """A run in this process, unless it was done before. The folder of its last checkpoint's model."""
    model = run / "checkpoints" / f"step-{values['steps']}" / "trainer-0" / "model"
    if not model.is_dir():
        shutil.rmtree(run, ignore_errors=True)
        os.chdir(EXAMPLE.parent)  # where the example's paths start
        offbeat.run(values, run_dir=run, display=SilentDisplay())
    return model


def warm_up(out: Path) -> Path:
    """The weights that every run starts from. One update with a learning rate of 1e-30 leaves them as they are."""
    trainer = {**read_toml(EXAMPLE)["trainer"], "lr": 1e-30}
    return train(config(steps=1, eval=None, trainer=trainer), out / "warmup")


def train_pair_member(out: Path, start: Path, seed: int, staleness: int, steps: int, every: int) -> Curve:
    heldout = {
        "name": "heldout",
        "source": str(out / "heldout.jsonl"),
        "every_steps": every,
        "samples_per_prompt": 1,
    }
    values = config(
        model=str(start), init=None, warmup=None, eval=[heldout], seed=seed, steps=steps, max_staleness=staleness
    )
    run = out / f"seed-{seed}-staleness-{staleness}"
    train(values, run)
    return curve(run, seed, staleness)


def curve(run: Path, seed: int, staleness: int) -> Curve:
    steps, accuracy, seconds, rewards = list[int](), list[float](), list[float](), list[float]()
    elapsed = 0.0
    for record in read_metrics(run):
        if (value := record.get("eval/heldout/avg@1")) is not None:
            steps.append(record["step"])
            accuracy.append(value)
            seconds.append(elapsed)
        elapsed += record.get("time_step_s") or 0.0
        if "reward_mean" in record:
            rewards.append(record["reward_mean"])
    return Curve(seed, staleness, tuple(steps), tuple(accuracy), tuple(seconds), tuple(rewards))


def measure(options: argparse.Namespace) -> list[Curve]:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    write_heldout(out / "heldout.jsonl", options.items)
    pairs = [(seed, staleness) for seed in range(1, options.seeds + 1) for staleness in LEVELS]
    with (
        Progress() as progress,
        ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        task = progress.add_task("runs", total=len(pairs) + 1)
        start = pool.submit(warm_up, out).result()
        progress.advance(task)
        futures = [pool.submit(train_pair_member, out, start, *pair, options.steps, options.every) for pair in pairs]
        for future in as_completed(futures):
            future.result()  # the first failure is told at once
            progress.advance(task)
    return [future.result() for future in futures]


def table(curves: Sequence[Curve], items: int) -> tuple[str, dict[str, Any]]:
    """Markdown, and the numbers in it."""
    on, off = ([c for c in curves if c.staleness == level] for level in LEVELS)
    pairs = list(zip(on, off, strict=True))
    per_sample = compare([b.accuracy[-1] - a.accuracy[-1] for a, b in pairs])
    ends = [min(a.seconds[-1], b.seconds[-1]) for a, b in pairs]
    per_time = compare([b.at(end) - a.at(end) for (a, b), end in zip(pairs, ends, strict=True)])
    ratio = statistics.median(b.seconds[-1] / a.seconds[-1] for a, b in pairs)

    def mean(values: Sequence[float]) -> str:
        return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}"

    rows = [
        f"{len(pairs)} pairs of seeds, {on[0].steps[-1]} steps, {items:,} held-out items; mean ± standard error:",
        "",
        "| | staleness 0 | staleness 1 | difference | lower bound (95 %, one-sided) | |",
        "|---|---|---|---|---|---|",
    ]
    start = [mean([c.accuracy[0] for c in side]) for side in (on, off)]
    rows.append(f"| before the first step | {start[0]} | {start[1]} | | | |")
    shown = (
        ("per sample: after the last step", [c.accuracy[-1] for c in on], [c.accuracy[-1] for c in off], per_sample),
        (
            "per wall-clock: when the faster one ended",
            [a.at(end) for (a, _), end in zip(pairs, ends, strict=True)],
            [b.at(end) for (_, b), end in zip(pairs, ends, strict=True)],
            per_time,
        ),
    )
    for name, left, right, verdict in shown:
        word = "non-inferior" if verdict.non_inferior else "not shown to be non-inferior"
        rows.append(
            f"| {name} | {mean(left)} | {mean(right)} | {verdict.mean:+.3f} | {verdict.lower:+.3f} | {word} "
            f"(margin {MARGIN}) |"
        )
    rows.append(f"| training time, ratio of a pair (median) | 1 | {ratio:.2f} | | | |")
    numbers = {
        "per_sample": vars(per_sample) | {"non_inferior": per_sample.non_inferior},
        "per_wall_clock": vars(per_time) | {"non_inferior": per_time.non_inferior},
        "time_ratio_median": ratio,
        "margin": MARGIN,
        "items": items,
    }
    return "\n".join(rows) + "\n", numbers


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Accuracy over steps and over time, every run thin, the mean of a level thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for level, colour in zip(LEVELS, ("#2b7bba", "#d1495b"), strict=True):
        side = [c for c in curves if c.staleness == level]
        for one in side:
            left.plot(one.steps, one.accuracy, color=colour, alpha=0.2, linewidth=0.8)
            right.plot(one.seconds, one.accuracy, color=colour, alpha=0.2, linewidth=0.8)
        mean = [statistics.fmean(values) for values in zip(*(c.accuracy for c in side), strict=True)]
        times = [statistics.fmean(values) for values in zip(*(c.seconds for c in side), strict=True)]
        left.plot(side[0].steps, mean, color=colour, linewidth=2.2, label=f"staleness {level}")
        right.plot(times, mean, color=colour, linewidth=2.2, label=f"staleness {level}")
    left.set(xlabel="step (weights version)", ylabel="held-out accuracy", ylim=(0, 1))
    right.set(xlabel="training time, s (evaluations left out)")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Does staleness cost anything?")
    parser.add_argument("--seeds", type=int, default=12, help="pairs, 2 to 16")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; each takes two cores")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--items", type=int, default=2048, help="held-out prompts")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    options = parser.parse_args()
    if not 2 <= options.seeds <= len(T_95) + 1:
        parser.error(f"--seeds {options.seeds}: give 2 to {len(T_95) + 1}")
    options.out = options.out.resolve()
    curves = measure(options)
    text, numbers = table(curves, options.items)
    (options.out / "staleness.md").write_text(text)
    (options.out / "staleness.json").write_text(json.dumps(numbers | {"runs": [vars(c) for c in curves]}, indent=1))
    print(text)
    draw(curves, options.out / "staleness.png")


if __name__ == "__main__":
    main()
