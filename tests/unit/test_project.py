"""The project holds what its documents promise: layout, imports, examples, snippets, links, make targets."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import offbeat
from offbeat.config import load_config, parse_config

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "offbeat"
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]

LEVELS: tuple[set[str], ...] = (
    {"__version__"},
    {"errors"},
    {
        "types",
        "devices",
        "durable",
        "faults",
        "network",
        "user_code",
        "install",
        "nearest",
        "layer_progress",
        "unicode",
    },
    {"config", "rpc.messages"},
    {"ports", "rpc", "memory", "models"},
    {"algorithms", "data", "metrics", "room", "weights"},
    {"environments", "report", "rewards", "rollout", "trainer"},
    {"checkpoint", "evaluate", "journal", "staleness", "trackers"},
    {"stages", "saved_models", "export"},
    {"prepare"},
    {"loops", "line", "recording", "interrupt", "aftermath", "supervision"},
    {"build", "host"},
    {"showing"},
    {"training"},
    {"commands"},
    {"cli"},
)
"""From the bottom up. A part imports from lower levels and from itself; parts of one level do not know each other."""
OUTSIDE = {"testing", "__main__"}
"""May import everything; nothing imports them."""
ONLY_IN = {"vllm": "rollout/vllm", "sglang": "rollout/sglang", "ray": "launcher"}
HEAVY = ("torch", "transformers", "datasets", "reasoning_gym", "math_verify", "vllm", "ray", "matplotlib")
LIGHT = (
    "cli",
    "config",
    "errors",
    "ports",
    "staleness",
    "types",
    "data",
    "loops",
    "metrics",
    "report",
    "rewards",
    "rpc",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    names = module.split(".")[1:]
    return "rpc.messages" if names[:2] == ["rpc", "messages"] else names[0] if names else "__version__"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "offbeat":
            yield from (f"offbeat.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def snippets(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; `""` are those without one."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [text for found, text in fenced if found == language]


# --- imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    level = {name: index for index, names in enumerate(LEVELS) for name in names}
    here = part(module_name(path))
    for target in {part(name) for name in imports(path) if name.split(".")[0] == "offbeat"} - {here}:
        if here in OUTSIDE or here == "__version__":  # the package itself shows names of every level
            continue
        assert here in level, f"place {here!r} in LEVELS"
        assert target in level, f"{here} imports {target!r}, which nothing may import or which has no place in LEVELS"
        assert level[target] < level[here], f"{here} (level {level[here]}) imports {target} (level {level[target]})"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_an_inference_engine_is_imported_in_its_own_folder_only_and_pickle_nowhere(path: Path) -> None:
    for package in {name.split(".")[0] for name in imports(path)}:
        assert package not in {"pickle", "cloudpickle", "dill"}
        if package in ONLY_IN:
            assert path.is_relative_to(SOURCE / ONLY_IN[package])


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_error_is_taken_out_of_a_group_by_its_place(path: Path) -> None:
    """`errors.first_cause` knows which one explains the others."""
    assert ".exceptions[" not in path.read_text(encoding="utf-8")


def test_the_core_loads_nothing_heavy() -> None:
    light = [
        module_name(path)
        for path in MODULES
        if part(module_name(path)) in {*LIGHT, "__version__", "rpc.messages"} and path.stem != "__main__"
    ]
    code = f"import sys, {', '.join(light)}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", [path for path in MODULES if "testing" not in path.parts], ids=module_name)
def test_messages_are_plain_text(path: Path) -> None:
    """Terminals, logs and pages show them as they are. Docstrings are for readers of code."""
    if path.name == "card.py":  # a model card is Markdown
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = {n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    strings -= {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) if isinstance(node.value, ast.Constant)
    }
    assert [f"line {node.lineno}" for node in strings if "`" in str(node.value)] == []


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["src", "tests", "examples", "benchmarks", "docs"])
def test_every_ignore_carries_its_reason(folder: str) -> None:
    mark = re.compile(
        r"#\s*(?:pyright:\s*ignore|type:\s*ignore|noqa)(?:\[[^\]]*\]|:\s*[A-Z]+[0-9]+(?:,\s*[A-Z]+[0-9]+)*)?"
    )
    for path in (ROOT / folder).rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = mark.search(line)
            if found and "re.compile" not in line:
                reason = line[found.end() :].strip(" #:-–()")
                assert len(reason.split()) >= 2, f"{path.relative_to(ROOT)}:{number}: say why: {line.strip()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_pictures_are_well_formed() -> None:
    pictures = list((ROOT / "docs" / "images").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_configuration_page_is_what_the_script_makes() -> None:
    made = load_script(ROOT / "docs" / "make_configuration.py").page()
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == made, (
        "run: .venv/bin/python docs/make_configuration.py"
    )


def test_the_changelog_has_the_version() -> None:
    assert f"## [{offbeat.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_extras_are_there_and_the_core_is_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == {"train", "tasks", "track", "docs", "dev"}  # all do something
    core = {re.split(r"[<>=\[]", requirement)[0] for requirement in project["dependencies"]}
    assert core == {"pydantic", "typer", "rich", "msgspec", "pyzmq", "numpy"}


# --- README ---------------------------------------------------------------------------------------------------------


def test_configs_in_the_readme_are_valid() -> None:
    found = snippets(ROOT / "README.md", "toml")
    assert found
    for text in found:
        parse_config(tomllib.loads(text), folder=ROOT)


def test_python_in_the_readme_compiles_and_uses_names_that_exist() -> None:
    found = snippets(ROOT / "README.md", "python")
    assert found
    for text in found:
        compile(text, "README.md", "exec")
        for name in re.findall(r"\boffbeat\.(\w+)", text):
            assert hasattr(offbeat, name) or (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()


def test_commands_in_the_documents_exist() -> None:
    from typer.main import get_command

    from offbeat.cli import app

    commands = set(getattr(get_command(app), "commands", {}))
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    found = 0
    for page in PAGES:
        for block in snippets(page, ""):
            for line in block.splitlines():
                words = re.match(r"(?:\$ )?(?:\.venv/bin/)?(offbeat|make)\s+([a-z0-9]+)", line)
                if words:
                    known = commands if words[1] == "offbeat" else targets
                    assert words[2] in known, f"{page.relative_to(ROOT)}: {line}"
                    found += 1
    assert found > 20, "the pattern finds hardly any"


# --- examples -------------------------------------------------------------------------------------------------------


def test_the_quickstart_config_is_valid_and_its_files_are_there() -> None:
    config = load_config(ROOT / "examples" / "quickstart.toml")
    assert config.warmup is not None
    for path in [config.model, config.warmup.source, config.data[0].source, config.eval[0].source]:
        assert Path(path).exists()
    assert config.max_staleness == 1


def test_the_example_folder_is_what_its_script_makes(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "digits"
    load_script(folder / "make_data.py").write(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in {".json", ".jsonl"}}
    assert made == kept, "run: .venv/bin/python examples/digits/make_data.py"


def test_the_example_sets_are_disjoint_and_right_where_they_should_be() -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (ROOT / "examples" / "digits").glob("*.jsonl")
    }
    prompts = {name: {row["prompt"] for row in data} for name, data in rows.items()}
    assert sum(map(len, prompts.values())) == len(set.union(*prompts.values())) == sum(map(len, rows.values()))
    right = {
        name: sum(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in data) / len(data)
        for name, data in rows.items()
    }
    assert right["train"] == right["heldout"] == 1.0
    assert 0.2 < right["warmup"] < 0.3


def test_the_quickstart_reward_is_exact_match() -> None:
    exact = load_script(ROOT / "examples" / "quickstart_reward.py").exact
    assert exact(completion="1235", answer="1235") == 1.0
    assert exact(completion="1235 ", answer="1235") == exact(completion="", answer="1235") == 0.0


def test_a_run_can_be_drawn(tmp_path: Path) -> None:
    plot = load_script(ROOT / "examples" / "plot_run.py")
    first = {"eval/held/avg@4": 0.25, "eval/held/avg@4_error": None, "eval/held/weights_version": 0}
    records: list[dict[str, Any]] = [
        {"step": 0, "weights_version": 0, "reward_mean": 0.25, "staleness_max": 0, **first},
        {"step": 1, "weights_version": 1, "reward_mean": 0.5, "staleness_max": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    curves = plot.read(tmp_path / "metrics.jsonl")
    assert curves.rewards == [(0, 0.25), (0, 0.5)]
    assert curves.evaluations == {"held avg@4": [(0, 0.25, 0.0)]}
    assert plot.main([str(tmp_path / "nothing")]) == 2
    assert plot.main([str(tmp_path)]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# --- make -----------------------------------------------------------------------------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_make_alone_shows_the_targets() -> None:
    done = make()
    assert done.returncode == 0
    assert all(f"make {target}" in done.stdout for target in ["quickstart", "test", "check", "bench", "help"])


def test_make_names_the_python_that_is_too_old_and_leaves_nothing_behind(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = make(f"PYTHON={old}", f"VENV={tmp_path}/venv", "quickstart")
    assert done.returncode != 0
    assert f"offbeat needs Python 3.11 or newer; {old} is Python 3.9.1" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^make test$", script.read_text(encoding="utf-8"), flags=re.M)
