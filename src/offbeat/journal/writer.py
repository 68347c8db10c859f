"""Writes the journal of one process's part of a run."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

import msgspec

from offbeat.journal.account import account
from offbeat.journal.events import (
    ENDED,
    FAILED,
    INTERRUPTED,
    NO_SPREAD,
    NO_TOKENS,
    SKIPPED,
    STOPPED,
    AnyEvent,
    Dropped,
    Generated,
    Group,
    Issued,
    Resumed,
    Rewarded,
    Saved,
    Started,
    Trained,
    read_journal,
)
from offbeat.metrics.writer import write_whole
from offbeat.rpc.messages import UpdateResult
from offbeat.types import Batch, GenerateRequest, Rollout, Scored


class Journal:
    """Writes the journal of one process's part of a run. Used from one thread.

    Raises `OSError` from any method when the disk is full.
    """

    def __init__(
        self, file: BinaryIO | RawIOBase, clock: Callable[[], float] = time.time, path: Path = Path("journal.jsonl")
    ) -> None:
        """`file` is positioned at its end, after a whole line; `path` is what errors call it."""
        self._file = file
        self._path = path
        self._clock = clock
        self._open: set[int] = set()

    def started(self, max_staleness: int | None = None) -> None:
        self._write(Started(step=0, time=self._clock(), max_staleness=max_staleness))

    def resumed(self, step: int, offset: int | None, unended: Iterable[int], max_staleness: int | None = None) -> None:
        """`unended`: steps that were issued before `offset` and had not ended there."""
        now = self._clock()
        drops = [Dropped(step=one, time=now, reason=INTERRUPTED) for one in unended]
        self._write(Resumed(step=step, time=now, offset=offset, max_staleness=max_staleness), *drops)

    def issued(self, step: int, requests: Sequence[GenerateRequest]) -> None:
        groups = tuple((r.prompt_id, r.epoch, tuple(range(len(r.seeds)))) for r in requests)
        self._open.add(step)
        self._write(Issued(step=step, time=self._clock(), samples=groups))

    def generated(self, step: int, rollouts: Sequence[Rollout]) -> None:
        versions = Counter(rollout.version_min for rollout in rollouts if rollout.versions)
        self._write(Generated(step=step, time=self._clock(), versions=dict(sorted(versions.items()))))

    def rewarded(self, step: int, scored: Sequence[Scored]) -> None:
        self._write(Rewarded(step=step, time=self._clock(), errors=sum(bool(one.errors) for one in scored)))

    def trained(self, step: int, scored: Sequence[Scored], batch: Batch, update: UpdateResult) -> None:
        now = self._clock()
        drops = [
            Dropped(step=step, time=now, reason=reason, samples=samples)
            for reason, samples in untrained(scored, batch, update.skipped).items()
        ]
        self._open.discard(step)
        self._write(*drops, Trained(step=step, time=now, version=update.weights_version))

    def saved(self, step: int) -> None:
        self._write(Saved(step=step, time=self._clock()))

    def mark(self) -> int:
        """Bytes written so far, all of them safe on the disk: what a checkpoint remembers."""
        self._file.flush()
        with contextlib.suppress(io.UnsupportedOperation):  # in memory
            os.fsync(self._file.fileno())
        return self._file.tell()

    def end(self, reason: str) -> None:
        """Whatever was issued and has not ended is dropped for this reason."""
        now = self._clock()
        self._write(*(Dropped(step=step, time=now, reason=reason) for step in sorted(self._open)))
        self._open.clear()

    def _write(self, *events: AnyEvent) -> None:
        # One call: what belongs together is there together, or not at all, when the process is killed.
        lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        write_whole(self._file, lines, self._path)


@contextlib.contextmanager
def open_journal(
    path: Path,
    *,
    resumed_at: tuple[int, int | None] | None = None,
    max_staleness: int | None = None,
    clock: Callable[[], float] = time.time,
) -> Generator[Journal]:
    """The journal of a new run, or of one that is continued at (step, offset of its checkpoint).

    However the block is left, what has not ended is dropped with the reason for it.
    """
    with path.open("ab", buffering=0) as file:
        whole = _whole_lines(path)
        if whole < file.tell():
            file.truncate(whole)  # a line that a killed process left half written
            file.seek(0, os.SEEK_END)
        journal = Journal(file, clock, path)
        if resumed_at is None:
            journal.started(max_staleness)
        else:
            step, offset = resumed_at
            before = () if offset is None else ((at, event) for at, event in read_journal(path) if at < offset)
            journal.resumed(step, offset, sorted(account(before).unended), max_staleness)
            journal.mark()  # on the disk before any other file is cut, should the power fail
        try:
            yield journal
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk: what ended the run is to be told
                journal.end(FAILED if isinstance(error, Exception) else ENDED)
            raise
        journal.end(STOPPED)


def _whole_lines(path: Path) -> int:
    """Bytes up to the last line feed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        at = size
        while at > 0:
            low = max(0, at - 65536)
            file.seek(low)
            found = file.read(at - low).rfind(b"\n")
            if found >= 0:
                return low + found + 1
            at = low
    return 0


def untrained(scored: Sequence[Scored], batch: Batch, skipped: Sequence[int]) -> dict[str, tuple[Group, ...]]:
    """Reason → samples that the step did not learn from. `skipped`: indices of mini-batches that were not applied.

    A sample of which one pass was applied is trained. Arrays are shared between a rollout and its place in the batch,
    so identity tells which is which.
    """
    applied, planned = set[int](), set[int]()
    for index, minibatch in enumerate(batch.minibatches):
        ids = {id(sample.token_ids) for sample in minibatch.samples}
        planned |= ids
        if index not in skipped:
            applied |= ids
    reasons: dict[str, dict[tuple[str, int], list[int]]] = {}
    for one in scored:
        rollout = one.rollout
        here = id(rollout.token_ids)
        if here in applied:
            continue
        reason = SKIPPED if here in planned else NO_SPREAD if len(rollout.token_ids) else NO_TOKENS
        group = reasons.setdefault(reason, {}).setdefault((rollout.prompt_id, rollout.epoch), [])
        group.append(rollout.sample_index)
    return {
        reason: tuple((prompt, epoch, tuple(indices)) for (prompt, epoch), indices in groups.items())
        for reason, groups in reasons.items()
    }
