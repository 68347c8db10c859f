"""One tracker and the thread that serves it: nothing that a tracker does can stop, slow or hang the run.

    controller's thread                       tracker's thread
    recorded(record, rows) ─▶ records (all)   start ─▶ log, samples, log, … ─▶ finish
                              tables (few)       └── an error: told once, tried again with the next record

Records are kept by the run anyway, so none is ever dropped: the thread reads on from where it is, which also fills what
an earlier part of the run could not deliver. Of sample tables only the newest few wait; those left out are counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from offbeat.config.tracker_problems import SECRET
from offbeat.trackers.state import Progress, ProgressFile
from offbeat.trackers.tracker import COLUMNS, Metrics, Outcome, Row, TrackedRun, Tracker
from offbeat.unicode import well_formed

Record: TypeAlias = Mapping[str, Any]

WAITING_TABLES = 8
TEXT_LIMIT = 2000
"""Characters of a prompt or completion in a sample table; samples.jsonl has the whole."""

MESSAGE_LIMIT = 300
"""Characters of a library's message that are told."""

RECORDS = "The run goes on; the tracker is tried again with the next step, and gets then what it missed"
TABLES = "The run goes on, and so does the tracker, without this table of samples; samples.jsonl has them"
END = "It may not know that the run has ended"


class Delivery:
    """`records` is the run's growing list, shared by all trackers; `tell` is called from the tracker's thread."""

    def __init__(
        self,
        key: str,
        tracker: Tracker,
        run: TrackedRun,
        records: Sequence[Record],
        file: ProgressFile,
        tell: Callable[[str], None],
        *,
        samples: int,
    ) -> None:
        self.key = key
        self._tracker = tracker
        self._records = records
        self._file = file
        self._tell = tell
        self._samples = samples
        self._progress = file.read(key)
        name = run.name if self._progress.line == 1 else f"{run.name}-{self._progress.line}"
        self._run = replace(run, name=name, delivered=self._progress.next_step, state=self._progress.state)
        self._started = False
        self._position = 0  # in records: those before it are logged, or were not wanted
        self._tables: dict[int, list[Row]] = {}
        self._left_out = 0
        self._told = set[str]()
        self._outcome: Outcome | None = None
        self._news = True
        self._changed = threading.Condition()
        # A daemon: a library that hangs cannot keep the program from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{key}", daemon=True)
        self._thread.start()

    # --- the controller's side --------------------------------------------------------------------------------------

    def expect(self, step: int, samples: Sequence[Row]) -> None:
        """All samples of a step whose record is about to be added to the list: the thread may read that at once."""
        rows = table(samples, self._samples)
        with self._changed:
            if rows:
                self._tables[step] = rows
            while len(self._tables) > WAITING_TABLES:
                del self._tables[min(self._tables)]
                self._left_out += 1

    def recorded(self) -> None:
        """A record was added to the list. Never waits for the tracker."""
        with self._changed:
            self._news = True
            self._changed.notify()

    def close(self, outcome: Outcome) -> None:
        """Nothing follows. Returns at once; see `ended`."""
        with self._changed:
            self._outcome = outcome
            self._changed.notify()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def last_words(self, waited_s: float) -> list[str]:
        """What is to be said when the run has ended: of what did not arrive, and why."""
        words: list[str] = []
        missing = sum(self._wants(record) for record in self._records[self._position :])
        if not self.ended:
            words.append(f"did not end within {waited_s:g} s and is left alone")
        if missing:
            words.append(f"{missing} of {len(self._records)} records were not delivered")
        if missing or not self.ended:
            words.append(f"'offbeat track {self._run.folder}' sends what is missing")
        if self._left_out:
            words.append(f"{self._left_out} sample tables were left out because it was slow; samples.jsonl has them")
        return [f"tracker {self.key}: {'; '.join(words)}"] if words else []

    # --- the tracker's side -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._outcome is not None)
                self._news = False
                outcome = self._outcome
            self._guarded(RECORDS, self._deliver)
            if outcome is not None:
                if self._started:
                    self._guarded(END, self._tracker.finish, outcome)
                return

    def _guarded(self, follows: str, call: Callable[..., None], *arguments: Any) -> None:
        """An error is told once for each kind of call; `follows` says what it costs."""
        try:
            call(*arguments)
        except BaseException as error:  # a library that calls sys.exit is one that failed, too
            if follows not in self._told:
                self._told.add(follows)
                self._tell(fault(self.key, error, follows))

    def _deliver(self) -> None:
        if not self._started:
            self._start()
        while self._position < len(self._records):
            record = self._records[self._position]
            wanted = self._wants(record)
            if wanted:
                self._tracker.log(record["step"], numbers(record, evaluated=self._progress.evaluated))
                self._advance(self._progress.after(record))
            self._position += 1
            with self._changed:
                rows = self._tables.pop(record["step"], None)
            if wanted and rows:
                self._guarded(TABLES, self._tracker.samples, record["step"], rows)

    def _start(self) -> None:
        opened = self._tracker.start(self._run)
        evaluated = None if opened.replaces else self._progress.evaluated
        opened_at = replace(self._progress, next_step=opened.next_step, evaluated=evaluated)
        self._advance(replace(opened_at, state=opened.state, replaces=opened.replaces))
        self._started = True

    def _wants(self, record: Record) -> bool:
        return self._progress.wants(record)

    def _advance(self, progress: Progress) -> None:
        self._progress = progress
        self._file.write(self.key, progress)


def numbers(record: Record, *, evaluated: int | None) -> Metrics:
    """The numeric keys of a record, but its step; without what the evaluation that is already at `evaluated` had."""
    there = ("eval/", "weights_version", "time_evaluate_s") if record["step"] == evaluated else ()
    return {
        key: value
        for key, value in record.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and key != "step"
        and not key.startswith(there)
    }


def table(samples: Sequence[Row], count: int) -> list[Row]:
    """At most `count` of them, evenly spread, with long texts cut."""
    count = min(count, len(samples))
    chosen = [samples[index * len(samples) // count] for index in range(count)]
    return [{column: _cut(sample[column]) for column in COLUMNS} for sample in chosen]


def _cut(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    whole = well_formed(value)
    return f"{whole[:TEXT_LIMIT]}…" if len(whole) > TEXT_LIMIT else whole


def fault(key: str, error: BaseException, follows: str) -> str:
    """One sentence; values of environment variables that are secrets are not in it."""
    text = " ".join(str(error).split())
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    text = text[:MESSAGE_LIMIT]  # last: a cut secret is not found any more
    return f"tracker {key}: {type(error).__name__}: {text or 'no message'}. {follows}"
