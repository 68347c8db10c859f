"""Curves of a run from the records of metrics.jsonl: series over the steps, evaluations, alarms. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from offbeat.metrics.alarms import HISTORY, alarms
from offbeat.metrics.trends import Past
from offbeat.report.lines import number, rounded, short, text, whole

Json: TypeAlias = dict[str, Any]

STEP_LIMIT = 4000
"""Steps drawn; of a longer run every n-th is."""
NAME_LIMIT = 300
"""Different keys, and different evaluation sets, that are drawn."""
_EVALUATION = re.compile(r"^eval/(?P<name>[^/]+)/(?P<what>.+)$")
_SCORE = re.compile(r"^(?:avg|pass)@\d+$")


_WORDS = ("reward_error_first",)
"""Keys whose value is text: what an alarm quotes."""


def clean_records(records: Iterable[Mapping[str, Any]]) -> list[Json]:
    """One record a step, in order of the steps; of two about one step the later one's values win.

    Values are finite numbers or None, and text for `_WORDS`; `nonfinite` is a list of keys. A record without a step is
    left out.
    """
    found: dict[int, Json] = {}
    for record in records:
        step = whole(record.get("step"))
        if step is None:
            continue
        numbers = {text(key): number(value) for key, value in record.items() if value is None or _is_number(value)}
        listed = record.get("nonfinite")
        strange = [text(key) for key in listed] if isinstance(listed, list) else []
        strange += [key for key, value in record.items() if _is_number(value) and number(value) is None]
        words = {key: text(value) for key in _WORDS if isinstance(value := record.get(key), str)}
        found[step] = {**found.get(step, {}), **numbers, **words, "step": step, "nonfinite": strange}
    return [found[step] for step in sorted(found)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def trained(records: Sequence[Json]) -> list[Json]:
    """Those of steps: a last line has the evaluation after the last step only."""
    return [record for record in records if any(not key.startswith("eval/") for key in record.keys() - _LABELS)]


_LABELS = {"step", "weights_version", "nonfinite", "time_evaluate_s"}


def curves(records: Sequence[Json], group_errors: Mapping[int, float | None], groups_per_step: int | None) -> Json:
    """All that is drawn over the steps.

    `group_errors` has the standard error of a step's mean reward where the samples tell it; elsewhere the bound
    `reward_std / sqrt(groups_per_step)` is taken (samples of a group are not independent).
    """
    steps = trained(records)
    stride = max(1, math.ceil(len(steps) / STEP_LIMIT))
    shown = [record for i, record in enumerate(steps) if i % stride == 0 or i == len(steps) - 1]
    keys = [key for key in _keys(shown) if not key.startswith("eval/") and key not in ("step", "nonfinite", *_WORDS)]
    errors = [_reward_error(record, group_errors, groups_per_step) for record in shown]
    return {
        "steps": [record["step"] for record in shown],
        "steps_total": len(steps),
        "series": {key: rounded(record.get(key) for record in shown) for key in keys[:NAME_LIMIT]},
        "reward_error": rounded(errors),
        "nonfinite": nonfinite(steps),
        "evaluations": evaluations(records)[:NAME_LIMIT],
        "evaluation_times": evaluation_times(records),
        "alarms": alarm_list(steps),
    }


def _keys(records: Sequence[Json]) -> list[str]:
    """Every key of any record, in order of appearance."""
    return list(dict.fromkeys(key for record in records for key in record))


def _reward_error(record: Json, exact: Mapping[int, float | None], groups: int | None) -> float | None:
    if (error := exact.get(record["step"])) is not None:
        return error
    spread = record.get("reward_std")
    return spread / math.sqrt(groups) if spread is not None and groups else None


def nonfinite(steps: Sequence[Json]) -> list[Json]:
    """Key → the steps at which its value was NaN or infinite."""
    found: dict[str, list[int]] = {}
    for record in steps:
        for key in record["nonfinite"]:
            found.setdefault(key, []).append(record["step"])
    return [{"key": key, "steps": ranges(where)} for key, where in sorted(found.items())]


def evaluations(records: Sequence[Json]) -> list[Json]:
    """Each held-out set with its points in order of the weights version, and every score with its error."""
    sets: dict[str, dict[int, Json]] = {}
    for record in records:
        points: dict[str, Json] = {}
        for key, value in record.items():
            match = _EVALUATION.match(key)
            if match:
                points.setdefault(match["name"], {})[match["what"]] = value
        for name, point in points.items():
            version = point.pop("weights_version", None)
            at = whole(version if version is not None else record["step"])
            if at is not None:
                sets.setdefault(name, {})[at] = {**point, "step": record["step"]}
    return [_set(name, points) for name, points in sets.items()]


def evaluation_times(records: Sequence[Json]) -> Json:
    """Seconds that the evaluations of each weights version took, all sets together; the last line has the last ones."""
    found: dict[int, float] = {}
    for record in records:
        labels = (
            value for key, value in record.items() if key.startswith("eval/") and key.endswith("/weights_version")
        )
        version, seconds = whole(next(labels, None)), record.get("time_evaluate_s")
        if version is not None and seconds:
            found[version] = found.get(version, 0.0) + seconds
    return {"versions": sorted(found), "seconds": rounded(found[version] for version in sorted(found))}


def _set(name: str, points: Mapping[int, Json]) -> Json:
    versions = sorted(points)
    keys = list(dict.fromkeys(key for version in versions for key in points[version]))
    scores = sorted((key for key in keys if _SCORE.match(key)), key=lambda key: (key[0], int(key.split("@")[1])))
    known = {*scores, *(f"{score}_error" for score in scores), "step"}
    return {
        "name": name,
        "versions": versions,
        "scores": [
            {
                "name": score,
                "values": rounded(points[version].get(score) for version in versions),
                "errors": rounded(points[version].get(f"{score}_error") for version in versions),
            }
            for score in scores
        ],
        "other": {key: rounded(points[version].get(key) for version in versions) for key in keys if key not in known},
    }


def alarm_list(steps: Sequence[Json]) -> list[Json]:
    """Each kind of alarm once: the words of its newest appearance, and the steps at which it held."""
    found: dict[str, Json] = {}
    past = Past()
    for index, record in enumerate(steps):
        past.add(record)
        for alarm in alarms(steps[max(0, index + 1 - HISTORY) : index + 1], past):
            one = found.setdefault(alarm.kind, {"kind": alarm.kind, "at": []})
            one["newest"] = alarm.text
            one["at"].append(record["step"])
    last = steps[-1]["step"] if steps else None
    return [
        {
            "kind": one["kind"],
            "newest": one["newest"],
            "step": one["at"][0],
            "steps": ranges(one["at"]),
            "count": len(one["at"]),
            "now": one["at"][-1] == last,
        }
        for one in found.values()
    ]


def ranges(steps: Sequence[int], limit: int = 12) -> str:
    """`3, 7–9, …`: steps in order as people write them, at most `limit` parts."""
    parts: list[tuple[int, int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], step)
        else:
            parts.append((step, step))
    words = [str(a) if a == b else f"{a}–{b}" for a, b in parts[:limit]]
    return ", ".join([*words, "…"] if len(parts) > limit else words)


def totals(records: Sequence[Json]) -> Json:
    """Sums over all records, the last one's evaluations included, for the head of the page."""
    keys = ("time_step_s", "time_train_s", "time_wait_s", "time_sync_s", "time_evaluate_s", "tokens_generated")
    keys += ("tokens_trained", "skipped_updates", "reward_errors")
    return {key: short(math.fsum(record.get(key) or 0 for record in records)) for key in keys}
