"""Every process of a run × every phase × every signal: does the run end or heal as it must, and is the resume exact?

    python benchmarks/kill_matrix.py [--repeat 1] [--jobs 1] [--cells 'trainer-0 .* stop'] [--shard 1/3] [--out FOLDER]

Real runs of the tiny project, each with one signal at one place (`offbeat.testing.kill_cells` has the table, and what
each cell must do). The results are in FOLDER: `results.jsonl`, a line a case as soon as it is over, and from all of
its lines, those of earlier calls among them, `results.json` and `results.md`. A case that has its line is not run
again: call it again with the same FOLDER to go on after it was cut off. Exit 1: a case did not do what it must.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offbeat.testing.kill_cells import OUTCOMES, PHASES, Cell, cells
from offbeat.testing.kill_run import Bench
from offbeat.testing.tiny_project import write_project


def main() -> None:
    arguments = parse()
    wanted = chosen(arguments)
    if arguments.list:
        for cell, _ in wanted:
            print(f"{cell.name:<40} {cell.faults:<58} {cell.outcome}")
        return
    folder: Path = arguments.out or Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    done = {(line["cell"], line["repeat"]) for line in read(results)}
    waiting = [one for one in wanted if (one[0].name, one[1]) not in done]
    print(f"{len(waiting)} of {len(wanted)} cases to do, {arguments.jobs} at a time; results in {folder}")
    # A core for each process, as on a machine with one GPU a process: many small models share the cores here.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shared_memory = set(os.listdir("/dev/shm"))
    run_all(waiting, folder, results, arguments.jobs)
    if left := sorted(set(os.listdir("/dev/shm")) - shared_memory):
        print(f"! /dev/shm has what was not there before: {', '.join(left)}")
    lines = read(results)
    (folder / "results.json").write_text(json.dumps({"machine": machine(), **totals(lines), "cases": lines}, indent=1))
    (folder / "results.md").write_text(markdown(lines))
    print(summary(lines))
    sys.exit(bool(left) or any(line["problems"] for line in lines))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the kill matrix.")
    parser.add_argument("--repeat", type=int, default=1, help="how often each cell is run")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time; each needs a core, better two")
    parser.add_argument("--cells", default="", help="a pattern: only cells with such a name; see --list")
    parser.add_argument("--staleness", type=int, choices=(0, 1), help="max_staleness; default: both")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("--out", type=Path, help="folder for the results; default: a new temporary one")
    parser.add_argument("--list", action="store_true", help="show the cases and run none")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> list[tuple[Cell, int]]:
    """(cell, number of its repetition)."""
    both = (0, 1) if arguments.staleness is None else (arguments.staleness,)
    some = [cell for cell in cells(both) if re.search(arguments.cells, cell.name)]
    first, _, of = arguments.shard.partition("/")
    return [(cell, number) for number in range(arguments.repeat) for cell in some][int(first) - 1 :: int(of)]


def run_all(waiting: Sequence[tuple[Cell, int]], folder: Path, results: Path, jobs: int) -> None:
    started = time.monotonic()
    bench = Bench(write_project(folder / "project"), folder / "runs")
    for staleness in {cell.staleness for cell, _ in waiting}:
        bench.whole(staleness)
    writing = threading.Lock()
    over = 0

    def one(case: tuple[Cell, int]) -> None:
        nonlocal over
        cell, repeat = case
        report = bench.run(cell, repeat)
        with writing, results.open("a", encoding="utf-8") as file:
            over += 1
            file.write(json.dumps({"repeat": repeat, **dataclasses.asdict(cell), **dataclasses.asdict(report)}) + "\n")
            verdict = "ok" if not report.problems else "! " + report.problems[0].splitlines()[0][:140]
            took = f"{report.seconds:5.1f} s" if report.seconds is not None else "       "
            print(f"{time.monotonic() - started:5.0f} s {over:4}/{len(waiting)}  {cell.name:<36} {took}  {verdict}")
            sys.stdout.flush()

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(one, waiting):
            pass


def read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "python": platform.python_version(), "kernel": platform.release()}


def totals(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = sorted(line["seconds"] for line in lines if line["seconds"] is not None)
    return {
        "tried": len(lines),
        "as_they_must": sum(not line["problems"] for line in lines),
        "with_something_left": sum(bool(line["left"]) for line in lines),
        "samples_lost": sum(line["lost"] for line in lines),
        "samples_twice": sum(line["twice"] for line in lines),
        "compared_exactly": sum(line["exact"] is not None for line in lines),
        "exact": sum(line["exact"] is True for line in lines),
        "seconds_median": round(statistics.median(times), 2) if times else None,
        "seconds_max": round(times[-1], 2) if times else None,
    }


def summary(lines: Sequence[dict[str, Any]]) -> str:
    found = totals(lines)
    return (
        f"{found['tried']} cases, {found['as_they_must']} did what they must · samples lost {found['samples_lost']}, "
        f"twice {found['samples_twice']} · equal to the uninterrupted run {found['exact']} of "
        f"{found['compared_exactly']} · from the fault to the end {found['seconds_median']} s (median), "
        f"{found['seconds_max']} s (longest) · left something {found['with_something_left']}"
    )


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    """The totals, a table of (process, signal) × phase, what the words in it mean, and every problem."""
    rows: dict[tuple[str, str, int], dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        key = (line["target"], line["signal"], line["staleness"])
        rows.setdefault(key, {}).setdefault(line["phase"], []).append(line)
    table = [f"| process | signal | max_staleness | {' | '.join(PHASES)} |", "|---|---|---|" + "---|" * len(PHASES)]
    for (target, name, staleness), phases in sorted(rows.items(), key=lambda row: (row[0][2], row[0][0], row[0][1])):
        found = " | ".join(_cell(phases.get(phase, [])) for phase in PHASES)
        table.append(f"| {target} | {name.upper()} | {staleness} | {found} |")
    meanings = [f"- **{outcome}**: {text}" for outcome, text in OUTCOMES.items()]
    problems = [f"- {line['cell']}: {problem}" for line in lines for problem in line["problems"]]
    told = ["", "Problems:", "", *problems] if problems else []
    return "\n".join([summary(lines), "", *table, "", *meanings, *told, ""])


def _cell(found: Sequence[dict[str, Any]]) -> str:
    """`fails 0.4 s`, with the longest time; `2 of 3 wrong` where something was."""
    if not found:
        return ""
    wrong = sum(bool(line["problems"]) for line in found)
    if wrong:
        return f"**{wrong} of {len(found)} wrong**"
    times = [line["seconds"] for line in found if line["seconds"] is not None]
    return found[0]["outcome"] + (f" {max(times):.1f} s" if times else "")


if __name__ == "__main__":
    main()
