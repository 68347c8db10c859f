"""Paths of a configuration, made absolute against the folder of its file."""

from __future__ import annotations

import os
from pathlib import Path

from offbeat.config.sections import Config, TrackerSection


def absolute(config: Config, folder: Path) -> Config:
    """Make paths absolute where they exist next to the file; everything else (hub ids, modules) stays."""

    def path(text: str) -> str:
        candidate = folder / Path(text).expanduser()
        looks_like_path = text.startswith(("./", "../", "/", "~")) or candidate.exists()
        return str(candidate.resolve()) if looks_like_path else text

    def program(text: str) -> str:
        # Not resolved: the interpreter of a virtual environment is a link, and its name says which environment.
        return os.path.abspath(folder / Path(text).expanduser()) if "/" in text else text

    def source(text: str) -> str:
        if text.startswith(("hf://", "reasoning_gym:")):
            return text
        return str((folder / Path(text).expanduser()).resolve())

    def python_name(text: str) -> str:
        """`file.py:name` with the file's absolute path; anything else as it is."""
        file, _, name = text.rpartition(":")
        return f"{(folder / Path(file).expanduser()).resolve()}:{name}" if file.endswith(".py") else text

    def rewards(functions: dict[str, float] | None) -> dict[str, float] | None:
        return functions and {python_name(name): weight for name, weight in functions.items()}

    def tracker(section: TrackerSection) -> TrackerSection:
        place = section.dir and str((folder / Path(section.dir).expanduser()).resolve())
        return section.model_copy(update={"kind": python_name(section.kind), "dir": place})

    data = tuple(d.model_copy(update={"source": source(d.source), "rewards": rewards(d.rewards)}) for d in config.data)
    evals = tuple(e.model_copy(update={"source": source(e.source), "rewards": rewards(e.rewards)}) for e in config.eval)
    warmup = config.warmup and config.warmup.model_copy(update={"source": source(config.warmup.source)})
    template = config.sampling.chat_template
    sampling = config.sampling.model_copy(update={"chat_template": template and str((folder / template).resolve())})
    python = config.rollout.python
    rollout = config.rollout.model_copy(update={"python": python and program(python)})
    changed = {"model": path(config.model), "data": data, "eval": evals, "warmup": warmup, "rollout": rollout}
    trackers = tuple(tracker(section) for section in config.trackers)
    return config.model_copy(update={**changed, "sampling": sampling, "trackers": trackers})
