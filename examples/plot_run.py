"""Draws a run: reward of the rollouts and held-out accuracy over the weights version that sampled them, and staleness.

    python examples/plot_run.py runs/quickstart-… [picture.png]

Needs matplotlib: the extra `dev`, as in pip install -e '.[dev]' in the clone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REWARD, HELD_OUT, LAG = "#2b7bba", "#d1495b", "#6b7280"


@dataclass(frozen=True)
class Curves:
    """What is drawn, from metrics.jsonl."""

    rewards: list[tuple[int, float]]
    """(version that sampled, mean reward), one a step."""
    evaluations: dict[str, list[tuple[int, float, float]]]
    """`<set> avg@<k>` → (version, mean, standard error)."""
    staleness: list[tuple[int, int]]
    """(step, versions between the weights that sampled and the weights that were updated)."""


def read(path: Path) -> Curves:
    """Read a metrics.jsonl."""
    curves = Curves([], {}, [])
    for line in path.read_text(encoding="utf-8").splitlines():
        record: dict[str, Any] = json.loads(line)
        if record.get("reward_mean") is not None:
            curves.rewards.append((record["weights_version"] - record["staleness_max"], record["reward_mean"]))
            curves.staleness.append((record["step"], record["staleness_max"]))
        for key, value in record.items():
            _, _, rest = key.partition("eval/")
            name, _, measure = rest.partition("/")
            if measure.startswith("avg@") and not measure.endswith("_error"):
                point = (record[f"eval/{name}/weights_version"], value, record[f"{key}_error"] or 0.0)
                curves.evaluations.setdefault(f"{name} {measure}", []).append(point)
    return curves


def draw(curves: Curves, title: str, target: Path) -> None:
    """Write the picture; its type follows from the name of `target`."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("this needs matplotlib: pip install matplotlib (make test installs it, too)") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7.5, 4.6), height_ratios=(4, 1), layout="constrained", dpi=150
    )
    versions = [version for version, _ in curves.rewards]
    top.plot(versions, [reward for _, reward in curves.rewards], color=REWARD, lw=1.6, label="reward of the rollouts")
    for name, points in curves.evaluations.items():
        top.errorbar(
            [version for version, _, _ in points],
            [mean for _, mean, _ in points],
            yerr=[2 * error for _, _, error in points],
            fmt="o",
            ms=5,
            capsize=3,
            color=HELD_OUT,
            label=f"{name} (± 2 standard errors)",
        )
    top.set(xlabel="weights version that sampled", ylabel="mean reward", ylim=(0, 1), title=title)
    top.grid(alpha=0.25)
    top.legend(loc="lower right", frameon=False)
    bottom.step([step for step, _ in curves.staleness], [lag for _, lag in curves.staleness], where="mid", color=LAG)
    bottom.set(xlabel="step", ylabel="staleness", ylim=(-0.1, max([1, *(lag for _, lag in curves.staleness)]) + 0.2))
    bottom.yaxis.get_major_locator().set_params(integer=True)
    bottom.grid(alpha=0.25)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    run = Path(arguments[0])
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        print(f"error: {metrics}: no such file; give the folder of a run.", file=sys.stderr)
        return 2
    target = Path(arguments[1]) if len(arguments) == 2 else run / "plot.png"
    draw(read(metrics), run.resolve().name, target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
