"""Objects of a file with one a line that may be missing, half-written, damaged or still growing. Never raises for it.

What was there when the file was opened is read; what is appended later is not. A file may be renamed or replaced
meanwhile: the open file stays what it was.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec

from offbeat.unicode import well_formed

Json: TypeAlias = dict[str, Any]
State: TypeAlias = Literal["read", "empty", "missing", "unreadable"]

LINE_LIMIT = 64 << 20
"""Bytes of one line; a longer one is counted as broken and left out."""


@dataclass
class Lines:
    """The lines of one file, with where they lie. `broken` counts lines that the user of the lines could not use."""

    name: str
    file: BinaryIO | None
    state: State
    end: int = 0
    broken: int = 0
    unfinished: bool = False
    """The last line has no line feed: it was being written, or its writer was ended."""

    @classmethod
    def open(cls, path: Path) -> Lines:
        try:
            file = path.open("rb")
            size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return cls(path.name, None, "missing")
        except OSError:
            return cls(path.name, None, "unreadable")
        return cls(path.name, file, "read" if size else "empty", size)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of each line that is not blank, in order."""
        if self.file is None:
            return
        self.broken, self.unfinished = 0, False
        offset = 0
        self.file.seek(0)
        while offset < self.end:
            line = self.file.readline(min(LINE_LIMIT, self.end - offset))
            if not line:  # the file was cut
                return
            start, offset = offset, offset + len(line)
            if line.endswith(b"\n"):
                if line.strip():
                    yield start, line
            elif offset >= self.end:
                self.unfinished = True
                yield start, line
            else:
                self.broken += 1
                offset = self._skip_line(offset)

    def _skip_line(self, offset: int) -> int:
        assert self.file is not None
        while offset < self.end:
            part = self.file.readline(min(LINE_LIMIT, self.end - offset))
            offset += len(part)
            if not part or part.endswith(b"\n"):
                break
        return offset

    def read(self, offset: int, size: int) -> bytes:
        assert self.file is not None
        self.file.seek(offset)
        return self.file.read(size)

    def objects(self) -> Iterator[tuple[int, Json]]:
        """(offset, object) of each line that is a JSON object."""
        for offset, line in self:
            value = decode(line)
            if value is not None:
                yield offset, value
            elif line.endswith(b"\n"):
                self.broken += 1

    def remark(self) -> str | None:
        """What a reader of the page should know about this file, in words; None when all is well."""
        if self.state != "read":
            words = {"missing": "is not there", "empty": "is empty", "unreadable": "cannot be read"}
            return f"{self.name} {words[self.state]}."
        parts: list[str] = []
        if self.broken:
            lines = "1 line" if self.broken == 1 else f"{self.broken:,} lines"
            parts.append(f"{lines} could not be read and {'is' if self.broken == 1 else 'are'} left out")
        if self.unfinished:
            parts.append("its last line was not finished")
        return f"{self.name}: {'; '.join(parts)}." if parts else None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def decode(line: bytes) -> Json | None:
    """The object of a line; None when it is none. What JSON should not have is let in: NaN,
    lone surrogates, bytes that are not UTF-8 (as U+FFFD)."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        try:
            value = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def whole(value: object) -> int | None:
    """A whole number of at most 15 digits, else None: larger ones are not exact in a browser."""
    found = number(value)
    return int(found) if found is not None and abs(found) < 1e15 and found == int(found) else None


def rounded(values: Iterable[float | None], digits: int = 6) -> list[float | int | None]:
    """To so many significant digits, NaN and infinities as None: a page needs no more, and it is smaller so."""
    return [short(value, digits) for value in values]


def short(value: float | None, digits: int = 6) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits}g}")


def text(value: object) -> str:
    """As text that UTF-8 can hold: half a surrogate pair becomes U+FFFD."""
    found = value if isinstance(value, str) else "" if value is None else str(value)
    return well_formed(found)
