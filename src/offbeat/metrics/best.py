"""Which evaluated weights are the best. Pure: records of metrics.jsonl in, values by version out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offbeat.metrics.figures import is_number


def scores(records: Iterable[Mapping[str, Any]], evaluation: str) -> dict[int, float]:
    """Weights version → value of `evaluation` there: `<set>` (its avg@k), `<set>/avg@k` or `<set>/pass@k`.

    A version is also the step at which a checkpoint of it continues. Points without a number are left out.
    """
    name, _, metric = evaluation.partition("/")
    found: dict[int, float] = {}
    for record in records:
        version = record.get(f"eval/{name}/weights_version")
        value = record.get(f"eval/{name}/{metric}") if metric else _average(record, name)
        if isinstance(version, int) and is_number(value):
            found[version] = float(value)  # pyright: ignore[reportArgumentType] (is_number has looked)
    return found


def _average(record: Mapping[str, Any], name: str) -> Any:
    prefix = f"eval/{name}/avg@"
    return next((value for key, value in record.items() if key.removeprefix(prefix).isdigit()), None)


def best(values: Mapping[int, float]) -> int | None:
    """The version with the highest value; of equal ones the earliest. None without any."""
    return max(values, key=lambda version: (values[version], -version), default=None)
