"""`offbeat report`: makes the page about a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError, RunError
from offbeat.metrics import figures
from offbeat.metrics.writer import RunFolder, is_run_config
from offbeat.nearest import run_hint
from offbeat.report.collect import Report, collect
from offbeat.report.page import write_page

PAGE = "report.html"
FILES = ("metrics.jsonl", "samples.jsonl", "trace.json", "journal.jsonl")
SAMPLES_MB = 10


@dataclass(frozen=True)
class Made:
    """A page that was written."""

    path: Path
    bytes: int
    report: Report


def report(run: Path, *, output: Path | None = None, samples_mb: float = SAMPLES_MB) -> Made:
    """Writes `<run>/report.html`, or `output`. The run may be training meanwhile, and any file of it may be missing.

    `samples_mb` is the room for samples in the page.

    Raises:
        ConfigError: `run` is no folder of a run, or the page cannot be written there.
        RunError: writing failed, for instance because the disk is full.
    """
    if not run.is_dir() or not _has_a_runs_file(run):
        what = "has none of a run's files" if run.is_dir() else "is a file" if run.exists() else "does not exist"
        raise ConfigError(f"{run} is not the folder of a run: it {what}. {run_hint(run)}")
    path = output if output is not None else run / PAGE
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a folder. Give the name of a file, such as {path / PAGE}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}. Make it, or choose another.")
    found = collect(run.resolve(), samples_bytes=int(samples_mb * 1e6))
    try:
        size = write_page(found, path)
    except OSError as error:
        raise RunError(f"the report cannot be written: {error}. Choose another place with --output.") from error
    return Made(path, size, found)


def _has_a_runs_file(folder: Path) -> bool:
    if any((folder / name).is_file() for name in FILES):
        return True
    try:
        return is_run_config(RunFolder(folder).read_config())
    except ConfigError:
        return False


def lines(made: Made) -> list[str]:
    """What is said about it in a terminal."""
    value = made.report.value
    head, samples = value["header"], value["samples"]
    kept, all_samples = samples["samples_kept"], samples["samples"]
    steps = "1 step" if head["steps_done"] == 1 else f"{head['steps_done']:,} steps"
    shown = f"{kept:,} samples" if kept == all_samples else f"{kept:,} of {all_samples:,} samples"
    said = [f"report     {made.path}", f"           {head['status']} · {steps} · {shown} · {figures.size(made.bytes)}"]
    return said + [f"note       {remark}" for remark in value["remarks"]]
