"""Where rows come from: a source as written in the configuration → `Rows` of plain dicts.

    file.jsonl | file.parquet | folder of `datasets.save_to_disk` | hf://owner/name[/config]/split[@revision]
    | reasoning_gym:task

Rows hold plain Python values only (nested arrays become lists, library scalars become Python's). Text is UTF-8
whatever the locale; a lone surrogate, which no tokenizer accepts, becomes U+FFFD. Every problem is a `DataError`
that names the file and line, or the source and row.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.data.plain import plain_value
from offbeat.errors import DataError
from offbeat.install import pip_install

Row = dict[str, Any]
_HF = re.compile(r"^hf://(?P<path>[^@]+?)(@(?P<revision>.+))?$")

_JSONL = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")


@dataclass(frozen=True)
class Rows:
    """The rows of a source, with a way to say where one of them is."""

    source: str
    rows: Sequence[Row]
    lines: Sequence[int] | None = None
    """Line number (from 1) of each row, for JSONL."""

    def where(self, index: int) -> str:
        """E.g. `train.jsonl, line 12 (row 10)`; rows count from 0, as in prompt ids."""
        if self.lines is not None:
            return f"{self.source}, line {self.lines[index]} (row {index})"
        return f"{self.source}, row {index}"


def load_rows(source: str, options: Mapping[str, Any] | None = None) -> Rows:
    """Read a source whole. Raises `DataError`."""
    options = options or {}
    check_source(source, options)
    if source.startswith("reasoning_gym:"):
        from offbeat.data.gym import load_gym

        return Rows(source, load_gym(source.removeprefix("reasoning_gym:"), options))
    if source.startswith("hf://"):
        return Rows(source, _from_hub(source))
    path = Path(source).expanduser()
    if path.is_dir():
        return Rows(source, _from_folder(path))
    return _from_jsonl(path) if path.suffix in _JSONL else Rows(source, _from_parquet(path))


def check_source(source: str, options: Mapping[str, Any]) -> None:
    """What can be found wrong without reading it, and without any library. Raises `DataError`."""
    if source.startswith("reasoning_gym:"):
        return
    if options:
        raise DataError(
            f"options = {dict(options)!r} are for reasoning_gym: sources; {source!r} takes none: remove them."
        )
    if source.startswith("hf://"):
        return
    path = Path(source).expanduser()
    try:
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"source = {source!r}: no such file or folder{_nearest(path)}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"source = {source[:200]!r}: cannot be looked at ({error}); correct the path.") from error
    if stat.S_ISDIR(kind):
        return
    if not stat.S_ISREG(kind):
        raise DataError(f"source = {source!r}: is a pipe or a device; give a file or a folder.")
    if path.suffix not in (*_JSONL, *_PARQUET):
        raise DataError(
            f"source = {source!r}: unknown kind of file {path.suffix!r}; use .jsonl, .parquet, a folder written by "
            "save_to_disk of datasets, hf://owner/name/split or reasoning_gym:task."
        )


def _nearest(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" (there is no folder {parent} either); give a path relative to the configuration file."
    near = difflib.get_close_matches(path.name, [child.name for child in parent.iterdir()], n=1, cutoff=0.6)
    if near:
        return f"; did you mean {parent / near[0]}?"
    return "; give the path of a .jsonl or .parquet file, relative to the configuration file."


def _from_jsonl(path: Path) -> Rows:
    rows: list[Row] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                # utf-8-sig: a byte order mark is allowed, at the start of the file only.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                row = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not UTF-8; "
                    "convert the file, e.g. with 'iconv -f GBK -t UTF-8'."
                ) from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: not valid JSON ({error}); one object a line is needed."
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: holds {type(row).__name__}, not an object {{…}} with columns.")
            try:
                rows.append(plain_value(row))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}; no reward function needs that.") from error
            lines.append(number)
    return Rows(str(path), rows, lines)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the largest number")
    return number


def _from_parquet(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"source = {str(path)!r}: Parquet files need pyarrow; {pip_install('tasks')}.") from error
    try:
        return [plain_value(row) for row in parquet.read_table(path).to_pylist()]
    except Exception as error:  # pyarrow's own, values that Python has no type for, nesting
        raise DataError(f"{path}: cannot be read as Parquet ({error}).") from error


def _from_folder(path: Path) -> list[Row]:
    if (path / "dataset_dict.json").is_file():
        splits = _splits(path / "dataset_dict.json")
        raise DataError(
            f"source = {str(path)!r} holds {len(splits)} splits ({', '.join(splits)}); name one of them as a "
            f"subfolder, e.g. source = {str(path / (splits[0] if splits else 'train'))!r}."
        )
    if not (path / "state.json").is_file():
        files = sorted(child.name for child in path.iterdir() if child.suffix in (".jsonl", ".parquet"))
        hint = f"; did you mean {path / files[0]}?" if files else "; it was not written by save_to_disk of datasets."
        raise DataError(f"source = {str(path)!r} is a folder without state.json{hint}")
    datasets = _datasets(str(path))
    return _quietly(datasets, str(path), lambda: datasets.load_from_disk(str(path)))


def _splits(file: Path) -> list[str]:
    try:
        splits = json.loads(file.read_bytes())["splits"]
        return [str(split) for split in splits]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise DataError(f"{file}: is not what save_to_disk of datasets writes ({error}); write it anew.") from error


def _from_hub(source: str) -> list[Row]:
    match = _HF.match(source)
    parts = match["path"].split("/") if match else []
    if match is None or len(parts) not in (3, 4) or not all(parts):
        raise DataError(
            f"source = {source!r}: write hf://owner/name/split or hf://owner/name/config/split, with @revision if "
            "wanted, e.g. hf://openai/gsm8k/main/train."
        )
    owner, name, *config, split = parts
    datasets = _datasets(source)
    _check_reachable(datasets, source, f"{owner}/{name}", match["revision"])
    return _quietly(
        datasets,
        source,
        lambda: datasets.load_dataset(
            f"{owner}/{name}", config[0] if config else None, split=split, revision=match["revision"]
        ),
    )


def _check_reachable(datasets: Any, source: str, name: str, revision: str | None) -> None:
    """Said within a few seconds, where the library would try again and again; a data set in its cache needs no hub."""
    if (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
        return
    from huggingface_hub import HfApi

    from offbeat.models import HUB_TIMEOUT_S, ask_hub

    answer = ask_hub(lambda: HfApi().dataset_info(name, revision=revision, timeout=HUB_TIMEOUT_S))
    if isinstance(answer, Exception):
        reason = (str(answer) or type(answer).__name__).strip().splitlines()[0]
        raise DataError(
            f"source = {source!r}: {name} is not in the local cache and the hub did not give it ({reason}); check "
            "owner, name and revision, and the network."
        ) from answer


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"source = {source!r} needs the library datasets; {pip_install('tasks')}.") from error
    return datasets


def _quietly(datasets: Any, source: str, load: Callable[[], Any]) -> list[Row]:
    """Run a loader of `datasets` without its progress bars; its many kinds of errors become one."""
    was_on = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        return [plain_value(row) for row in load()]
    except Exception as error:  # of datasets, of what it reads with, and of the hub
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise DataError(
            f"source = {source!r}: the library datasets cannot load it ({type(error).__name__}: {reason}); check "
            "owner, name, config, split and revision, and the network."
        ) from error
    finally:
        if was_on:
            datasets.enable_progress_bars()
