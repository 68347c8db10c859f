"""SmolLM2 on short sums: few-shot prompts before training, against chat replies after it. Reward, parity, plot.

    python benchmarks/smollm2.py --out FOLDER [--model FOLDER] [--data FOLDER] [--device cuda:0] [--steps 60]
                                 [--items 1000] [--seeds 0,1,2] [--jobs 3] [--set trainer.lr=2e-5 …]

For each seed: every few-shot prompt of FEW_SHOT on the held-out sums, with the model as it is; then the run of
examples/smollm2_arithmetic.toml, with evaluations before and after it and the parity probe at every sync. The gain of a
seed is avg@8 after training minus avg@8 of its best few-shot prompt. Needs no network.

FOLDER gets a folder and a log for each seed, results.json and plot.png. What is complete is not run again: the same
command goes on after an interruption, and with all seeds complete it only draws the plot (which needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offbeat.metrics.display import SilentDisplay, make_display
from offbeat.metrics.writer import read_metrics

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "smollm2_arithmetic.toml"
REWARDS = ROOT / "examples" / "smollm2_reward.py"
SAMPLES = 8

FEW_SHOT = (
    ("line", 4),
    ("line", 8),
    ("line", 16),
    ("line", 32),
    ("question", 8),
    ("question", 16),
    ("chat", 4),
    ("chat", 8),
    ("chat", 16),
)
"""(form, demonstrations). `line`: `4 - 1 = 3`. `question`: the task's own question and the answer, a line each. `chat`:
the questions and answers as earlier turns of the chat."""


# --- few-shot prompts -----------------------------------------------------------------------------------------------


def few_shot_rows(form: str, shots: list[dict[str, str]], rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The held-out rows with demonstrations in their prompt: text, or chat messages."""
    return [{"prompt": few_shot_prompt(form, shots, row), "answer": row["answer"]} for row in rows]


def few_shot_prompt(form: str, shots: list[dict[str, str]], row: dict[str, str]) -> str | list[dict[str, str]]:
    if form == "chat":
        turns: list[dict[str, str]] = []
        for shot in shots:
            turns.append({"role": "user", "content": shot["question"]})
            turns.append({"role": "assistant", "content": shot["answer"]})
        return [*turns, {"role": "user", "content": row["question"]}]
    asked = (lambda r: r["question"]) if form == "question" else (lambda r: f"{r['expression']} =")
    return "".join(f"{asked(shot)} {shot['answer']}\n" for shot in shots) + asked(row)


def demonstrations(train: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """The first training rows with different expressions."""
    return list({row["expression"]: row for row in train}.values())[:count]


def few_shot_chosen(text: str) -> tuple[tuple[str, int], ...]:
    """`line-4,question-8` as pairs of FEW_SHOT; all of it for nothing. Raises `SystemExit` for others."""
    known = {f"{form}-{count}": (form, count) for form, count in FEW_SHOT}
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--few-shot {','.join(unknown)}: unknown; known are {', '.join(known)}")
    return tuple(known[name] for name in names)


def few_shot_sets(
    data: Path, work: Path, items: int, chosen: Sequence[tuple[str, int]] = FEW_SHOT
) -> list[dict[str, Any]]:
    """An `[[eval]]` section for each prompt, sampled and greedy; writes their rows into `work`."""
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = read_rows(data / "train.jsonl"), read_rows(data / "heldout.jsonl")[:items]
    sections: list[dict[str, Any]] = []
    for form, count in chosen:
        name = f"{form}-{count}"
        rows = few_shot_rows(form, demonstrations(train, count), held_out)
        source = work / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        chat = form == "chat"
        prefix = "" if chat else "line_"
        section = {
            "source": str(source),
            "prompt": "prompt",
            "format": "chat" if chat else "text",
            "max_prompt_tokens": 2048,
            "max_new_tokens": 24 if chat else 6,  # an answer and its line end are five tokens at most
            "rewards": {f"{REWARDS}:{prefix}correct": 1.0, f"{REWARDS}:{prefix}answered": 0.0},
        }
        sections.append({"name": name, "samples_per_prompt": SAMPLES, **section})
        sections.append({"name": f"{name}-greedy", "temperature": 0.0, **section})
    return sections


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- one seed -------------------------------------------------------------------------------------------------------


def overrides(arguments: argparse.Namespace, seed: int) -> list[str]:
    """What the benchmark changes in the example's config."""
    data: Path = arguments.data.resolve()
    return [
        f"model={toml(str(arguments.model.resolve()))}",
        f"seed={seed}",
        f"steps={arguments.steps}",
        f"prompts_per_step={arguments.prompts}",
        f"rollout.device={arguments.device}",
        f"trainer.device={arguments.device}",
        *([] if arguments.device == "cpu" else ON_AN_ACCELERATOR),
        f"checkpoint.every_steps={max(1, arguments.steps // 4)}",
        f"eval.0.every_steps={max(1, arguments.steps // 4)}",
        "weights.parity_every=1",
        "limits.stall_s=600",
        f"data.0.source={toml(str(data / 'train.jsonl'))}",
        *(f"eval.{n}.source={toml(str(data / f'{name}.jsonl'))}" for n, name in enumerate(EVALUATED)),
        *(f"eval.{n}.max_prompts={arguments.items}" for n in range(len(EVALUATED))),
        *arguments.set,
    ]


FOLDERS_AND_PLANS = ("out", "model", "data", "seeds", "jobs", "one")
"""Arguments that results.json leaves out; where the model is from stands under `machine`."""
ON_AN_ACCELERATOR = (
    "rollout.max_rows=512",
    "rollout.threads=2",
    "trainer.threads=2",
    "trainer.micro_batch_tokens=16384",
)
EVALUATED = ("heldout", "heldout", "untrained")
"""Data of the config's own [[eval]] sets."""


def toml(value: Any) -> str:
    """A value in TOML's notation, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(inner) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def run_seed(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Few-shot evaluation, training, evaluation. Goes on from what an interrupted call left."""
    folder: Path = arguments.out / f"seed-{seed}"
    settings = overrides(arguments, seed)
    few_shot = evaluate_few_shot(arguments, settings, folder)
    records = train(arguments, settings, folder / "run")
    evaluations = [record for record in records if "eval/heldout/weights_version" in record]
    before, after = evaluations[0], evaluations[-1]
    names = ("heldout", "heldout-greedy", "capitals-greedy")
    best = max((name for name in few_shot if not name.endswith("-greedy")), key=lambda name: few_shot[name]["avg"])
    points = {
        when: {name: figures(record, name) for name in names} for when, record in (("before", before), ("after", after))
    }
    return {
        "seed": seed,
        "few_shot": few_shot,
        "best_few_shot": best,
        **points,
        "gain": points["after"]["heldout"]["avg"] - few_shot[best]["avg"],
        "curve": [[record["eval/heldout/weights_version"], *average(record, "heldout")] for record in evaluations],
        "reward": [record["reward_mean"] for record in records if "reward_mean" in record],
        "parity": parity(records),
    }


def evaluate_few_shot(arguments: argparse.Namespace, settings: list[str], folder: Path) -> dict[str, Any]:
    """Name of the prompt → its figures, with the model as it is. Kept in few-shot.json."""
    from offbeat.commands.evaluate import evaluate_only

    kept = folder / "few-shot.json"
    if not kept.is_file():
        started = time.monotonic()
        chosen = few_shot_chosen(arguments.few_shot)
        sets = few_shot_sets(arguments.data, folder / "few-shot", arguments.items, chosen)
        results = evaluate_only(CONFIG, [*settings, f"eval={toml(sets)}"], step=None, display=SilentDisplay())
        figured = {result.name: figures(result.to_metrics(), result.name) for result in results}
        kept.write_text(json.dumps(figured) + "\n", encoding="utf-8")
        print(f"few-shot evaluation: {time.monotonic() - started:.0f} s", flush=True)
    return json.loads(kept.read_text(encoding="utf-8"))


def train(arguments: argparse.Namespace, settings: list[str], run: Path) -> list[dict[str, Any]]:
    """The records of the run, which is started, resumed from its newest checkpoint, or there already."""
    import offbeat
    from offbeat.commands.train import resume

    started = time.monotonic()
    if not finished(run, arguments.steps):
        if any(run.glob("checkpoints/step-*")):
            resume(run, [], display=make_display(quiet=True))
        else:
            shutil.rmtree(run, ignore_errors=True)
            offbeat.run(CONFIG, *settings, run_dir=run, quiet=True)
        print(f"training: {time.monotonic() - started:.0f} s", flush=True)
    return [dict(record) for record in read_metrics(run)]


def finished(run: Path, steps: int) -> bool:
    records = read_metrics(run) if (run / "metrics.jsonl").is_file() else []
    return bool(records) and records[-1].get("eval/heldout/weights_version") == steps


def average(record: Mapping[str, Any], name: str) -> tuple[float, float | None]:
    """avg@k of a set, and its standard error."""
    [key] = [key for key in record if key.startswith(f"eval/{name}/avg@") and not key.endswith("_error")]
    return record[key], record[f"{key}_error"]


def figures(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is reported of one evaluation, from its keys in metrics.jsonl."""
    prefix = f"eval/{name}/"
    avg, error = average(record, name)
    share = next((value for key, value in record.items() if key.startswith(prefix) and key.endswith("answered")), None)
    return {
        "avg": avg,
        "error": error,
        "pass": record.get(f"{prefix}pass@{SAMPLES}"),
        "answered": share,
        "correct_if_answered": avg / share if share else None,
        "items": record[f"{prefix}prompts"],
        "truncated": record[f"{prefix}truncated_fraction"],
        "length": record[f"{prefix}response_length_mean"],
    }


def parity(records: list[dict[str, Any]]) -> dict[str, Any]:
    """A gap above the tolerance ends a run, so all syncs of a run that ended in order were within it."""
    syncs = [record for record in records if record.get("time_sync_s") is not None]
    gaps = [record["logprob_gap_max"] for record in syncs if record.get("logprob_gap_max") is not None]
    return {"syncs": len(syncs), "compared": len(gaps), "gap_max": max(gaps, default=None)}


# --- all seeds ------------------------------------------------------------------------------------------------------


def run_all(arguments: argparse.Namespace, seeds: list[int]) -> int:
    """A process for each seed that has no result yet. Returns how many failed."""

    def one(seed: int) -> int:
        log = arguments.out / f"seed-{seed}.log"
        words = [sys.executable, __file__, *sys.argv[1:], "--one", str(seed)]
        with log.open("a", encoding="utf-8") as lines:
            code = subprocess.run(words, stdout=lines, stderr=subprocess.STDOUT, check=False).returncode
        print(f"seed {seed}: {'done' if code == 0 else f'FAILED with exit code {code}, see {log}'}", flush=True)
        return code

    missing = [seed for seed in seeds if not result_of(arguments.out, seed).is_file()]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        return sum(code != 0 for code in pool.map(one, missing))


def result_of(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}.json"


def collect(arguments: argparse.Namespace, seeds: list[int]) -> dict[str, Any]:
    """results.json: the seeds' results, with means over the seeds."""
    runs: list[dict[str, Any]] = [
        json.loads(result_of(arguments.out, seed).read_text(encoding="utf-8")) for seed in seeds
    ]
    summary = {
        "gain": spread([run["gain"] for run in runs]),
        "best_few_shot": spread([run["few_shot"][run["best_few_shot"]]["avg"] for run in runs]),
        "few_shot": {form: spread([run["few_shot"][form]["avg"] for run in runs]) for form in runs[0]["few_shot"]},
        **{
            when: {name: spread([run[when][name]["avg"] for run in runs]) for name in runs[0][when]}
            for when in ("before", "after")
        },
        "parity_ok": all(run["parity"]["compared"] == run["parity"]["syncs"] for run in runs),
    }
    results = {"machine": runs[0]["machine"], "settings": runs[0]["settings"], "summary": summary, "runs": runs}
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def machine(arguments: argparse.Namespace) -> dict[str, str]:
    import torch
    import transformers

    device = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else platform.machine()
    marker = arguments.model / "origin.json"
    origin = json.loads(marker.read_text(encoding="utf-8"))["origin"] if marker.is_file() else arguments.model.name
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "model": origin,
    }


# --- words and picture ----------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """Markdown, one line a row: means over seeds."""
    runs: list[dict[str, Any]] = results["runs"]
    best = [run["few_shot"][run["best_few_shot"]] for run in runs]
    best_greedy = [run["few_shot"][run["best_few_shot"] + "-greedy"] for run in runs]
    columns = {
        "few-shot, before": (best, best_greedy),
        "chat, before": ([run["before"]["heldout"] for run in runs], [run["before"]["heldout-greedy"] for run in runs]),
        "chat, after": ([run["after"]["heldout"] for run in runs], [run["after"]["heldout-greedy"] for run in runs]),
    }

    def mean(rows: list[dict[str, Any]], key: str) -> str:
        values = [row[key] for row in rows if row[key] is not None]
        return f"{statistics.fmean(values):.3f}" if values else "–"

    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, key, which in (
        ("answered", "answered", 0),
        ("right, of the answered", "correct_if_answered", 0),
        ("greedy", "avg", 1),
        ("avg@8", "avg", 0),
        ("pass@8", "pass", 0),
    ):
        lines.append(f"| {label} | " + " | ".join(mean(pair[which], key) for pair in columns.values()) + " |")
    capitals = [mean([run[when]["capitals-greedy"] for run in runs], "avg") for when in ("before", "after")]
    lines.append(f"| capitals (not trained), greedy | – | {capitals[0]} | {capitals[1]} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """What the terminal shows."""
    lines = [table(results), ""]
    for run in results["runs"]:
        few, after, probe = run["few_shot"][run["best_few_shot"]], run["after"]["heldout"], run["parity"]
        error = ((few["error"] or 0) ** 2 + (after["error"] or 0) ** 2) ** 0.5
        gap = "–" if probe["gap_max"] is None else f"{probe['gap_max']:.2g}"
        lines.append(
            f"seed {run['seed']}: best few-shot {run['best_few_shot']} {few['avg']:.3f} → {after['avg']:.3f}, "
            f"gain {run['gain']:+.3f} ± {error:.3f} · parity at {probe['compared']} of {probe['syncs']} syncs, "
            f"largest gap {gap}"
        )
    for form, value in results["summary"]["few_shot"].items():
        lines.append(f"few-shot {form:20} {value['mean']:.3f}")
    return "\n".join(lines)


def draw(results: dict[str, Any], target: Path) -> None:
    """Reward over steps and the held-out score over versions, with the best few-shot prompt as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("#2b7bba", "#d1495b", "#3a9d5d", "#8c6bb1", "#b8860b")
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained", dpi=150)
    for run, colour in zip(results["runs"], colours * 9, strict=False):
        reward, width = run["reward"], max(1, len(run["reward"]) // 20)
        smooth = [statistics.fmean(reward[max(0, i - width + 1) : i + 1]) for i in range(len(reward))]
        axes.plot(range(len(smooth)), smooth, color=colour, lw=1.2, alpha=0.7, label=f"rollouts, seed {run['seed']}")
        versions, means, errors = zip(*run["curve"], strict=True)
        axes.errorbar(versions, means, yerr=[2 * (e or 0) for e in errors], color=colour, fmt="o", ms=5, capsize=3)
        best = run["few_shot"][run["best_few_shot"]]["avg"]
        axes.axhline(best, color=colour, lw=1, ls="--", label=f"best few-shot, seed {run['seed']}")
    axes.set(xlabel="weights version", ylabel="share of right answers", ylim=(0, 1))
    axes.set_title("SmolLM2-135M-Instruct on short sums (points: held-out avg@8 ± 2 standard errors)", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where everything goes; without it nothing is run")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step, with 8 samples each")
    parser.add_argument("--items", type=int, default=1000, help="held-out sums")
    parser.add_argument("--few-shot", default="", metavar="FORM-COUNT,…", help="only these few-shot prompts")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at the same time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config key")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.out is None:
        print("takes long: give --out FOLDER to run it, and see --help")
        return 0
    if not (arguments.model / "config.json").is_file():
        print(f"error: {arguments.model}: no model there; run python examples/smollm2_model.py", file=sys.stderr)
        return 2
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one is not None:
        settings = {key: str(value) for key, value in vars(arguments).items() if key not in FOLDERS_AND_PLANS}
        result = {**run_seed(arguments, arguments.one), "machine": machine(arguments), "settings": settings}
        result_of(arguments.out, arguments.one).write_text(json.dumps(result) + "\n", encoding="utf-8")
        return 0
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if run_all(arguments, seeds):
        return 1
    results = collect(arguments, seeds)
    print(report(results))
    try:
        draw(results, arguments.out / "plot.png")
    except ImportError:
        print("no plot: matplotlib is not here. The same command draws it where it is.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
