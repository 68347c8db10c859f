"""Event files for TensorBoard, in the run folder unless `dir` says otherwise.

A resumed run writes a further file that starts with the step at which it goes on: TensorBoard then shows what earlier
files have of that step and later no more. It does so for numbers, not for texts: sample tables are the first ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.trackers.tracker import Metrics, Opened, Outcome, Row, TrackedRun, flat


class TensorBoard:
    def __init__(self, folder: str | None, options: Mapping[str, Any]) -> None:
        self._folder = folder
        self._options = options
        self._step = 0
        self._delivered = 0

    def start(self, run: TrackedRun) -> Opened:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = Path(self._folder) / run.name if self._folder else run.folder / "tensorboard"
        next_step = self._step = min(run.next_step, run.delivered)
        self._delivered = run.delivered
        self._writer = SummaryWriter(str(folder), purge_step=next_step if run.state else None, **self._options)
        if not run.state:
            values = {key: _plain(value) for key, value in flat(run.config).items()}
            assert self._writer.file_writer is not None
            for summary in hparams(values, {}):
                self._writer.file_writer.add_summary(summary, 0)
            self._writer.add_text("config", verbatim(json.dumps(run.config, indent=2, ensure_ascii=False)), 0)
        self._writer.flush()
        return Opened(next_step, replaces=True, state={"folder": str(folder)})

    def log(self, step: int, metrics: Metrics) -> None:
        self._step = step
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        if step < self._delivered:
            return
        self._writer.add_text("samples", "\n\n---\n\n".join(map(_sample, rows)), step)
        self._writer.flush()

    def finish(self, outcome: Outcome) -> None:
        said = outcome.status if outcome.error is None else f"{outcome.status}: {outcome.error}"
        self._writer.add_text("outcome", verbatim(said), self._step)
        self._writer.close()


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value, ensure_ascii=False)


def _sample(row: Row) -> str:
    told = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    return "\n\n".join(
        [verbatim(json.dumps(told, ensure_ascii=False)), verbatim(row["prompt"]), verbatim(row["completion"])]
    )


def verbatim(text: str) -> str:
    """As a code block of Markdown: nothing in it is a link, a picture or a tag."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
