"""A file that a command is asked to write: found unwritable before anything is started, not after minutes of work."""

from __future__ import annotations

import tempfile
from pathlib import Path

from offbeat.errors import ConfigError


def check_output(option: str, path: Path) -> None:
    """Leaves nothing behind, and a file that is there as it is. Raises `ConfigError`."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; give the name of a file, such as {path / 'out'}.")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {folder}; make it first.")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}); choose another place.") from error
