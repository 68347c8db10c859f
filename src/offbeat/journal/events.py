"""What stands in `journal.jsonl`: the events, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

SampleId: TypeAlias = tuple[str, int, int]
"""(prompt_id, epoch, sample_index)."""
Group: TypeAlias = tuple[str, int, tuple[int, ...]]
"""(prompt_id, epoch, sample indices)."""

NO_SPREAD = "no spread in its group"
NO_TOKENS = "no tokens"
SKIPPED = "its update was skipped"
INTERRUPTED = "done again after a resume"
"""The one reason that is not final: the samples are issued again."""
STOPPED = "the run was stopped"
FAILED = "the run failed"
ENDED = "the run was ended at once"
NOT_FINAL = frozenset({INTERRUPTED, STOPPED, FAILED, ENDED})


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    step: int
    time: float
    """Seconds since 1970."""


class Started(Event, frozen=True):
    max_staleness: int | None = None
    """Of what is issued from here on; None: of a version that did not write it down."""


class Resumed(Event, frozen=True):
    """Continued at `step`; what stands from byte `offset` of the journal up to this line is superseded."""

    offset: int | None
    """None: the checkpoint is of a run without a journal, so all before this line is unknown."""
    max_staleness: int | None = None
    """As in `Started`."""


class Issued(Event, frozen=True):
    samples: tuple[Group, ...]


class Generated(Event, frozen=True):
    versions: dict[int, int]
    """Weights version of the oldest token → samples."""


class Rewarded(Event, frozen=True):
    errors: int
    """Samples for which a reward function failed."""


class Dropped(Event, frozen=True):
    reason: str
    samples: tuple[Group, ...] | None = None
    """None: all of the step that have not ended."""


class Trained(Event, frozen=True):
    """All samples of the step that were not dropped."""

    version: int
    """Of the weights that the step published."""


class Saved(Event, frozen=True):
    """A checkpoint whose next step is `step`."""


AnyEvent: TypeAlias = Started | Resumed | Issued | Generated | Rewarded | Dropped | Trained | Saved
_decoder = msgspec.json.Decoder(AnyEvent)


def read_journal(path: Path) -> Iterator[tuple[int, AnyEvent]]:
    """(byte at which its line starts, event), in order; half a line at the end is left out.

    Raises `ValueError` for a line that cannot be read, with its number.
    """
    with path.open("rb") as file:
        yield from events(file)


def events(file: Iterable[bytes]) -> Iterator[tuple[int, AnyEvent]]:
    """As `read_journal`, of an open file."""
    start = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield start, _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} of the journal: {error}") from error
        start += len(line)
