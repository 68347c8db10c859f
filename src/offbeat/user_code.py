"""Files of the user, imported by path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FAULTS = (Exception, SystemExit)
"""What may come out of a user's code. `sys.exit` in it is a fault like others: it was not asked to end the command."""


def module_of_file(file: Path) -> ModuleType:
    """As `python file.py` would find things: its own folder comes first for imports. Loaded once a process.

    Raises `FileNotFoundError`, or what the module raises.
    """
    if not file.is_file():
        raise FileNotFoundError(file)
    name = "offbeat_file_" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in str(file.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles in it look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
