"""samples.jsonl read again, one sample at a time: the file may be larger than the memory.

sample_files(runs/x | samples.jsonl) → paths, oldest first      read_samples(paths) → samples, oldest first
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from offbeat.errors import ConfigError
from offbeat.metrics.writer import OLDER_SAMPLES, SAMPLES
from offbeat.nearest import run_hint


class RecordedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One line; docs/metrics.md explains the fields. Keys that are not here are skipped."""

    step: int
    eval: str | None = None
    prompt_id: str
    sample_index: int
    epoch: int = 0
    source: str
    row: str | None = None
    prompt: str
    completion: str
    reward: float | None
    """None: it was not a finite number."""
    parts: dict[str, float | None]
    errors: tuple[str, ...] = ()
    advantage: float | None = None
    finish_reason: str = ""
    versions: tuple[tuple[int, int], ...] = ()
    engine: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def group(self) -> Group:
        return (self.step, self.eval, self.prompt_id, self.epoch)


Group: TypeAlias = tuple[int, str | None, str, int]
"""(step, held-out set, prompt, epoch): what the samples of one prompt have in common."""


def sample_files(target: Path) -> list[Path]:
    """The files of a run's folder, or the file itself. Raises `ConfigError` when there are none."""
    if target.is_file():
        return [target]
    if not target.is_dir():
        raise ConfigError(
            f"{target}: no such file or folder; give the folder of a run, or its samples.jsonl. {run_hint(target)}"
        )
    found = [path for name in (OLDER_SAMPLES, SAMPLES) if (path := target / name).is_file()]
    if not found:
        raise ConfigError(f"{target} has no {SAMPLES}; give the folder of a run in which a step has finished.")
    return found


@dataclass
class Damage:
    """Whole lines that are no samples: they are skipped, counted and told of, and end nothing."""

    lines: int = 0
    first: str = ""

    def words(self) -> str | None:
        if not self.lines:
            return None
        left_out = "1 line is" if self.lines == 1 else f"{self.lines:,} lines are"
        return f"{left_out} no sample and left out; the first: {self.first}"


def read_samples(
    paths: Sequence[Path], seen: Callable[[int], object] | None = None, damage: Damage | None = None
) -> Iterator[RecordedSample]:
    """Every whole line, in order; half a line at the end of a file that is being written is left out.

    `seen` is told now and then how many bytes have been read since the last time, `damage` what was skipped.
    """
    damage = damage or Damage()
    decoder = msgspec.json.Decoder(RecordedSample)
    for path in paths:
        with path.open("rb") as file:
            untold = 0
            for number, line in enumerate(file, start=1):
                untold += len(line)
                if seen is not None and untold > 1 << 20:
                    seen(untold)
                    untold = 0
                if not line.endswith(b"\n") or not line.strip():
                    continue
                try:
                    sample = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    reason = str(error).translate({96: 39})  # names in single quotes
                    damage.first = damage.first or f"{path.name}, line {number} ({reason})"
                    damage.lines += 1
                    continue
                yield sample
            if seen is not None:
                seen(untold)


@dataclass(frozen=True)
class Wanted:
    """Which samples; a field that is None wants all."""

    step: int | None = None
    evaluation: str | None = None
    """Name of a held-out set; None: training samples."""
    prompt: str | None = None
    text: str | None = None
    """In the prompt or the completion, whatever the case."""

    def __contains__(self, sample: RecordedSample) -> bool:
        return (
            sample.eval == self.evaluation
            and self.step in (None, sample.step)
            and self.prompt in (None, sample.prompt_id)
            and (self.text is None or self._has_text(sample, self.text.casefold()))
        )

    @staticmethod
    def _has_text(sample: RecordedSample, text: str) -> bool:
        return text in sample.completion.casefold() or text in sample.prompt.casefold()


Order: TypeAlias = Callable[[RecordedSample], float]
"""The samples for which it is largest come first."""


def worst(sample: RecordedSample) -> float:
    return float("inf") if sample.reward is None else -sample.reward


def best(sample: RecordedSample) -> float:
    return float("-inf") if sample.reward is None else sample.reward


def longest(sample: RecordedSample) -> float:
    return sample.completion_tokens


def first_of(samples: Iterable[RecordedSample], count: int, order: Order | None) -> list[RecordedSample]:
    """The first `count` in this order, of equal ones the newest; without an order the newest, oldest first.

    Holds no more than `count` samples at a time.
    """
    if order is None:
        return list(deque(samples, maxlen=count))
    ranked = ((order(sample), place, sample) for place, sample in enumerate(samples))
    return [sample for _, _, sample in heapq.nlargest(count, ranked, key=lambda entry: entry[:2])]
