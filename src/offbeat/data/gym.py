"""Rows from a reasoning-gym task: `reasoning_gym:chain_sum` with the task's own parameters as `options`.

A row is the task's entry (`question`, `answer`, `metadata`) plus `prompt` (the question again, so that the default
prompt column fits) and `reasoning_gym` (task and options: what the task's own scorer needs). Rows depend on `seed`
(0 unless given) and `size` (500 unless given) only; they are generated once a process, since some tasks are slow.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from offbeat.data.plain import plain_value
from offbeat.errors import DataError
from offbeat.install import pip_install

_generated: dict[str, list[dict[str, Any]]] = {}


def load_gym(task: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raises `DataError` for an unknown task or option, or an option's value that the task refuses."""
    given = {"seed": 0, **options}
    key = json.dumps([task, given], sort_keys=True, default=str)
    if key not in _generated:
        dataset = gym_dataset(task, given)
        origin = {"task": task, "options": given}
        entries = (plain_value(dataset[index]) for index in range(len(dataset)))
        _generated[key] = [{"prompt": entry["question"], **entry, "reasoning_gym": origin} for entry in entries]
    return _generated[key]


def gym_dataset(task: str, options: Mapping[str, Any]) -> Any:
    """The task's data set object, which also has its scorer."""
    try:
        import reasoning_gym  # noqa: F401  # pyright: ignore[reportUnusedImport] -- registers all tasks
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"source = 'reasoning_gym:{task}' needs reasoning-gym; {pip_install('tasks')}.") from error
    known = sorted(name for name in DATASETS if name != "composite")
    if task == "composite":
        raise DataError("source = 'reasoning_gym:composite': write one [[data]] section for each task, with weights.")
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {len(known)} tasks, e.g. {', '.join(known[:5])}."
        raise DataError(f"source = 'reasoning_gym:{task}': reasoning-gym has no task {task!r}; {hint}")
    dataset_class, config_class = DATASETS[task]
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for name in options:
        if name not in fields:
            near = difflib.get_close_matches(name, list(fields), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(fields)}."
            raise DataError(f"options.{name}: reasoning_gym:{task} has no such option; {hint}")
    values = {
        # TOML has lists only, where many tasks want tuples.
        name: tuple(value) if isinstance(value, list) and isinstance(fields[name].default, tuple) else value
        for name, value in options.items()
    }
    try:
        config = config_class(**values)
        config.validate()
        return dataset_class(config=config)
    except Exception as error:  # a task checks by assert, and by whatever its parameters break
        rule = str(error) or type(error).__name__
        raise DataError(f"options = {dict(options)!r}: reasoning_gym:{task} refuses them: {rule}.") from error
