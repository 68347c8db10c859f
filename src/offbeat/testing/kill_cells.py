"""The kill matrix as a table: who is hit, in which phase, by which signal, and what must come of it. Pure.

    {engine-0, trainer-0, reward-0, controller} × {init, rollout, sync, train, eval, save} × {kill, term, stop}

A phase is a place in the code that is reached at a known count (`PLACES`), in the process that does the work of the
phase. The signal is sent from there, to whichever process the cell names: nothing depends on timing. What is hit in
the middle of its own work has a place of its own (`OWN_PLACES`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Target = Literal["engine-0", "trainer-0", "reward-0", "controller"]
Phase = Literal["init", "rollout", "sync", "train", "eval", "save"]
Signal = Literal["kill", "term", "stop", "stop, kill"]
Outcome = Literal["fails", "heals", "unharmed", "vanishes", "saves and stops", "ends", "sleeps"]

TARGETS: tuple[Target, ...] = ("engine-0", "trainer-0", "reward-0", "controller")
PHASES: tuple[Phase, ...] = ("init", "rollout", "sync", "train", "eval", "save")
SIGNALS: tuple[Signal, ...] = ("kill", "term", "stop")

OUTCOMES: dict[Outcome, str] = {
    "fails": "exit 1; the error begins with the process and what ended it; no other process is blamed",
    "heals": "exit 0; its pool starts another; the one sample at hand counts as a failed reward call",
    "unharmed": "exit 0; its pool starts another; equal to an uninterrupted run",
    "vanishes": "the controller is gone, and within 10 s all that it had started",
    "saves and stops": "exit 130 after the step at hand, saved",
    "ends": "exit 130 at once; nothing was saved yet",
    "sleeps": "after SIGCONT exit 0, equal to an uninterrupted run: nobody is declared dead for the controller's sleep",
}

STEPS = 3
PROMPTS, SAMPLES = 2, 4
EVAL_PROMPTS = 6
"""One failed call of so many stays within rewards.max_error_fraction."""
HEARTBEAT_S = 5.0
"""Native code that loads a library keeps a live process silent for seconds on a machine that has too much to do."""
STALL_S = 6.0
SLEEP_S = 8.0
"""How long a stopped controller sleeps: longer than both limits."""
VANISH_S = 10.0
NOTICE_S: dict[Signal, float] = {"kill": 10.0, "term": 10.0, "stop": 10.0 + HEARTBEAT_S, "stop, kill": VANISH_S}
"""From the fault to the end of the command (until the controller has ended all others), on a machine that is not
overloaded."""

# Which call of its kind is reached in the step that is hit. The first generate is the parity probe, the second the
# evaluation of version 0; each evaluation scores EVAL_PROMPTS samples, each step PROMPTS × SAMPLES.
#   max_staleness 0:  probe, eval 0, step 0,         save 1, sync 1, eval 1, [step 1], …
#   max_staleness 1:  probe, eval 0, step 0, step 1, save 1, sync 1, eval 1, [step 2], …
_STEP = PROMPTS * SAMPLES
PLACES: dict[int, dict[Phase, str]] = {
    0: {
        "rollout": "engine-0/engine.generate@5",
        "sync": "trainer-0/trainer.send@2",
        "train": "trainer-0/trainer.update@2",
        "eval": "engine-0/engine.generate@4",
        "save": "trainer-0/trainer.save@2",
    },
    1: {
        "rollout": "engine-0/engine.generate@6",
        "sync": "trainer-0/trainer.send@2",
        "train": "trainer-0/trainer.update@2",
        "eval": "engine-0/engine.generate@5",
        "save": "trainer-0/trainer.save@2",
    },
}
OWN_PLACES: dict[tuple[Target, Phase], str | dict[int, str]] = {
    ("engine-0", "init"): "engine-0/engine.init@1",
    ("trainer-0", "init"): "trainer-0/trainer.init@1",
    ("reward-0", "init"): "reward-0/reward.init@1",
    ("controller", "init"): "trainer-0/trainer.init@1",
    ("engine-0", "sync"): "engine-0/engine.receive@2",
    ("controller", "save"): "controller/controller.before_rename@2",
    ("reward-0", "rollout"): {
        0: f"reward-0/reward.score@{EVAL_PROMPTS * 2 + _STEP + 4}",
        1: f"reward-0/reward.score@{EVAL_PROMPTS * 2 + _STEP * 2 + 4}",
    },
    ("reward-0", "eval"): {
        0: f"reward-0/reward.score@{EVAL_PROMPTS + _STEP + 3}",
        1: f"reward-0/reward.score@{EVAL_PROMPTS + _STEP * 2 + 3}",
    },
}


@dataclass(frozen=True)
class Cell:
    """One case of the matrix."""

    target: Target
    phase: Phase
    signal: Signal
    staleness: int = 0

    @property
    def name(self) -> str:
        return f"{self.target} {self.phase} {self.signal} staleness {self.staleness}"

    @property
    def faults(self) -> str:
        """For OFFBEAT_FAULTS."""
        own = OWN_PLACES.get((self.target, self.phase), PLACES[self.staleness].get(self.phase, ""))
        place = own[self.staleness] if isinstance(own, dict) else own
        point, _, count = place.partition("@")
        return f"{point}={self.signal.partition(',')[0]}:{self.target}@{count}"

    @property
    def outcome(self) -> Outcome:
        """What must come of it."""
        if self.target == "controller":
            return self._of_controller()
        if self.target == "reward-0" and self.phase != "init":
            return "heals" if self.phase in ("rollout", "eval") else "unharmed"
        return "fails"

    def _of_controller(self) -> Outcome:
        match self.signal:
            case "kill" | "stop, kill":
                return "vanishes"
            case "term":
                return "ends" if self.phase == "init" else "saves and stops"
            case "stop":
                return "sleeps"

    @property
    def culprit(self) -> str:
        """A pattern for the beginning of the error of a run that fails."""
        if self.signal == "stop":
            return rf"{self.target}: no heartbeat for {HEARTBEAT_S:g} s \(process is stopped or its host is gone\)"
        return rf"{self.target}: killed by SIG{self.signal.upper()}"

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.phase != "init"


def cells(staleness: tuple[int, ...] = (0, 1)) -> Iterator[Cell]:
    """All of the matrix, and a controller that is killed while it is stopped. No cell is impossible."""
    for one in staleness:
        for target in TARGETS:
            for phase in PHASES:
                for signal in SIGNALS:
                    yield Cell(target, phase, signal, one)
        for phase in PHASES:
            yield Cell("controller", phase, "stop, kill", one)


def settings(staleness: int) -> dict[str, Any]:
    """Changes to the tiny project's config: limits that make a stopped process known in seconds."""
    return {
        "steps": STEPS,
        "max_staleness": staleness,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "eval": [{"source": "train.jsonl", "max_prompts": EVAL_PROMPTS, "every_steps": 1}],
        "limits": {"heartbeat_s": HEARTBEAT_S, "stall_s": STALL_S},
        "checkpoint": {"every_steps": 1, "keep_last": STEPS},
    }
