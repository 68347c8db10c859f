"""The folder that somebody meant who named one that is not there. The time at the end of a run may be left out.

runs/quickstrat   ─▶   runs/quickstart-20270131-154500
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

LIKE = 0.6
"""Names less alike than this are not suggested."""
NEWEST = 3
_TIME = re.compile(r"-(\d{8}-\d{6}(?:-\d+)?)$")


def nearest_folder(path: Path) -> Path | None:
    """An existing folder whose name is like the first part of `path` that is not there; what follows it likewise."""
    existing = existing_part(path)
    wrong, *rest = path.relative_to(existing).parts or ("",)
    near = nearest_name(wrong, _folders(existing))
    if near is None:
        return None
    found = existing.joinpath(near, *rest)
    return found if found.is_dir() else nearest_folder(found) or existing / near


def nearest_name(wrong: str, names: list[str]) -> str | None:
    """The name most like `wrong`, compared also without the times of runs; of equally like runs the newest."""

    def likeness(name: str) -> tuple[float, float, str]:
        whole = _alike(wrong, name)
        stamp = _TIME.search(name)
        bare = _alike(_TIME.sub("", wrong), _TIME.sub("", name))
        return max(whole, bare), whole if _TIME.search(wrong) else 0.0, stamp[1] if stamp else ""

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= LIKE else None


def newest_runs(folder: Path) -> list[Path]:
    """The newest runs in a folder, newest first."""
    found: list[tuple[float, Path]] = []
    for name in _folders(folder):
        logs = folder / name / "logs"
        try:
            if logs.is_dir() and (folder / name / "config.json").is_file():
                found.append((logs.parent.stat().st_mtime, folder / name))
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)[:NEWEST]]


def run_hint(path: Path) -> str:
    """What to give in place of a run that is not there: `Did you mean runs/sums-…?`, or the newest runs."""
    near = nearest_folder(path)
    if near is not None:
        return f"Did you mean {near}?"
    existing = existing_part(path)
    newest = newest_runs(existing) or newest_runs(existing / "runs")
    if newest:
        return f"The newest runs: {', '.join(map(str, newest))}."
    return "Give a folder such as runs/<name>-<time>."


def existing_part(path: Path) -> Path:
    """The longest beginning of `path` that is a folder."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _alike(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def _folders(folder: Path) -> list[str]:
    try:
        return [child.name for child in folder.iterdir() if child.is_dir()]
    except OSError:
        return []
