"""The files of a run that grow, opened where it is continued: what belongs to another line of steps is left behind.

    later checkpoints aside, newest first ─▶ journal: resumed ─▶ samples cut ─▶ metrics cut

Open it when all that can fail has worked: until then the run is as it was. Cut short at any place, it leaves a run that
`offbeat audit` finds sound and `offbeat resume` continues: the newest checkpoint is always of the line that the files
hold, and no file ends before the journal says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offbeat.checkpoint import Checkpoint, CheckpointStore
from offbeat.journal import Journal, open_journal
from offbeat.metrics.writer import (
    JOURNAL,
    METRICS,
    SAMPLES,
    JsonLines,
    RunFolder,
    metrics_file,
    read_metrics,
    samples_file,
)


@dataclass(frozen=True)
class Line:
    metrics: JsonLines
    samples: JsonLines
    journal: Journal


def lost_before(folder: RunFolder, checkpoint: Checkpoint) -> list[str]:
    """A sentence for each file that does not reach up to the checkpoint: somebody took lines of it away.

    The run can be continued all the same: nothing of it is needed to train.
    """
    lost: list[str] = []
    steps = {record.get("step") for record in read_metrics(folder)} if folder.metrics.is_file() else set[Any]()
    if absent := sorted(set(range(checkpoint.step)) - steps):
        lost.append(f"{METRICS} lacks {len(absent)} of the {checkpoint.step} steps before; curves have a gap there")
    if checkpoint.step and not folder.samples.is_file():
        lost.append(f"{SAMPLES} is missing; the samples before step {checkpoint.step} cannot be shown any more")
    size = folder.journal.stat().st_size if folder.journal.is_file() else 0
    if (seen := checkpoint.state.journal) is not None and size < seen:
        lost.append(
            f"{JOURNAL} has {size:,} bytes where the checkpoint had seen {seen:,}; what became of the samples before "
            f"step {checkpoint.step} cannot be proved any more"
        )
    return lost


@contextmanager
def open_line(
    folder: RunFolder, checkpoint: Checkpoint | None, warn: Callable[[str], None], *, max_staleness: int
) -> Generator[Line]:
    """From the beginning, or from a checkpoint that is loaded. `warn` is told of each checkpoint set aside.

    Raises `OSError`, for one when the disk is full.
    """
    first = 0 if checkpoint is None else checkpoint.step
    resumed_at = None if checkpoint is None else (first, checkpoint.state.journal)
    if checkpoint is not None:
        for path in CheckpointStore(folder.checkpoints).set_aside(checkpoint.step):
            warn(f"a checkpoint that is not continued is now {path.name}; remove it if you like")
    with (
        open_journal(folder.journal, resumed_at=resumed_at, max_staleness=max_staleness) as journal,
        samples_file(folder, next_step=first) as samples,
        metrics_file(folder, next_step=first) as metrics,
    ):
        yield Line(metrics, samples, journal)
