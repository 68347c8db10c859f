"""Paths of a configuration, made absolute against the folder of its file, and looked at where something is there.

A path names a file or a folder. Pipes and devices are refused by name of the key: a read of one may never end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from offbeat.config.sections import Config, DataSection, EvalSection, TrackerSection
from offbeat.errors import ConfigError

_Resolve: TypeAlias = Callable[[str, str], str]
"""(key, path as written) → absolute path."""


def absolute(config: Config, folder: Path) -> Config:
    """Make paths absolute where they exist next to the file; everything else (hub ids, modules) stays.

    Raises `ConfigError` for each path that cannot be used as one.
    """
    problems: list[str] = []

    def resolve(key: str, text: str) -> str:
        try:
            return resolved(text, folder)
        except ValueError as error:
            problems.append(f"{key} = {text[:200]!r}: {error}.")
            return text

    changed = {
        "model": _model(config.model, folder, resolve),
        "data": tuple(_section(one, f"data.{place}", resolve) for place, one in enumerate(config.data)),
        "eval": tuple(_section(one, f"eval.{place}", resolve) for place, one in enumerate(config.eval)),
        "warmup": config.warmup
        and config.warmup.model_copy(update={"source": _source(config.warmup.source, "warmup.source", resolve)}),
        "rollout": config.rollout.model_copy(update={"python": _program(config.rollout.python, folder, problems)}),
        "sampling": config.sampling.model_copy(
            update={
                "chat_template": config.sampling.chat_template
                and resolve("sampling.chat_template", config.sampling.chat_template)
            }
        ),
        "trackers": tuple(_tracker(one, f"trackers.{place}", resolve) for place, one in enumerate(config.trackers)),
    }
    if problems:
        raise ConfigError(*problems)
    return config.model_copy(update=changed)


def resolved(text: str, folder: Path) -> str:
    """An absolute path without links and `~`. Raises `ValueError` for what cannot be the path of a file or folder."""
    path = None
    try:
        path = (folder / Path(text).expanduser()).resolve()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return str(path)  # what must be there is asked for by its name later
    except RuntimeError as error:  # no such user; a link that leads to itself
        reason = str(error).rstrip(".")
        raise ValueError(f"is no path that can be followed ({reason}); write it without ~ and links") from error
    except OSError as error:
        raise ValueError(f"cannot be looked at ({error.strerror}); correct the path, or its permissions") from error
    except ValueError as error:
        raise ValueError(f"is no path ({error}); correct it") from error
    if not path.is_file() and not path.is_dir():
        raise ValueError("is a pipe or a device; give a file or a folder")
    return str(path)


def _model(text: str, folder: Path, resolve: _Resolve) -> str:
    if text.startswith(("./", "../", "/", "~")):
        return resolve("model", text)
    path = resolve("model", text)
    return path if os.path.exists(path) else text


def _source(text: str, key: str, resolve: _Resolve) -> str:
    return text if text.startswith(("hf://", "reasoning_gym:")) else resolve(key, text)


def _python_name(text: str, key: str, resolve: _Resolve) -> str:
    """`file.py:name` with the file's absolute path; anything else as it is."""
    file, _, name = text.rpartition(":")
    return f"{resolve(key, file)}:{name}" if file.endswith(".py") else text


def _section(section: DataSection | EvalSection, key: str, resolve: _Resolve) -> DataSection | EvalSection:
    rewards = section.rewards and {
        _python_name(name, f"{key}.rewards", resolve): weight for name, weight in section.rewards.items()
    }
    source = _source(section.source, f"{key}.source", resolve)
    return section.model_copy(update={"source": source, "rewards": rewards})


def _tracker(section: TrackerSection, key: str, resolve: _Resolve) -> TrackerSection:
    place = section.dir and resolve(f"{key}.dir", section.dir)
    return section.model_copy(update={"kind": _python_name(section.kind, f"{key}.kind", resolve), "dir": place})


def _program(text: str | None, folder: Path, problems: list[str]) -> str | None:
    """Not resolved: the interpreter of a virtual environment is a link, and its name says which environment."""
    if text is None or "/" not in text:
        return text
    try:
        resolved(text, folder)
        return os.path.abspath(folder / Path(text).expanduser())
    except ValueError as error:
        problems.append(f"rollout.python = {text[:200]!r}: {error}.")
        return text
