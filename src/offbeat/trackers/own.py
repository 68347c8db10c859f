"""A tracker of the user's own: `file.py:Class` or `package.module:Class`, made with `options` as keyword arguments."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError
from offbeat.trackers.tracker import Tracker
from offbeat.user_code import FAULTS, module_of_file

METHODS = ("start", "log", "samples", "finish")


def load_class(spec: str) -> type[Tracker]:
    """Runs the user's module. Raises `ConfigError`."""
    place, _, name = spec.rpartition(":")
    where = f"trackers: {spec!r}"
    file = Path(place) if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{where}: no such file; paths are relative to the configuration file.")
    try:
        module = importlib.import_module(place) if file is None else module_of_file(file)
    except FAULTS as error:
        raise ConfigError(
            f"{where}: cannot be imported ({type(error).__name__}: {error}); correct the file."
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [known for known, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, classes, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(classes) or 'no classes'}."
        raise ConfigError(f"{where}: there is no class {name!r}; {hint}")
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(
            f"{where}: has no method {' and no '.join(missing)}; a tracker has {', '.join(METHODS)} (docs/trackers.md)."
        )
    return found


def make(spec: str, options: Mapping[str, Any]) -> Tracker:
    """Raises `ConfigError`, also for an option that the class does not take."""
    made = load_class(spec)
    where = f"trackers: {spec!r}"
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{where}: options do not fit its parameters: {error}; correct 'options'.") from error
    try:
        return made(**options)
    except FAULTS as error:
        raise ConfigError(f"{where}: cannot be made ({type(error).__name__}: {error}); correct 'options'.") from error
