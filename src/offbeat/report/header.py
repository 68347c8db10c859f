"""The head of the page: what was run, how it ended, and its settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from offbeat.report.lines import number, short, text, whole

Json: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["done", "running", "failed", "interrupted", "unknown"]

VALUE_LIMIT = 2_000
"""Characters of one setting."""
SETTINGS_LIMIT = 2_000


@dataclass
class Journal:
    """What the journal tells about the run as a whole."""

    started_s: float | None = None
    """Unix time of the first event."""
    ended_s: float | None = None
    resumed_at: list[int] = field(default_factory=list[int])
    """Steps at which a later part of the run began."""
    saved_at: int | None = None
    dropped: list[Drop] = field(default_factory=list["Drop"])
    """Those of the surviving line of the run: a resume supersedes what came after its checkpoint."""


@dataclass(frozen=True)
class Drop:
    """Samples that were not trained on."""

    offset: int
    step: int | None
    reason: str
    samples: int | None
    """None: all of the step that had not ended."""


def journal_facts(events: Iterable[tuple[int, Mapping[str, Any]]]) -> Journal:
    """`events` are (offset in the file, object)."""
    found = Journal()
    for offset, event in events:
        time_s = number(event.get("time"))
        if time_s is not None:
            found.started_s = time_s if found.started_s is None else found.started_s
            found.ended_s = time_s
        step = whole(event.get("step"))
        match event.get("event"):
            case "resumed" if step is not None:
                found.resumed_at.append(step)
                back = whole(event.get("offset"))
                found.dropped = [drop for drop in found.dropped if drop.offset < (0 if back is None else back)]
            case "saved" if step is not None:
                found.saved_at = step
            case "dropped":
                reason = text(event.get("reason"))[:VALUE_LIMIT] or "no reason given"
                found.dropped.append(Drop(offset, step, reason, _samples(event.get("samples"))))
            case _:
                pass
    return found


def _samples(value: object) -> int | None:
    """How many, in a list of [prompt id, epoch, indices]."""
    if not isinstance(value, list):
        return None
    groups = [one for one in value if isinstance(one, list) and one]
    return sum(len(one[-1]) if isinstance(one[-1], list) else 1 for one in groups)


def drops(journal: Journal) -> list[list[Any]]:
    """(reason, samples whose number is known, steps), the most frequent reason first."""
    reasons: dict[str, list[Drop]] = {}
    for drop in journal.dropped:
        reasons.setdefault(drop.reason, []).append(drop)
    rows = [
        (-len({drop.step for drop in own}), reason, sum(drop.samples or 0 for drop in own))
        for reason, own in reasons.items()
    ]
    return [[reason, samples, -steps] for steps, reason, samples in sorted(rows)[:20]]


def status(*, steps_done: int, last_step: int | None, planned: int | None, locked: bool, failed: bool) -> Status:
    """How the run stands. `locked`: a process trains into the folder; `failed`: its newest part ended with an error.

    `planned` None: the config cannot be read, so nobody knows.
    """
    if locked:
        return "running"
    if failed:
        return "failed"
    if planned is None:
        return "unknown"
    return "done" if steps_done and last_step is not None and last_step + 1 >= planned else "interrupted"


def settings(config: Mapping[str, Any]) -> list[list[str]]:
    """(key, value) of every setting, `trainer.lr`, `data[0].source`, in the order of the config."""
    found: list[list[str]] = []
    _flatten("", config, found)
    return found[:SETTINGS_LIMIT]


def _flatten(key: str, value: Any, found: list[list[str]], depth: int = 0) -> None:
    if isinstance(value, Mapping) and value and depth < 8:
        for name, inner in value.items():
            _flatten(f"{key}.{text(name)}" if key else text(name), inner, found, depth + 1)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value) and depth < 8:
        for index, inner in enumerate(value):
            _flatten(f"{key}[{index}]", inner, found, depth + 1)
    else:
        found.append([key[:VALUE_LIMIT], shown(value)])


def shown(value: Any) -> str:
    """A setting as TOML would have it, more or less; null is a dash."""
    match value:
        case None:
            return "–"
        case bool():
            return "true" if value else "false"
        case str():
            return text(value)[:VALUE_LIMIT]
        case _:
            return text(value)[:VALUE_LIMIT]


def facts(config: Mapping[str, Any]) -> list[list[str]]:
    """The few settings that say what kind of run it is, as (name, words)."""
    found: list[list[str]] = [["Model", shown(config.get("model"))]]
    per_step, samples = whole(config.get("prompts_per_step")), whole(config.get("samples_per_prompt"))
    if per_step is not None and samples is not None:
        updates = whole(config.get("updates_per_step")) or 1
        found.append(
            [
                "Batch",
                f"{per_step} prompts × {samples} samples = {per_step * samples:,} a step, "
                f"{updates} update{'s' if updates != 1 else ''}",
            ]
        )
    staleness = whole(config.get("max_staleness"))
    if staleness is not None:
        words = {0: "0, on-policy", 1: "1, one step off-policy"}
        found.append(["Staleness bound", words.get(staleness, str(staleness))])
    sampling, trainer, rollout = (_section(config, key) for key in ("sampling", "trainer", "rollout"))
    found += _present("Sampling", sampling, {"max_new_tokens": "at most {} tokens", "temperature": "temperature {}"})
    found += _present("Trainer", trainer, {"lr": "learning rate {}", "dtype": "{}", "device": "device {}"})
    found += _present("Engines", rollout, {"replicas": "{} ×", "engine": "{}", "device": "device {}"})
    for title, key in (("Data", "data"), ("Held out", "eval")):
        names = [shown(s.get("name") or s.get("source")) for s in _sections(config, key)]
        if names:
            found.append([title, ", ".join(names)[:VALUE_LIMIT]])
    return found


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _sections(config: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = config.get(key)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _present(title: str, section: Mapping[str, Any], words: Mapping[str, str]) -> list[list[str]]:
    parts = [form.format(shown(section[key])) for key, form in words.items() if section.get(key) is not None]
    return [[title, ", ".join(parts).replace("×, ", "× ")]] if parts else []


def failure_of(log_tail: str) -> str | None:
    """The error of the last failure in controller.log: the last line of its traceback that begins one."""
    _, mark, after = log_tail.rpartition(" ERROR offbeat: the run failed")
    if not mark:
        return None
    own = after.split(" ERROR offbeat: in ", 1)[0]
    lines = [line for line in own.splitlines() if line and not line[0].isspace() and not line.startswith("Traceback")]
    named = [line for line in lines if ": " in line and "." in line.split(": ", 1)[0]]
    return text((named or lines or ["unknown"])[-1])[:VALUE_LIMIT]


def header(
    *,
    name: str,
    config: Mapping[str, Any],
    steps: Sequence[Json],
    journal: Journal,
    locked: bool,
    failure: str | None,
) -> Json:
    """`steps` are the records of steps that were trained."""
    planned = whole(config.get("steps"))
    last = steps[-1]["step"] if steps else None
    versions = [v for record in steps if (v := whole(record.get("weights_version"))) is not None]
    state = status(steps_done=len(steps), last_step=last, planned=planned, locked=locked, failed=failure is not None)
    return {
        "name": text(name),
        "model": shown(config.get("model")) if config else None,
        "status": state,
        "failure": failure if state == "failed" else None,
        "steps_done": len(steps),
        "last_step": last,
        "steps_planned": planned,
        # The last step publishes one more version than it trained on.
        "versions": [min(versions), max(versions) + 1] if versions else None,
        "started": journal.started_s,
        "ended": journal.ended_s,
        "wall_s": short(journal.ended_s - journal.started_s)
        if journal.started_s is not None and journal.ended_s is not None
        else None,
        "resumed_at": journal.resumed_at[-100:],
        "resumes": len(journal.resumed_at),
        "saved_at": journal.saved_at,
        "dropped": drops(journal),
        "facts": facts(config),
        "settings": settings(config),
    }
