"""The command that installs offbeat as it is installed here: from the clone that it lies in, or by name."""

from __future__ import annotations

import shlex
from pathlib import Path

import offbeat


def clone_of(package: Path) -> Path | None:
    """The clone whose `src/offbeat` this is."""
    root = package.parent.parent
    return root if package.parent.name == "src" and (root / "pyproject.toml").is_file() else None


def pip_install(extra: str = "", *, python: str = "", package: Path | None = None) -> str:
    """`pip install -e '/home/me/offbeat[train]'`, `pip install 'offbeat[train]==0.1.0'`: this version in both cases.

    `python`: the interpreter that is to have it. `package`: where offbeat lies.
    """
    clone = clone_of(package or Path(offbeat.__file__).resolve().parent)
    extras = f"[{extra}]" if extra else ""
    what = f"offbeat{extras}=={offbeat.__version__}" if clone is None else f"{clone}{extras}"
    pip = f"{shlex.quote(python)} -m pip install" if python else "pip install"
    return f"{pip} {'' if clone is None else '-e '}{shlex.quote(what)}"
