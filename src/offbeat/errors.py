"""Every error that offbeat raises on purpose.

    OffbeatError
    ├── ConfigError (ValueError)     exit 2: the user's input; found before any process starts
    │   ├── DataError                a data set: missing column, bad row, too few rows
    │   └── ModelError               a model folder: no weights, no chat template, unknown architecture
    └── RunError (RuntimeError)      exit 1: the run failed
        ├── WorkerDied               a process ended, or gave no sign of life
        ├── RemoteError              a call failed in another process; carries type, message and traceback as text
        ├── CallTimeout              a call missed its deadline
        ├── ProtocolError            a message that this version does not understand, or a peer that is not ours
        ├── WeightSyncError          a weight transfer failed or could not be verified
        ├── RewardError              a reward function failed more often than allowed, or returned no number
        └── TrainingDiverged         non-finite gradients beyond the limit

A message says what happened, the value seen, and what to do next. It is plain text that a terminal, a log and a page
show as it is: no markup; names and commands in single quotes where they would read as prose. A failed rollout is data,
not an error; a failed component ends the run with its own, original error.
"""

from __future__ import annotations

from collections.abc import Mapping


class OffbeatError(Exception):
    """Base of all errors raised on purpose; anything else is a defect of ours."""


class ConfigError(OffbeatError, ValueError):
    """The user's input is wrong. `problems` has one sentence for each thing that is wrong, all found at once."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems


class DataError(ConfigError):
    """A data set cannot be used. `missing`: config keys that name a column that is not there → the problem of each."""

    def __init__(self, *problems: str, missing: Mapping[str, str] | None = None) -> None:
        super().__init__(*problems)
        self.missing = dict(missing or {})


class ModelError(ConfigError):
    """A model folder or hub id cannot be used."""


class RunError(OffbeatError, RuntimeError):
    """The run failed after it was accepted."""


class WorkerDied(RunError):
    """A process of the run ended before its time.

    Attributes:
        process: its name, e.g. `engine-0`.
        cause: what is known, e.g. `killed by SIGKILL`, `exit code 1`, `no heartbeat for 10 s`.
        log_tail: the last lines of its log.
    """

    def __init__(self, process: str, cause: str, log_tail: str = "") -> None:
        tail = f"\nlast lines of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"{process}: {cause}{tail}")
        self.process = process
        self.cause = cause
        self.log_tail = log_tail


class RemoteError(RunError):
    """A call failed in another process. The original exception never crosses the wire, only its text does."""

    def __init__(self, process: str, method: str, type_name: str, message: str, traceback_text: str) -> None:
        what = "could not start" if method == "build" else f"failed in {method}"
        kind = "" if type_name.startswith("offbeat.errors.") else f"{type_name}: "
        super().__init__(f"{process} {what}: {kind}{message}")
        self.process = process
        self.method = method
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text


class CallTimeout(RunError):
    """A call missed its deadline, or its worker made no progress for the stall limit."""


class ProtocolError(RunError):
    """A message that cannot be accepted: unknown argument, other major version, bad size, unknown peer."""


class WeightSyncError(RunError):
    """A weight transfer failed or could not be verified; the engines concerned are stale.

    `unresponsive` names the processes that did not answer within the deadline: their owner should end them.
    """

    def __init__(self, message: str, *, unresponsive: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.unresponsive = unresponsive


class RewardError(RunError):
    """Reward functions failed beyond the allowed share, or broke their contract."""


class TrainingDiverged(RunError):
    """Too many updates in a row had a non-finite gradient."""


def first_cause(error: BaseException) -> BaseException:
    """The one error of a group that explains the others: a dead worker if there is one, else the first.

    An error that is no group is its own cause.
    """
    leaves: list[BaseException] = []

    def collect(found: BaseException) -> None:
        if isinstance(found, BaseExceptionGroup):
            for inner in found.exceptions:
                collect(inner)
        else:
            leaves.append(found)

    collect(error)
    return next((leaf for leaf in leaves if isinstance(leaf, WorkerDied)), leaves[0])
