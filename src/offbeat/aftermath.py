"""What a run that failed leaves to its user: `logs/controller.log` with everything, and two lines on how to go on.

The error on the terminal stays short. Tracebacks, those of other processes among them, and warnings of the controller
go into its log, which lies beside the logs of the processes.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from offbeat.checkpoint import CheckpointStore
from offbeat.errors import ConfigError, RemoteError, RunError
from offbeat.metrics.evaluation import evaluated_at
from offbeat.metrics.writer import RunFolder, read_metrics

_log = logging.getLogger("offbeat")


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk: nothing is to be told about the telling."""


@contextlib.contextmanager
def aftermath(folder: RunFolder, *, steps: int | None = None) -> Generator[None]:
    """While a run of so many steps goes on. An error of it is logged and gets the two lines as notes.

    `steps` None: it trains nothing, so there is nothing to continue.

    Raises:
        RunError: in place of an `OSError`, such as a full disk.
    """
    handler = _Log(folder.log("controller"), encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _log.addHandler(handler)
    try:
        yield
    except OSError as error:
        _write_down(error)
        raise _with_notes(RunError(f"the run cannot go on: {error}"), folder, steps) from error
    except ConfigError as error:
        _write_down(error)
        raise
    except Exception as error:
        _write_down(error)
        raise _with_notes(error, folder, steps) from error.__cause__
    finally:
        _log.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk: the run's own error is the one to tell
            handler.close()


def _write_down(error: Exception) -> None:
    _log.error("the run failed", exc_info=error)
    for one in _causes(error):
        if isinstance(one, RemoteError):
            _log.error("in %s:\n%s", one.process, one.traceback_text)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _with_notes(error: Exception, folder: RunFolder, steps: int | None) -> Exception:
    if steps is not None:
        error.add_note(f"saved      {saved(folder, steps)}")
    error.add_note(f"logs       {folder.logs}")
    return error


def saved(folder: RunFolder, steps: int) -> str:
    """`step 12 of 80; continue with: offbeat resume RUN`, or that there is nothing."""
    newest = CheckpointStore(folder.checkpoints).newest_step()
    if newest is None:
        return "nothing yet (checkpoint.every_steps says how often a run is saved)"
    if newest >= steps:
        where = f"all {steps} steps, in {folder.checkpoints / f'step-{newest}'}"
        with contextlib.suppress(ConfigError):  # damaged: the run's own error is the one to tell
            sets = [section.get("name", "eval") for section in folder.read_config().get("eval", ())]
            if newest == steps and unevaluated(folder, steps, sets):
                return f"{where}; the last evaluation is missing: {command('resume', folder.path)}"
        return where
    return f"step {newest} of {steps}; continue with: {command('resume', folder.path)}"


def unevaluated(folder: RunFolder, steps: int, sets: Iterable[str]) -> list[str]:
    """The held-out sets of which metrics.jsonl has no point after the last step."""
    found = evaluated_at(steps, read_metrics(folder)) if folder.metrics.is_file() else frozenset[str]()
    return [name for name in sets if name not in found]


def command(name: str, folder: Path) -> str:
    """A command to copy and paste: `offbeat resume runs/…`, with `offbeat` as it was called here."""
    program = "offbeat"
    if shutil.which(program) is None:
        called = Path(sys.argv[0])
        program = str(called) if called.name == program else f"{sys.executable} -m offbeat.cli"
    short = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f"{program} {name} {shlex.quote(str(short))}"
