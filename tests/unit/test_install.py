"""What to run when something is missing: from the clone that offbeat lies in, which is how the README installs it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import offbeat
from offbeat.errors import WorkerDied
from offbeat.install import clone_of, pip_install
from offbeat.rpc.process import ProcessSpec
from offbeat.rpc.worker import start_advice

ROOT = Path(__file__).parents[2]


def test_a_clone_is_installed_from_where_it_lies() -> None:
    assert clone_of(Path(offbeat.__file__).resolve().parent) == ROOT
    assert shlex.split(pip_install("train")) == ["pip", "install", "-e", f"{ROOT}[train]"]
    assert shlex.split(pip_install(python="/my env/python")) == [
        "/my env/python",
        "-m",
        "pip",
        "install",
        "-e",
        str(ROOT),
    ]


def test_an_installed_package_is_installed_by_name_and_version(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "offbeat"
    assert pip_install("track", package=package) == f"pip install 'offbeat[track]=={offbeat.__version__}'"


def test_a_process_without_offbeat_says_what_to_run(tmp_path: Path) -> None:
    spec = ProcessSpec("engine-0", "offbeat.rollout.worker", {}, tmp_path / "log", python=sys.executable)
    told = start_advice(WorkerDied("engine-0", "exit code 1"), spec, "ModuleNotFoundError: No module named 'msgspec'")
    assert f"has no module msgspec: run '{sys.executable} -m pip install -e {ROOT}'" in str(told)


def test_no_message_has_a_command_of_its_own() -> None:
    """Each says what `pip_install` says."""
    for path in (ROOT / "src").rglob("*.py"):
        if path.name != "install.py":
            assert not re.search(r"pip install '?offbeat", path.read_text(encoding="utf-8")), path
