"""The journal: what became of every sample that was ever asked for.

    issued ─▶ generated ─▶ rewarded ─▶ trained(step)
       └──────────┴────────────┴─────▶ dropped(reason)

`journal.jsonl` only grows: one event a line, never rewritten. A checkpoint remembers how long the journal was when it
was made. A run continued from that checkpoint says so with a `resumed` line: what stands between the two belongs to
work that is done again, and is superseded. What is left is the run's *surviving line*, and on it every issued sample
ends exactly once. `account` proves it, or says where it does not hold.

A sample is named by (`prompt_id`, `epoch`, `sample_index`), never by its text or its place.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from offbeat.metrics.writer import write_whole
from offbeat.rpc.messages import UpdateResult
from offbeat.types import Batch, GenerateRequest, Rollout, Scored

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


def read_journal(path: Path) -> Iterator[tuple[int, AnyEvent]]:
    """(byte at which its line starts, event), in order; half a line at the end is left out.

    Raises `ValueError` for a line that cannot be read, with its number.
    """
    with path.open("rb") as file:
        yield from _events(file)


def events_of(journal: bytes) -> Iterator[tuple[int, AnyEvent]]:
    """As `read_journal`, of a journal in memory."""
    return _events(io.BytesIO(journal))


def _events(file: Iterable[bytes]) -> Iterator[tuple[int, AnyEvent]]:
    start = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            yield start, _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} of the journal: {error}") from error
        start += len(line)


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


@dataclass
class Account:
    """What became of the samples on the surviving line, and where the journal contradicts itself."""

    issued: int = 0
    """Samples, each counted once however often it was issued again."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Final drops only, by reason."""
    unended: dict[int, set[SampleId]] = field(default_factory=dict[int, "set[SampleId]"])
    """Step → samples that were issued and have not ended, or are to be issued again."""
    trained_at: dict[SampleId, int] = field(default_factory=dict[SampleId, int])
    dropped_at: dict[SampleId, int] = field(default_factory=dict[SampleId, int])
    interrupted: set[int] = field(default_factory=set[int])
    """Steps whose samples are to be issued again."""
    versions: dict[int, dict[int, int]] = field(default_factory=dict[int, "dict[int, int]"])
    """Step → weights version → samples."""
    max_staleness: dict[int, int | None] = field(default_factory=dict[int, "int | None"])
    """Step → what was allowed when its samples were made; None where the journal does not say."""
    allowed: int | None = None
    """`max_staleness` of the part of the run that is followed now."""
    next_step: int = 0
    first_step: int = 0
    """0, or the step at which the journal of an older run begins."""
    resumes: list[int] = field(default_factory=list[int])
    """Steps at which the run was continued."""
    done_again: int = 0
    """Steps that were trained, lost with a process, and trained again."""
    problems: list[str] = field(default_factory=list[str])

    @property
    def lost(self) -> int:
        """Samples of finished steps that never ended."""
        return sum(len(ids) for step, ids in self.unended.items() if step < self.next_step)


def account(events: Iterable[tuple[int, AnyEvent]]) -> Account:
    """Follows every sample of the surviving line to its end. `events` as `read_journal` gives them."""
    result = Account()
    line: list[AnyEvent] = []
    starts: list[int] = []
    for start, event in events:
        if not isinstance(event, Resumed):
            line.append(event)
            starts.append(start)
            continue
        result.resumes.append(event.step)
        kept = 0 if event.offset is None else sum(1 for one in starts if one < event.offset)
        if event.offset is not None and event.offset > start:
            result.problems.append(
                f"the run was continued at step {event.step} from a checkpoint that had seen {event.offset} bytes of "
                f"the journal, and there were only {start}: lines are missing"
            )
        result.done_again += sum(isinstance(one, Trained) for one in line[kept:])
        del line[kept:], starts[kept:]
        line.append(event)
        starts.append(start)
        if event.offset is None:
            result.first_step = event.step
    result.next_step = result.first_step
    for event in line:
        _follow(result, event)
    return result


def _follow(result: Account, event: AnyEvent) -> None:
    match event:
        case Issued():
            _issue(result, event)
        case Dropped():
            _drop(result, event)
        case Trained():
            _train(result, event)
        case Generated():
            result.versions[event.step] = event.versions
            result.max_staleness[event.step] = result.allowed
        case Started() | Resumed():
            result.allowed = event.max_staleness
        case Rewarded() | Saved():
            pass


def _issue(result: Account, event: Issued) -> None:
    listed = [(prompt, epoch, index) for prompt, epoch, indices in event.samples for index in indices]
    ids = set(listed)
    if len(ids) < len(listed):
        result.problems.append(f"step {event.step} was issued with {len(listed) - len(ids)} samples twice")
    ended = sum(one in result.trained_at or one in result.dropped_at for one in ids)
    if ended:
        result.problems.append(f"step {event.step} was issued with {ended} samples that had ended before")
    before = result.unended.get(event.step)
    if before is None:
        result.issued += len(ids)
    elif event.step not in result.interrupted:
        result.problems.append(f"step {event.step} was issued twice")
    else:  # a resume may ask for other samples of a step that has taught nothing yet
        result.issued += len(ids) - len(before)
    result.unended[event.step] = ids
    result.interrupted.discard(event.step)


def _drop(result: Account, event: Dropped) -> None:
    if event.reason in NOT_FINAL:
        result.interrupted.add(event.step)
        return
    open_ids = result.unended.get(event.step, set())
    ids = set(open_ids) if event.samples is None else _ids(event.samples)
    if not ids <= open_ids:
        result.problems.append(f"step {event.step} dropped {len(ids - open_ids)} samples that were not issued for it")
    open_ids -= ids
    result.dropped[event.reason] += len(ids)
    result.dropped_at.update(dict.fromkeys(ids, event.step))


def _train(result: Account, event: Trained) -> None:
    if event.step != result.next_step:
        result.problems.append(f"step {event.step} was trained where step {result.next_step} was due")
    if event.version != event.step + 1:
        result.problems.append(f"step {event.step} published version {event.version} instead of {event.step + 1}")
    if event.step not in result.unended:
        result.problems.append(f"step {event.step} was trained on samples that were not issued")
    ids = result.unended.pop(event.step, set())
    twice = sum(one in result.trained_at for one in ids)
    if twice:
        result.problems.append(f"step {event.step} trained {twice} samples that an earlier step had trained")
    result.trained += len(ids)
    result.trained_at.update(dict.fromkeys(ids, event.step))
    result.next_step = max(result.next_step, event.step + 1)


def _ids(groups: Iterable[Group]) -> set[SampleId]:
    return {(prompt, epoch, index) for prompt, epoch, indices in groups for index in indices}


def staleness_problems(
    versions: Mapping[int, Mapping[int, int]], max_staleness: Mapping[int, int | None], otherwise: int
) -> list[str]:
    """Steps whose samples came from weights older than allowed, or newer than there were.

    `max_staleness`: of each step, as a resume may change it; `otherwise` where it is not known.
    """
    problems: list[str] = []
    for step, found in sorted(versions.items()):
        known = max_staleness.get(step)
        allowed = otherwise if known is None else known
        behind = [step - version for version in found]
        if behind and (min(behind) < 0 or max(behind) > allowed):
            problems.append(
                f"step {step} trained on samples {min(behind)} to {max(behind)} versions behind; max_staleness is "
                f"{allowed}"
            )
    return problems
