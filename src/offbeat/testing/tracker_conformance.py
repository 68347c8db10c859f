"""What every `Tracker` must do, as checks to run against one: offbeat's own, or yours.

    results = check_tracker(lambda run: Mine(), folder)
    assert not [r for r in results if r.problem]

The tracker is served as in a run, from a thread of its own through `offbeat.trackers.delivery`. Each part of a run has
a new object from `make`, as a resumed run has. With `read`, every point that arrived is compared with what was sent.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from offbeat.config.tracker_problems import SECRET
from offbeat.testing.conformance import CheckResult, checking
from offbeat.trackers.delivery import Delivery, numbers
from offbeat.trackers.state import ProgressFile
from offbeat.trackers.tracker import Outcome, TrackedRun, Tracker

Make: TypeAlias = Callable[[], Tracker]
Points: TypeAlias = Sequence[tuple[int, str, float]]
"""(step, name, value); names as they were sent. Others, which the tracker adds, are not looked at."""
Read: TypeAlias = Callable[[], Points]
Record: TypeAlias = Mapping[str, Any]

KEY = "reward_mean"
EVALUATED = "eval/held out/avg@4"


def record(step: int) -> dict[str, Any]:
    """A step with names and values as they occur: slashes, spaces, nulls, lists, large and tiny numbers."""
    values = {"step": step, "weights_version": step, KEY: step / 4, "kl_reference": None, "nonfinite": []}
    return {**values, "reward/my reward": -1e30, "sync_bytes": 2**40, "lr": 1e-9 * (step + 1), "tokens_generated": step}


def samples(step: int) -> list[dict[str, Any]]:
    """Text of a model may be anything."""
    row = {"step": step, "prompt_id": "data/1", "prompt": "", "reward": 0.5, "parts": {}, "versions": [[step, 2]]}
    texts = ["", "<script>alert(1)</script>", "a | b\n\n# c `d` ![e](f)\r\n\x00\x1b[2J\u202e", "語" * 3000]
    return [{**row, "completion": text} for text in texts]


class _Run:
    """One run, in parts."""

    def __init__(self, make: Make, folder: Path, timeout_s: float) -> None:
        self.make = make
        self.folder = folder
        self.sent: dict[tuple[int, str], float] = {}
        self.timeout_s = timeout_s
        folder.mkdir(parents=True)

    @property
    def file(self) -> ProgressFile:
        return ProgressFile(self.folder)

    def part(self, next_step: int, new: Sequence[Record], history: Sequence[Record], outcome: Outcome) -> str | None:
        """Returns what is wrong."""
        for one in [*history, *new]:
            self.sent |= {(one["step"], key): value for key, value in numbers(one, evaluated=None).items()}
        told: list[str] = []
        run = TrackedRun(
            name="run",
            project="offbeat-conformance",
            tags=("conformance",),
            folder=self.folder,
            config={"model": "m", "steps": 6, "trainer": {"lr": 1e-6}, "data": [{"source": "rows.jsonl"}], "eval": []},
            next_step=next_step,
            delivered=0,
            state={},
        )
        records = list(history)
        delivery = Delivery("conformance", self.make(), run, records, self.file, told.append, samples=4)
        for one in new:
            delivery.expect(one["step"], samples(one["step"]) if KEY in one else [])
            records.append(one)
            delivery.recorded()
        delivery.close(outcome)
        deadline = time.monotonic() + self.timeout_s
        while not delivery.ended and time.monotonic() < deadline:
            time.sleep(0.01)
        problems = [*told, *delivery.last_words(self.timeout_s)]
        return problems[0] if problems else None


def _steps(*steps: int) -> list[dict[str, Any]]:
    return [record(step) for step in steps]


def a_run_is_logged_from_start_to_end(run: _Run, read: Read | None) -> str | None:
    problem = run.part(0, _steps(0, 1, 2), [], Outcome("done"))
    if problem or read is None:
        return problem
    return _arrived(run, read())


def a_run_that_failed_before_its_first_step_ends(run: _Run, read: Read | None) -> str | None:
    del read
    return run.part(0, [], [], Outcome("failed", "engine-0: killed by SIGKILL"))


def a_resumed_run_neither_repeats_nor_skips_a_step(run: _Run, read: Read | None) -> str | None:
    """Four steps, then from step 2 again to step 4."""
    problem = run.part(0, _steps(0, 1, 2, 3), [], Outcome("interrupted"))
    problem = problem or run.part(2, _steps(2, 3, 4), _steps(0, 1), Outcome("done"))
    if problem or read is None:
        return problem
    return _arrived(run, read())


def what_an_earlier_part_did_not_deliver_is_taken(run: _Run, read: Read | None) -> str | None:
    """The first two steps come from metrics.jsonl."""
    problem = run.part(2, _steps(2), _steps(0, 1), Outcome("done"))
    if problem or read is None:
        return problem
    return _arrived(run, read())


def a_run_goes_on_after_its_last_evaluation(run: _Run, read: Read | None) -> str | None:
    """Ended at step 2 with an evaluation there; continued, step 2 has its training beside it."""
    last = {"step": 2, "weights_version": 2, EVALUATED: 0.5}
    problem = run.part(0, [*_steps(0, 1), last], [], Outcome("done"))
    problem = problem or run.part(2, [{**record(2), EVALUATED: 0.5}], _steps(0, 1), Outcome("done"))
    if problem or read is None:
        return problem
    return _arrived(run, read())


def what_is_kept_for_a_resume_is_json_without_secrets(run: _Run, read: Read | None) -> str | None:
    del read
    problem = run.part(0, _steps(0), [], Outcome("done"))
    text = json.dumps(dict(run.file.read("conformance").state))
    return problem or (f"state {text} has a secret's name in it" if SECRET.search(text) else None)


def _arrived(run: _Run, points: Points) -> str | None:
    """Every number that was sent is there once, with its value to the precision of float32."""
    for key in dict.fromkeys(name for _, name in run.sent):
        steps = sorted(step for step, name in run.sent if name == key)
        found = sorted(step for step, name, _ in points if name == key)
        if found != steps:
            return f"{key} should be there once at each of {steps}; it is at {found}"
    for step, name, value in points:
        sent = run.sent.get((step, name))
        if sent is not None and not math.isclose(value, sent, rel_tol=1e-6):
            return f"{name} of step {step} is {value}; {sent} was sent"
    return None


TRACKER_CHECKS: tuple[Callable[[_Run, Read | None], str | None], ...] = (
    a_run_is_logged_from_start_to_end,
    a_run_that_failed_before_its_first_step_ends,
    a_resumed_run_neither_repeats_nor_skips_a_step,
    what_an_earlier_part_did_not_deliver_is_taken,
    a_run_goes_on_after_its_last_evaluation,
    what_is_kept_for_a_resume_is_json_without_secrets,
)


def check_tracker(
    make: Callable[[Path], Tracker],
    folder: Path,
    *,
    read: Callable[[Path], Points] | None = None,
    timeout_s: float = 30.0,
) -> list[CheckResult]:
    """Run every check.

    Args:
        make: a new tracker for the run in this folder; called once for each part of a run.
        folder: an empty one; each check has a run folder in it.
        read: the (step, name, value) points that were stored for the run in this folder, by the names that were sent.
        timeout_s: for each part of a run, until the tracker has ended.
    """
    results: list[CheckResult] = []
    for check in TRACKER_CHECKS:
        place = folder / check.__name__
        with checking(results, check) as found:
            run = _Run(lambda place=place: make(place), place, timeout_s)
            found(check(run, None if read is None else lambda place=place: read(place)))
    return results
