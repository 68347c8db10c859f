"""From `[[trackers]]` of a config to trackers that run beside the run, and their end."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from offbeat.config import Config, TrackerSection
from offbeat.errors import ConfigError
from offbeat.install import pip_install
from offbeat.trackers.delivery import Delivery
from offbeat.trackers.state import TRACKERS, ProgressFile, is_training
from offbeat.trackers.tracker import Outcome, TrackedRun, Tracker

FINISH_S = 30.0
"""Trackers have so long after the last step to send what is left and to end."""
CANCELLED_S = 5.0
"""The same after a second Ctrl-C."""
PROJECT = "offbeat"


def make_tracker(section: TrackerSection) -> Tracker:
    """Imports offbeat's side of it only; the library is imported in the tracker's thread. Raises `ConfigError`."""
    match section.library:
        case "tensorboard":
            from offbeat.trackers.tensorboard import TensorBoard

            return TensorBoard(section.dir, section.options)
        case "wandb":
            from offbeat.trackers.wandb import WeightsAndBiases

            return WeightsAndBiases(mode=section.mode, url=section.url, folder=section.dir, options=section.options)
        case "trackio":
            from offbeat.trackers.trackio import Trackio

            return Trackio(url=section.url, options=section.options)
        case "mlflow":
            from offbeat.trackers.mlflow import MLflow

            return MLflow(url=section.url, options=section.options)
        case None:
            from offbeat.trackers.own import make

            return make(section.kind, section.options)


def require_trackers(config: Config, *, only: Collection[str] | None = None) -> None:
    """Every tracker (`only`: of these kinds) can be made, and its library is installed.

    Raises `ConfigError` with all problems.
    """
    problems: list[str] = []
    for section in _served(config, only):
        try:
            make_tracker(section)
        except ConfigError as error:
            problems.extend(error.problems)
        if section.library is not None and importlib.util.find_spec(section.library) is None:
            problems.append(
                f"trackers: {section.kind} is not installed; run {pip_install('track')} (all four libraries), "
                f"or pip install {section.kind}."
            )
    if problems:
        raise ConfigError(*problems)


def _served(config: Config, only: Collection[str] | None) -> list[TrackerSection]:
    return [section for section in config.trackers if only is None or section.kind in only]


class Trackers:
    """All trackers of a run, told by the controller's thread. No call waits for a tracker or raises for one."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        next_step: int,
        history: Iterable[Mapping[str, Any]] = (),
        another_line: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        """`history`: the objects of metrics.jsonl before `next_step`; what a tracker has not had yet is sent.

        `another_line`: the run goes back to `next_step`, and checkpoints after it are given up. A tracker that cannot
        replace what it has of them shows the new line as another run, with all steps before `next_step`. `only`: the
        kinds of those trackers that are served; None: all.
        """
        self._records = list(history)
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._steps = config.steps
        self._deliveries: list[Delivery] = []
        sections = _served(config, only)
        self._file = file = ProgressFile(folder)
        if sections and file.problem is not None:
            self._words.put(file.problem)
        for section in sections:
            run = TrackedRun(
                name=section.name or folder.name,
                project=section.project or PROJECT,
                tags=section.tags,
                folder=folder,
                config=config.model_dump(mode="json"),
                next_step=next_step,
                delivered=0,
                state={},
            )
            tracker = make_tracker(section)
            line = None
            if another_line:
                with self._told_of_files():
                    line = file.begin_another_line(section.kind, next_step)
            if line is not None:
                self._words.put(
                    f"tracker {section.kind}: it keeps the steps that are given up; what is trained from step "
                    f"{next_step} on is another run there, {run.name}-{line}"
                )
            self._deliveries.append(
                Delivery(section.kind, tracker, run, self._records, file, self._words.put, samples=section.samples)
            )

    @contextmanager
    def _told_of_files(self) -> Generator[None]:
        """A file that cannot be written stops no run either."""
        try:
            yield
        except OSError as error:
            self._words.put(f"{TRACKERS} cannot be written: {error}")

    def begun(self) -> None:
        """A part of the run goes on: how an earlier part ended does not count any more."""
        if self._deliveries and self._file.outcome is not None:
            with self._told_of_files():
                self._file.ended(None)

    def recorded(self, record: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """An object of metrics.jsonl, and the objects of samples.jsonl of its step."""
        for delivery in self._deliveries:
            delivery.expect(record["step"], samples)
        self._records.append(record)
        for delivery in self._deliveries:
            delivery.recorded()

    def words(self) -> list[str]:
        """What there is to warn of since the last call."""
        found: list[str] = []
        while not self._words.empty():
            found.append(self._words.get())
        return found

    @property
    def status(self) -> Outcome:
        """As it looks when nothing failed."""
        trained = [record["step"] for record in self._records[-2:] if is_training(record)]
        return Outcome("done" if trained and trained[-1] + 1 >= self._steps else "interrupted")

    async def finish(self, outcome: Outcome, within_s: float) -> list[str]:
        """Ends them all; what is not done by then is left alone. Returns what there is to warn of.

        The outcome is kept in trackers.json, for one that gets the rest later.
        """
        if self._deliveries and outcome != self._file.outcome:
            with self._told_of_files():
                self._file.ended(outcome)
        for delivery in self._deliveries:
            delivery.close(outcome)
        deadline = time.monotonic() + within_s
        while not all(d.ended for d in self._deliveries) and time.monotonic() < deadline:  # noqa: ASYNC110 – threads end
            await asyncio.sleep(0.02)
        return [*self.words(), *(word for delivery in self._deliveries for word in delivery.last_words(within_s))]


@asynccontextmanager
async def tracking(
    config: Config,
    folder: Path,
    *,
    next_step: int,
    history: Iterable[Mapping[str, Any]],
    warn: Callable[[str], None],
    finish_s: float = FINISH_S,
    another_line: bool = False,
) -> AsyncGenerator[Trackers]:
    """Trackers while a part of a run goes on; at its end they are told how it ended. See `Trackers`."""
    trackers = Trackers(config, folder, next_step=next_step, history=history, another_line=another_line)
    trackers.begun()
    within_s = finish_s
    outcome: Outcome | None = None
    try:
        yield trackers
    except asyncio.CancelledError:
        outcome, within_s = Outcome("interrupted"), min(CANCELLED_S, finish_s)
        raise
    except BaseException as error:
        outcome = Outcome("failed", str(error).partition("\n")[0] or type(error).__name__)
        raise
    finally:
        for text in await trackers.finish(outcome or trackers.status, within_s):
            warn(text)
