"""A folder for the logs of a command that is no run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from offbeat.aftermath import aftermath
from offbeat.errors import ConfigError
from offbeat.metrics.writer import RunFolder


@contextlib.contextmanager
def passing_folder(name: str) -> Generator[RunFolder]:
    """Gone afterwards, unless the command failed: then its logs are there to look into, and the error names them.

    Ctrl-C arrives as `KeyboardInterrupt`.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=f"offbeat-{name}-")))
    folder.logs.mkdir()
    try:
        with aftermath(folder):
            yield folder
    except (asyncio.CancelledError, KeyboardInterrupt):
        shutil.rmtree(folder.path, ignore_errors=True)
        raise KeyboardInterrupt from None
    except ConfigError:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    shutil.rmtree(folder.path, ignore_errors=True)
