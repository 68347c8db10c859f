"""What the samples of one batch got from each function so far, and when there were too many errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import RewardError


@dataclass(frozen=True)
class Work:
    """One call of one function: a sample, or the samples of a group."""

    function: str
    places: tuple[int, ...]
    """Of its samples in the batch."""
    alone: bool = False
    """Graded in a chunk of its own, to find out whether it is the one that ends its worker."""


class Ledger:
    """Every (sample, function) is entered exactly once; a second entry is our own mistake and raises."""

    def __init__(self, ids: Sequence[str], total: int, max_error_fraction: float, timeout_s: float) -> None:
        self.ids = ids
        self._total = total
        self._max_error_fraction = max_error_fraction
        self._timeout_s = timeout_s
        self._graded: list[dict[str, float | str | None]] = [{} for _ in ids]
        self._errors = 0
        self._first = ""

    def keep(self, place: int, function: str, value: float | None) -> None:
        self._enter(place, function, value)

    def fail(self, place: int, function: str, text: str) -> None:
        """Raises `RewardError` as soon as the allowed share of errors is exceeded: more grading cannot lower it."""
        self._enter(place, function, text)
        self._errors += 1
        self._first = self._first or f"{function!r} on sample {self.ids[place]}: {text}"
        if self._errors > self._max_error_fraction * self._total:
            raise RewardError(
                f"reward functions failed on {self._errors} of {self._total} scores, more than "
                f"rewards.max_error_fraction = {self._max_error_fraction:g} allows; the first: {self._first}. "
                f"Correct the function, or raise rewards.timeout_s (now {self._timeout_s:g}) if it is only slow."
            )

    def of(self, place: int) -> Mapping[str, float | str | None]:
        """Spec → value, None (abstained) or the text of an error."""
        return self._graded[place]

    def _enter(self, place: int, function: str, value: float | str | None) -> None:
        assert function not in self._graded[place], f"{self.ids[place]} was graded twice by {function}"
        self._graded[place][function] = value
