"""Follows every sample of a journal to its end, or says where that does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offbeat.journal.events import (
    NOT_FINAL,
    AnyEvent,
    Dropped,
    Generated,
    Group,
    Issued,
    Resumed,
    Rewarded,
    SampleId,
    Saved,
    Started,
    Trained,
)


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
    """0, or the step at which the journal begins: of a run that kept none before, or lost it."""
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
        whole = event.offset is not None and event.offset <= start
        kept = sum(1 for one in starts if event.offset is not None and one < event.offset) if whole else 0
        if event.offset is not None and not whole:
            result.problems.append(
                f"the run was continued at step {event.step} from a checkpoint that had seen {event.offset} bytes of "
                f"the journal, and there were only {start}: what became of earlier samples is not known"
            )
        result.done_again += sum(isinstance(one, Trained) for one in line[kept:])
        del line[kept:], starts[kept:]
        line.append(event)
        starts.append(start)
        if not whole:
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
