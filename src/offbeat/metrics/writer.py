"""The run folder and its files that grow: what is written stays readable, whatever happens while writing.

    runs/sort-20270131-154500/
        config.json       resolved configuration, written once
        origin.json       the folder that relative paths of the configuration count from
        metrics.jsonl     one object a step
        samples.jsonl     one object a sample; samples.older.jsonl before it, when it grew past its limit
        journal.jsonl     what became of every sample; see `offbeat.journal`
        logs/             <process>.log
        checkpoints/

Each line is written by one call and handed to the system before the next begins. A crash can leave half a line, and
lines of steps that a resumed run does again: `JsonLines` removes both when it opens a file to continue. UTF-8 always.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeAlias

from offbeat.durable import replace_file, sync_path
from offbeat.errors import ConfigError, RunError
from offbeat.nearest import run_hint
from offbeat.unicode import well_formed

Json: TypeAlias = dict[str, Any]

CONFIG = "config.json"
ORIGIN = "origin.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
JOURNAL = "journal.jsonl"
TRACE = "trace.json"
OLDER_TRACE = "trace.older.json"
OLDER_SAMPLES = "samples.older.jsonl"
LOOK_S = 0.5
"""Who looks whether a run is training holds its lock for a moment; longer than this is no look."""


class RunFolder:
    """The folder of one run. Make it with `create` for a new run, `open` for one that is continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / METRICS
        self.samples = path / SAMPLES
        self.journal = path / JOURNAL

    @classmethod
    def create(
        cls, name: str, *, run_dir: Path | None = None, base: Path = Path("runs"), now: float | None = None
    ) -> RunFolder:
        """A new folder: `run_dir`, or `<base>/<name>-<local time>`, made unique when two runs start in one second.

        Raises `ConfigError` when `run_dir` has something in it, or cannot be made.
        """
        if run_dir is None:
            path = _unique(base, f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}")
        else:
            path = _given(run_dir)
        folder = cls(path.resolve())
        folder.logs.mkdir(exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run, left as it is. Raises `ConfigError` when it is not one."""
        missing = "is a file" if path.exists() else "does not exist"
        what = "has no config.json" if path.is_dir() else missing
        folder = cls(path.resolve())
        if (path / CONFIG).is_file():
            if is_run_config(folder.read_config()):
                return folder
            what = "has a config.json that is no run's"
        raise ConfigError(f"{path} is not the folder of a run: it {what}. {run_hint(path)}")

    def log(self, process: str) -> Path:
        """Where the output of a process goes."""
        return self.logs / f"{process}.log"

    @contextmanager
    def locked(self) -> Generator[None]:
        """Nobody else may train into this folder meanwhile. Raises `ConfigError`; a dead owner's lock is no lock."""
        with (self.path / ".lock").open("a+") as file:
            try:
                _lock(file)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise ConfigError(
                    f"{self.path} is in use by another offbeat (process {owner}); wait for it to end, or end it."
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            self.logs.mkdir(exist_ok=True)
            yield

    def write_config(self, resolved: Mapping[str, Any]) -> None:
        """Whole or not at all, also when the machine stops in the middle."""
        text = json.dumps(_clean(resolved), ensure_ascii=False, indent=2, allow_nan=False)
        replace_file(self.path / CONFIG, [text.encode() + b"\n"])

    def read_config(self) -> Json:
        """Raises `ConfigError` when it is damaged."""
        path = self.path / CONFIG
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}): it is not what offbeat wrote; put it back, or start a new run."
            ) from error

    def write_origin(self, folder: Path) -> None:
        """`folder`: of the file that the config came from, or the one that Python was in. Absolute."""
        replace_file(self.path / ORIGIN, [json.dumps({"folder": str(folder)}).encode() + b"\n"])

    def read_origin(self) -> Path | None:
        """None: of a run that kept none."""
        path = self.path / ORIGIN
        values = decode_line(path.read_bytes()) if path.is_file() else None
        return Path(str(values["folder"])) if values and "folder" in values else None


def _lock(file: TextIO) -> None:
    """Raises `BlockingIOError` when another holds it for longer than a look takes."""
    end = time.monotonic() + LOOK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)


def is_run_config(values: object) -> bool:
    """Whether the values of a config.json are those of a run; a model's have a `model_type`."""
    return isinstance(values, dict) and "model_type" not in values and {"model", "steps", "data"} <= values.keys()


def _unique(base: Path, name: str) -> Path:
    for attempt in range(1, 1000):
        path = base / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {path}: {error}. Choose one with --run-dir.") from error
        return path
    raise ConfigError(f"{base}/{name}-…: a thousand runs began in this second; choose a folder with --run-dir.")


def _given(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        inside = sorted(child.name for child in path.iterdir())
    except OSError as error:
        raise ConfigError(f"--run-dir {path}: cannot be used as a folder: {error}. Choose another.") from error
    if CONFIG in inside and METRICS in inside:
        raise ConfigError(
            f"--run-dir {path}: holds a run already. Continue it with 'offbeat resume {path}', or choose another."
        )
    if inside:
        more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
        raise ConfigError(
            f"--run-dir {path}: is not empty ({', '.join(inside[:3])}{more}). A run wants a folder of its own; choose "
            "another, or empty this one."
        )
    return path


class JsonLines:
    """Appends objects to a file, one a line, flushed. `next_step` is the first step that will be written.

    Opening an existing file drops half-written lines and all lines of `next_step` and later: a
    resumed run writes those again. With `limit_bytes` a file that has grown past it is moved to `older` (replacing
    what is there) before a new one begins, so that at most twice the limit lies on the disk.
    """

    def __init__(
        self, path: Path, *, next_step: int = 0, limit_bytes: int | None = None, older: Path | None = None
    ) -> None:
        assert (limit_bytes is None) == (older is None), "a limit needs a place for what is older"
        self.path = path
        self._limit_bytes = limit_bytes
        self._older = older
        for file in (path,) if older is None else (older, path):
            _keep_before(file, next_step)
        self._file = path.open("ab", buffering=0)

    def write(self, values: Mapping[str, Any]) -> None:
        """One line. NaN and infinities become null, lone surrogates U+FFFD: any JSON reader can read it."""
        self.write_all([values])

    def write_all(self, objects: Iterable[Mapping[str, Any]]) -> None:
        if self._older is not None and self._limit_bytes is not None and self._file.tell() > self._limit_bytes:
            self.sync()  # from here on nobody syncs what is moved away
            self._file.close()
            os.replace(self.path, self._older)
            self._file = self.path.open("ab", buffering=0)
        for values in objects:
            write_whole(self._file, encode_line(values), self.path)

    def sync(self) -> None:
        """Returns when all that was written is safe on the disk, under its name."""
        os.fsync(self._file.fileno())
        sync_path(self.path.parent)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def metrics_file(folder: RunFolder, *, next_step: int = 0) -> JsonLines:
    """metrics.jsonl, to be continued at `next_step`."""
    return JsonLines(folder.metrics, next_step=next_step)


def samples_file(folder: RunFolder, *, next_step: int = 0, limit_bytes: int = 1 << 30) -> JsonLines:
    """samples.jsonl, to be continued at `next_step`; the newest one to two GiB are kept."""
    return JsonLines(folder.samples, next_step=next_step, limit_bytes=limit_bytes, older=folder.path / OLDER_SAMPLES)


def read_metrics(run: Path | RunFolder) -> list[Json]:
    """The records of a run in order, also while it is being written. Raises `RunError` where the file is not there."""
    path = run.metrics if isinstance(run, RunFolder) else run / METRICS
    if not path.is_file():
        raise RunError(f"{path}: no such file; no step of this run has finished, or the file was taken away.")
    return [values for line in _lines(path) if (values := decode_line(line)) is not None]


def write_whole(file: BinaryIO | RawIOBase, data: bytes, path: Path) -> None:
    """Appends all of it, or nothing when the disk is full: `OSError` names the file then."""
    start = file.seek(0, os.SEEK_END)
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) or 0 :]
        file.flush()
    except OSError as error:
        with suppress(OSError):
            file.truncate(start)
        raise OSError(error.errno, error.strerror, str(path)) from error


def encode_line(values: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON and a line feed; nothing in it splits a line for readers that know more line ends than one."""
    text = json.dumps(_clean(values), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    for end in ("\u2028", "\u2029", "\x85"):
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode() + b"\n"


def _clean(value: Any) -> Any:
    """JSON values only: what JSON cannot hold becomes null (numbers), U+FFFD (half a surrogate pair) or text."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _clean(value.tolist())
    return _clean(str(value))


def _keep_before(path: Path, next_step: int) -> None:
    """Rewrites the file without broken lines and without steps from `next_step` on."""
    if not path.is_file():
        return

    def kept() -> Iterator[bytes]:
        for line in _lines(path):
            values = decode_line(line)
            step = None if values is None else values.get("step")
            if isinstance(step, int) and step < next_step:
                yield line.rstrip(b"\n") + b"\n"  # a whole object whose line feed was lost

    replace_file(path, kept())


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def decode_line(line: bytes) -> Json | None:
    """The object of a line; None for half a line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # half a line, or bytes that are not UTF-8, or not ours
        return None
    return values if isinstance(values, dict) else None
