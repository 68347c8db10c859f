"""Reward functions by name: found and checked without running any of the user's code.

    "rewards.py:correct"   a file and a top-level function in it
    "package.module:fn"    the same in an importable module
    "exact_match" …        a function of `offbeat.rewards.builtin`

`inspect_function` parses the source, so that a wrong name or parameter is reported at once, before a process starts
and before a user's imports run. Where the source does not tell (a decorated or imported name), the check is made when
the worker has loaded the function. `load_function` runs in the worker.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.machinery
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from offbeat.errors import ConfigError
from offbeat.rewards import builtin
from offbeat.rewards.signature import FunctionSignature, signature_of
from offbeat.user_code import module_of_file


def inspect_function(spec: str, path: Sequence[str] | None = None) -> FunctionSignature | None:
    """The function's parameters, or None where they cannot be told without running its module.

    Raises `ConfigError` for a spec that names nothing, and for a signature that cannot work. `path`: where modules are
    searched (default: `sys.path`).
    """
    if spec in builtin.FUNCTIONS:
        return signature_of(builtin.FUNCTIONS[spec])
    where, separator, name = spec.rpartition(":")
    if not separator or not where or not name.isidentifier():
        near = difflib.get_close_matches(spec, list(builtin.FUNCTIONS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"or one of {', '.join(builtin.FUNCTIONS)}."
        raise ConfigError(
            f"rewards: {spec!r} is no reward function; write file.py:function, package.module:function, {hint}"
        )
    file = Path(where) if where.endswith(".py") else _module_file(spec, where, path)
    signature = _signature_in(spec, file, name)
    problem = signature.problem() if signature else None
    if problem:
        raise ConfigError(f"rewards: {spec!r} {problem}.")
    return signature


def file_digests(specs: Iterable[str]) -> dict[str, str]:
    """The sha256 of each file that a `file.py:function` is in, by the path of the file."""
    files = {where for spec in specs if (where := spec.rpartition(":")[0]).endswith(".py")}
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files)}


def check_columns(spec: str, signature: FunctionSignature, columns: Iterable[str], source: str) -> None:
    """Raise `ConfigError` for parameters that the source's columns do not fill."""
    columns = list(columns)
    for parameter in signature.unfilled(columns):
        near = difflib.get_close_matches(parameter, [*columns, "completion", "completions", "prompt", "row"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "rename it, or give it a default."
        also = ' (set answer = "<column>" in the section)' if parameter in ("answer", "answers") else ""
        raise ConfigError(
            f"rewards: {spec!r} has a parameter {parameter!r}, which every row of {source} would need as a column"
            f"{also}; columns are {', '.join(columns) or 'none'}: {hint}"
        )


def _module_file(spec: str, module: str, path: Sequence[str] | None) -> Path:
    """Found without importing the parent packages."""
    search: Any = path
    parts = module.split(".")
    for depth, _ in enumerate(parts):
        found = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if found is None:
            missing = ".".join(parts[: depth + 1])
            raise ConfigError(
                f"rewards: {spec!r}: there is no module {missing!r}; install it, or write the path of a file, "
                f"e.g. {parts[-1]}.py:{spec.rpartition(':')[2]}."
            )
        search = found.submodule_search_locations
        if search is None and depth < len(parts) - 1:
            raise ConfigError(f"rewards: {spec!r}: {'.'.join(parts[: depth + 1])} is a module, not a package.")
    origin = found.origin  # pyright: ignore[reportPossiblyUnboundVariable] -- a module name has at least one part
    if origin is None or not origin.endswith(".py"):
        raise ConfigError(f"rewards: {spec!r}: module {module!r} has no Python source; write the path of a file.")
    return Path(origin)


def _signature_in(spec: str, file: Path, name: str) -> FunctionSignature | None:
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except FileNotFoundError:
        siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, siblings, n=1)
        hint = f"did you mean {file.parent / near[0]}?" if near else "paths are relative to the configuration file."
        raise ConfigError(f"rewards: {spec!r}: no such file {file}; {hint}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"rewards: {spec!r}: {file} cannot be read ({error}).") from error
    except SyntaxError as error:
        raise ConfigError(f"rewards: {spec!r}: {file}, line {error.lineno}: {error.msg}; correct the file.") from error
    bound = _bound_names(tree.body)
    if name not in bound:
        if "*" in bound or "__getattr__" in bound:
            return None
        functions = [known for known, node in bound.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        near = difflib.get_close_matches(name, functions, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(functions) or 'no functions'}."
        raise ConfigError(f"rewards: {spec!r}: {file} has no function {name!r}; {hint}")
    node = bound[name]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    return _signature_of_source(node.args)


def _bound_names(body: Sequence[ast.stmt]) -> dict[str, ast.AST]:
    """Names that a module's top level binds, those under `if` and `try` among them; `*` for a star import."""
    names: dict[str, ast.AST] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = node
            case ast.Import() | ast.ImportFrom():
                names.update({(alias.asname or alias.name).partition(".")[0]: node for alias in node.names})
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for part in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                    names.update(_bound_names(part))
                for handler in getattr(node, "handlers", []):
                    names.update(_bound_names(handler.body))
            case _:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        names[inner.id] = node
    return names


def _signature_of_source(arguments: ast.arguments) -> FunctionSignature:
    ordered = [*arguments.posonlyargs, *arguments.args]
    without_default = ordered[: len(ordered) - len(arguments.defaults)]
    required = [a.arg for a in without_default if a in arguments.args]
    required += [
        a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    return FunctionSignature(
        parameters=tuple(a.arg for a in [*arguments.args, *arguments.kwonlyargs]),
        required=tuple(required),
        open=arguments.kwarg is not None,
        positional_only=tuple(a.arg for a in arguments.posonlyargs if a in without_default),
    )


def load_function(spec: str) -> Callable[..., Any]:
    """Import it. Runs the user's module: in reward workers only. Raises `ConfigError`, or what the module raises."""
    if spec in builtin.FUNCTIONS:
        return builtin.FUNCTIONS[spec]
    where, _, name = spec.rpartition(":")
    module = module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"rewards: {spec!r}: {where} has no function {name!r}.")
    problem = signature_of(function).problem()
    if problem:
        raise ConfigError(f"rewards: {spec!r} {problem}.")
    return function


def function_spec(function: Callable[..., Any]) -> str:
    """The spec of a top-level function, for `rewards = {function_spec(f): 1.0}` in Python programs.

    Raises `ConfigError` for what another process cannot import: lambdas, closures, methods, functions typed into an
    interactive session.
    """
    for name, known in builtin.FUNCTIONS.items():
        if function is known:
            return name
    advice = "move it to the top level of a .py file and give that function, or its name as 'file.py:function'."
    if not isinstance(function, FunctionType):
        raise ConfigError(f"rewards: {function!r} is a {type(function).__name__}, not a plain function; {advice}")
    if function.__name__ == "<lambda>":
        raise ConfigError(f"rewards: a lambda cannot be run in another process; {advice}")
    if function.__qualname__ != function.__name__:
        raise ConfigError(f"rewards: {function.__qualname__} is defined inside something else; {advice}")
    file = function.__code__.co_filename
    if not Path(file).is_file():
        raise ConfigError(f"rewards: {function.__name__} was typed into an interactive session ({file}); {advice}")
    if "." in function.__module__:
        return f"{function.__module__}:{function.__name__}"
    return f"{Path(file).resolve()}:{function.__name__}"


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Spec → the name under which its values are reported: the function's, or with its file or module where two
    functions share it."""
    unique = list(dict.fromkeys(specs))
    for level in (_function_name, _file_and_function, str):
        names: Mapping[str, str] = {spec: level(spec) for spec in unique}
        if len(set(names.values())) == len(unique):
            return dict(names)
    raise AssertionError("specs are unique")


def _function_name(spec: str) -> str:
    return spec.rpartition(":")[2]


def _file_and_function(spec: str) -> str:
    where, _, name = spec.rpartition(":")
    return f"{Path(where).stem if where.endswith('.py') else where}.{name}" if where else name
