"""What is wrong with a file, as one sentence for each problem: the key, the value seen, the rule and the next step."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence

from pydantic import ValidationError

from offbeat.config.fields import config_fields, entry_names, section_at
from offbeat.config.sections import Config, Json
from offbeat.config.synonyms import SYNONYMS

_RULES = {
    "model_type": "must be a section, written [name] with keys under it",
    "tuple_type": "must be a list; a list of sections is written [[name]] with keys under it",
    "dict_type": "must be a table, written { key = value, … }",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
}


def sentences(error: ValidationError, values: Json) -> list[str]:
    """One sentence for each problem: key, value seen, rule, next step."""
    found: list[str] = []
    problems = error.errors(include_url=False)
    misspelt = {(*p["loc"][:-1], *_meant(p["loc"])[:1]) for p in problems if p["type"] == "extra_forbidden"}
    for problem in problems:
        where = ".".join(str(part) for part in problem["loc"])
        seen = problem.get("input")
        match problem["type"]:
            case "extra_forbidden":
                found.append(_unknown_key(problem["loc"], values))
            case "missing" if problem["loc"] in misspelt:
                pass  # the sentence about the unknown key says what it should be called
            case "missing" if isinstance(problem["loc"][-1], int):
                key = ".".join(str(part) for part in problem["loc"][:-1])
                found.append(f"{key} = {json.dumps(seen, default=str)[:200]}: has too few values.")
            case "missing":
                found.append(f"{where}: missing; it has no default, so give it a value.")
            case kind:
                rule = _RULES.get(kind) or problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
                found.append(f"{where} = {json.dumps(seen, default=str)[:200]}: {rule[0].lower()}{rule[1:]}.")
    return found


def keys_in_doubt(error: ValidationError) -> set[str]:
    """Top-level keys with a problem, and those that a misspelt one may have meant."""
    doubtful: set[str] = set()
    for problem in error.errors(include_url=False):
        doubtful.add(str(problem["loc"][0]))
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            doubtful.update(_meant(problem["loc"]))
    return doubtful


def _unknown_key(location: tuple[int | str, ...], values: Json) -> str:
    where = ".".join(str(part) for part in location)
    section = section_at(location[:-1])
    known = list(section.model_fields)
    elsewhere = [path for path in config_fields() if path.split(".")[-1] == location[-1]]
    if elsewhere:
        return f"{where}: unknown key here; it belongs to {_places(elsewhere, values)}."
    if location[-1] in SYNONYMS:
        return f"{where}: unknown key; here it is called {_written(SYNONYMS[str(location[-1])], values)!r}."
    near = _meant(location)
    if near:
        return f"{where}: unknown key; did you mean {' or '.join(map(repr, near))}?"
    return f"{where}: unknown key; known here: {', '.join(known)}."


def _places(paths: Sequence[str], values: Json) -> str:
    """`'trainer.lr', or to 'warmup.lr' in a section that is not in this config`: sections always there come first."""
    optional = [path for path in paths if "." in path and not Config.model_fields[_section(path)].get_default()]
    absent = [path for path in optional if not values.get(_section(path))]
    ordered = sorted((path for path in paths if path not in absent), key=lambda path: path in optional)
    there, other = (" or ".join(repr(_written(path, values)) for path in part) for part in (ordered, absent))
    if not other:
        return there
    return f"{f'{there}, or to ' if there else ''}{other} in a section that is not in this config"


def _section(path: str) -> str:
    return path.partition(".")[0].removesuffix("[]")


def _written(path: str, values: Json) -> str:
    """`data[].prompt` as a command takes it: `data.<name>.prompt`, with the name where there is one entry."""
    section, mark, key = path.partition("[].")
    if not mark:
        return path
    entries = values.get(section)
    names = entry_names(section, entries) if isinstance(entries, list) else []
    return f"{section}.{names[0] if len(names) == 1 else '<name>'}.{key}"


def _meant(location: tuple[int | str, ...]) -> list[str]:
    """Known keys of that section that the last part may have meant, best first."""
    known = section_at(location[:-1]).model_fields
    *_, called = SYNONYMS.get(str(location[-1]), "").split(".")
    if called in known:
        return [called]
    return difflib.get_close_matches(str(location[-1]), list(known), n=2, cutoff=0.6)
