"""What is wrong with a file, as one sentence for each problem: the key, the value seen, the rule and the next step."""

from __future__ import annotations

import difflib
import json

from pydantic import ValidationError

from offbeat.config.fields import config_fields, section_at
from offbeat.config.sections import Json

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
    misspelt = {(*p["loc"][:-1], *_nearest(p["loc"])[:1]) for p in problems if p["type"] == "extra_forbidden"}
    for problem in problems:
        where = ".".join(str(part) for part in problem["loc"])
        seen = problem.get("input")
        match problem["type"]:
            case "extra_forbidden":
                found.append(_unknown_key(problem["loc"]))
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
            doubtful.update(_nearest(problem["loc"]))
    return doubtful


def _unknown_key(location: tuple[int | str, ...]) -> str:
    where = ".".join(str(part) for part in location)
    section = section_at(location[:-1])
    known = list(section.model_fields)
    elsewhere = [path for path in config_fields() if path.split(".")[-1] == location[-1]]
    if elsewhere:
        return f"{where}: unknown key here; it belongs to {elsewhere[0]!r}."
    near = _nearest(location)
    if near:
        return f"{where}: unknown key; did you mean {' or '.join(map(repr, near))}?"
    return f"{where}: unknown key; known here: {', '.join(known)}."


def _nearest(location: tuple[int | str, ...]) -> list[str]:
    """Known keys of that section that look like the last part, best first."""
    return difflib.get_close_matches(str(location[-1]), list(section_at(location[:-1]).model_fields), n=2, cutoff=0.6)
