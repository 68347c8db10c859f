"""`offbeat audit`: proves from a run's own files that every sample was trained once or dropped for a reason.

It reads journal, metrics, samples and checkpoints, holds them against each other, and changes nothing. What it says is
right also for a run that was killed, and, up to the step at hand, for one that is training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from offbeat.checkpoint import CheckpointStore, open_checkpoint
from offbeat.commands.run_config import run_config
from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.journal import Account, SampleId, account, read_journal, staleness_problems
from offbeat.metrics import figures
from offbeat.metrics.writer import OLDER_SAMPLES, RunFolder, decode_line, read_metrics

SHOWN = 20
"""Problems that are printed; the rest is counted."""


@dataclass
class Audit:
    """What was found. `problems` is empty when all holds."""

    rows: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    problems: list[str] = field(default_factory=list[str])
    account: Account = field(default_factory=Account)


def audit(path: Path, *, console: Console | None = None) -> Audit:
    """Examine a run and print what was found.

    Raises `ConfigError` when `path` is not the folder of a run.
    """
    out = console or Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
    found = examine(RunFolder.open(path))
    for label, text in found.rows:
        out.print(Text(f"{label:<12}", "bold").append(figures.printable(text, out.encoding), "not bold"))
    for problem in found.problems[:SHOWN]:
        out.print(Text("! " + figures.printable(problem, out.encoding), "bold red"))
    if len(found.problems) > SHOWN:
        out.print(Text(f"! and {len(found.problems) - SHOWN} more", "bold red"))
    return found


def examine(folder: RunFolder) -> Audit:
    """All findings about a run. Pure but for reading."""
    config = run_config(folder)
    result = Audit()
    if folder.journal.is_file():
        try:
            result.account = account(read_journal(folder.journal))
        except ValueError as error:
            raise RunError(f"{folder.journal} cannot be read: {error}; it is not what offbeat wrote.") from error
        _journal_rows(result, config)
    else:
        why = "a version of offbeat that kept none made the run, or it was taken away"
        result.rows.append(("journal", f"none: {why if folder.metrics.is_file() else 'the run has not begun'}"))
    _metrics_rows(result, folder)
    _samples_rows(result, folder)
    whole = _checkpoint_rows(result, folder)
    if result.problems:
        result.rows.append(("verdict", f"{len(result.problems)} problems"))
    elif result.account.issued:
        others = (
            "offbeat resume issues the others again" if whole else "no checkpoint is there to issue the others from"
        )
        so_far = f" so far; {others}" if result.account.unended else ""
        result.rows.append(("verdict", f"every sample was trained once, or dropped for a reason{so_far}"))
    elif not folder.journal.is_file() and folder.metrics.is_file():
        result.rows.append(("verdict", "nothing is proved: without a journal nobody knows"))
    else:
        result.rows.append(("verdict", "nothing to prove yet: no sample was issued"))
    return result


def _journal_rows(result: Audit, config: Config) -> None:
    found = result.account
    result.problems += found.problems
    result.problems += staleness_problems(found.versions, found.max_staleness, config.max_staleness)
    if found.lost:
        result.problems.append(f"{found.lost} samples of steps that are done were never trained nor dropped")
    dropped = " · ".join(f"{reason} {count:,}" for reason, count in sorted(found.dropped.items()))
    making = sum(len(ids) for ids in found.unended.values())
    parts = [f"{found.issued:,} samples issued = {found.trained:,} trained + {found.dropped.total():,} dropped"]
    if making:
        parts.append(f"+ {making:,} not ended yet")
    result.rows.append(("journal", " ".join(parts) + (f" ({dropped})" if dropped else "")))
    result.rows.append(("samples", f"lost {found.lost} · trained twice {found.trained - len(found.trained_at)}"))
    span = f"{found.first_step} to {found.next_step - 1}" if found.next_step > found.first_step else "none"
    resumes = f"{len(found.resumes)} (at step {', '.join(map(str, found.resumes))})" if found.resumes else "0"
    result.rows.append(
        ("steps", f"{span} of {config.steps} trained · resumes {resumes} · steps done again {found.done_again}")
    )
    lags = [step - version for step, versions in found.versions.items() for version in versions]
    if lags:
        result.rows.append(("staleness", f"{min(lags)} to {max(lags)}, max_staleness {_allowed(found, config)}"))


def _allowed(found: Account, config: Config) -> str:
    """`1`, or `1, 0` when a resume has changed it."""
    given = [one for _, one in sorted(found.max_staleness.items()) if one is not None]
    return ", ".join(map(str, dict.fromkeys(given or [config.max_staleness])))


def _metrics_rows(result: Audit, folder: RunFolder) -> None:
    told = result.account.next_step
    if not folder.metrics.is_file():
        if told > 1:  # a process can be killed between the two lines of its first step
            result.problems.append(f"metrics.jsonl is missing; the journal ends at step {told - 1}")
        return
    steps = [record["step"] for record in read_metrics(folder) if "reward_mean" in record]
    result.rows.append(("metrics", f"{len(steps):,} steps"))
    if folder.journal.is_file():  # read before, so a run that trains may have written more since
        steps = [step for step in steps if step < told]
    if steps != list(range(len(steps))):
        twice = sorted({step for step in steps if steps.count(step) > 1})
        absent = sorted(set(range(max(steps, default=0))) - set(steps))
        found = [f"{word} {', '.join(map(str, some[:5]))}" for word, some in (("twice", twice), ("no", absent)) if some]
        result.problems.append(f"metrics.jsonl has steps out of order: {'; '.join(found) or 'an earlier one later'}")
    # A process can be killed between the two lines of one step.
    elif folder.journal.is_file() and len(steps) < told - 1:
        result.problems.append(f"metrics.jsonl ends at step {len(steps) - 1}, the journal at step {told - 1}")


def _samples_rows(result: Audit, folder: RunFolder) -> None:
    if not folder.journal.is_file():
        return
    found = result.account
    ends = found.trained_at | found.dropped_at
    seen: set[SampleId] = set()
    recorded, strange, twice = Counter[int](), 0, 0
    for values in _training_samples(folder):
        key = (values["prompt_id"], values["epoch"], values["sample_index"])
        if not found.first_step <= values["step"] < found.next_step:
            continue
        strange += ends.get(key) != values["step"]
        twice += key in seen
        seen.add(key)
        recorded[values["step"]] += 1
    if strange:
        result.problems.append(f"samples.jsonl has {strange} samples that the journal does not have at their step")
    if twice:
        result.problems.append(f"samples.jsonl has {twice} samples twice")
    if not (folder.path / OLDER_SAMPLES).is_file():  # else the oldest are gone, as they should be
        result.problems += _missing_samples(Counter(ends.values()), recorded, last=found.next_step - 1)
    result.rows.append(("recorded", f"{len(seen):,} training samples in samples.jsonl"))


def _missing_samples(ended: Counter[int], recorded: Counter[int], *, last: int) -> list[str]:
    """Of the last step they may be missing: a process can be killed before it has written them."""
    short = [step for step in sorted(ended) if recorded[step] < ended[step] and step != last]
    if not short:
        return []
    count = sum(ended[step] - recorded[step] for step in short)
    return [f"samples.jsonl lacks {count} samples that the journal has, the first of step {short[0]}"]


def _training_samples(folder: RunFolder) -> Iterator[dict[str, Any]]:
    for path in (folder.path / OLDER_SAMPLES, folder.samples):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            for line in file:
                # Half a line, of a process that was killed, may end within a character.
                values = decode_line(line)
                if values is not None and values.get("eval") is None:
                    yield values


def _checkpoint_rows(result: Audit, folder: RunFolder) -> bool:
    """Whether one can be continued from."""
    whole, unusable = False, list[tuple[str, str]]()
    for path in CheckpointStore(folder.checkpoints).folders():
        try:
            checkpoint = open_checkpoint(path)
        except RunError as error:
            if path.exists():  # else it was removed meanwhile, as older ones are
                unusable.append((path.name, f"unusable: {error}"))
            continue
        whole = True
        result.rows.append((path.name, f"whole, version {checkpoint.state.weights_version}"))
        offset = checkpoint.state.journal
        size = folder.journal.stat().st_size if folder.journal.is_file() else 0
        if offset is not None and offset > size:
            result.problems.append(f"{path.name} has seen {offset:,} bytes of journal.jsonl, which has only {size:,}")
    where = "a resume skips it" if whole else "nothing can be resumed"
    result.rows += [(name, f"{text} ({where})") for name, text in unusable]
    if not whole:
        result.rows.append(("checkpoints", "none that is whole"))
    return whole
