"""From a TOML file and `key=value` overrides to a `Config`; every problem is found in one pass."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from offbeat.config.fields import entry_names, is_repeated
from offbeat.config.paths import absolute
from offbeat.config.problems import keys_in_doubt, sentences
from offbeat.config.rules import rule_problems
from offbeat.config.sections import RECIPES, Config, Json, LossSection
from offbeat.errors import ConfigError
from offbeat.unicode import well_formed

DEEPEST = 100
"""Sections, tables and lists within each other."""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply `key=value` overrides. Raises `ConfigError` with every problem found."""
    return parse_config(read_toml(Path(path)), overrides, folder=Path(path).resolve().parent)


def read_toml(path: Path) -> Json:
    """The plain values of a TOML file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the path of a TOML file."
        raise ConfigError(f"config {path}: no such file{hint}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config {path}: not valid TOML: {error}.") from error
    except RecursionError as error:
        raise ConfigError(f"config {path}: is nested too deep to be read; no key takes such a value.") from error
    except IsADirectoryError:
        run = (path / "config.json").is_file()
        hint = f"continue a run with 'offbeat resume {path}'" if run else "give the path of a TOML file"
        raise ConfigError(f"config {path}: is a folder; {hint}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read ({error}); give a UTF-8 TOML file.") from error


def parse_config(raw: Json, overrides: Sequence[str] = (), *, folder: Path | None = None) -> Config:
    """Build a config from plain values (as TOML gives them). Relative paths are taken from `folder`."""
    problems: list[str] = []
    given = _plain(raw, problems)
    for override in overrides:
        problem = _apply_override(given, override)
        if problem:
            problems.append(problem)
    given = _plain(given, problems)
    recipe = given.get("recipe", "grpo")
    merged = _merge(RECIPES[recipe], given) if isinstance(recipe, str) and recipe in RECIPES else given
    try:
        config = Config.model_validate_json(json.dumps(merged))
    except ValidationError as error:
        raise ConfigError(
            *problems, *sentences(error, merged), *rule_problems(_valid_parts(merged, keys_in_doubt(error)))
        ) from None
    problems += rule_problems({name: getattr(config, name) for name in Config.model_fields})
    problems += _recipe_problems(raw, config)
    if problems:
        raise ConfigError(*problems)
    return absolute(config, folder or Path.cwd())


def _plain(values: Json, problems: list[str]) -> Json:
    """JSON values only. What would become another text is told of: dates of TOML, bytes that are not UTF-8."""

    def text(value: str, where: str) -> str:
        whole = well_formed(value)
        if whole != value:
            problems.append(f"{where} = {value!a}: holds a byte that is not UTF-8; write it in UTF-8.")
        return whole

    def plain(value: Any, where: str, depth: int = 0) -> Any:
        if depth > DEEPEST:
            problems.append(f"{where[:200]}: is nested more than {DEEPEST} deep, which no key takes; remove it.")
            return None
        if isinstance(value, Mapping):
            named = ((text(str(key), f"key {where}".rstrip()), inner) for key, inner in value.items())
            return {key: plain(inner, f"{where}.{key}".lstrip("."), depth + 1) for key, inner in named}
        if isinstance(value, str):
            return text(value, where)
        if isinstance(value, list | tuple):
            return [plain(inner, f"{where}.{index}", depth + 1) for index, inner in enumerate(value)]
        if isinstance(value, date | time):
            kind = "time" if isinstance(value, time) else "date"
            written = value.isoformat()
            problems.append(
                f'{where} = {written}: is a {kind}, which no key takes; for text write it in quotes: "{written}".'
            )
            return written
        return value

    return json.loads(json.dumps(plain(values, ""), default=str))


def _recipe_problems(raw: Json, config: Config) -> list[str]:
    """A resolved config (of a run, a `Config`) has every value: another recipe would change nothing but its name."""
    loss = raw.get("loss")
    resolved = isinstance(loss, Mapping) and loss.keys() >= LossSection.model_fields.keys()
    if not resolved or raw.get("recipe") == config.recipe:
        return []
    named = {(section, key) for recipe in RECIPES.values() for section, values in recipe.items() for key in values}
    unlike: list[str] = []
    for section, key in sorted(named):
        here = getattr(config, section)
        default = type(here).model_fields[key].default
        wanted = RECIPES[config.recipe].get(section, {}).get(key, default)
        if getattr(here, key) != wanted:
            unlike.append(f"{section}.{key}={wanted if isinstance(wanted, str) else json.dumps(wanted)}")
    if not unlike:
        return []
    return [
        f"recipe = {config.recipe!r}: every value is set here already, so that a recipe would change nothing but its "
        f"name; set what it stands for, too: {' '.join(unlike)}."
    ]


def _valid_parts(values: Json, in_doubt: Collection[str]) -> dict[str, Any]:
    """The values of all other top-level keys as a `Config` would hold them, defaults included."""
    return {
        name: TypeAdapter(field.rebuild_annotation()).validate_json(json.dumps(values[name]))
        if name in values
        else field.get_default(call_default_factory=True)
        for name, field in Config.model_fields.items()
        if name not in in_doubt
    }


def _apply_override(values: Json, override: str) -> str | None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        return f"override {override!r}: write key=value, e.g. trainer.lr=1e-5."
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        return f"override {override[:200]!r}: is nested too deep to be read; no key takes such a value."
    if isinstance(value, date | time):  # quotes are the shell's on a command line: it is the text
        value = text
    here: Any = values
    *parents, last = key.strip().split(".")
    while parents:
        part, *parents = parents
        if here.get(part) is None:  # left out, or a resolved config's null for a section that it does not have
            here[part] = {}
        here = here[part]
        if isinstance(here, list) and is_repeated(part):
            if not parents:
                known = _known_entries(part, here) or "none yet"
                return f"override {override!r}: name the entry, e.g. {part}.0.{last}={text}; there are: {known}."
            index, parents = _entry(part, here, parents)
            if index is None:
                return (
                    f"override {override!r}: {parents[0]!r} is no entry of {part}; it is {_known_entries(part, here)}."
                )
            here = here[index]
        if not isinstance(here, dict):
            return f"override {override!r}: {part!r} is not a section."
    here[last] = value
    return None


def _entry(section: str, entries: Sequence[Any], path: list[str]) -> tuple[int | None, list[str]]:
    """Index of the entry that a path begins with, by its number or a name of its own, and the rest of the path.

    A name may have dots; a number is always an index.
    """
    if path[0].isdecimal():
        return (int(path[0]), path[1:]) if int(path[0]) < len(entries) else (None, path)
    names = entry_names(section, entries)
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        if names.count(name) == 1:
            return names.index(name), path[length:]
    return None, path


def _known_entries(section: str, entries: Sequence[Any]) -> str:
    """`0 (gsm8k), 1 (sums)`."""
    names = enumerate(entry_names(section, entries))
    return ", ".join(f"{index} ({name})" if name else str(index) for index, name in names)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Json:
    merged: Json = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
