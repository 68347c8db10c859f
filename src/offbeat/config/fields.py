"""Which keys there are: sections and leaf keys by their dotted paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from offbeat.config.sections import Config, Section


def section_at(location: Sequence[int | str]) -> type[Section]:
    """The section class at a path such as `("data", 0)`."""
    here: type[Section] = Config
    for part in location:
        if isinstance(part, str) and part in here.model_fields:
            found = _section_of(here.model_fields[part].annotation)
            here = found or here
    return here


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in get_args(annotation):
        found = _section_of(argument)
        if found:
            return found
    return None


def is_repeated(name: str) -> bool:
    """Is this a list of sections, `[[name]]`?"""
    return any(path.startswith(f"{name}[].") for path in config_fields())


def entry_names(section: str, entries: Sequence[Any]) -> list[str]:
    """What the entries of a list of sections are called, default names included; a tracker by its kind.

    "" for an entry that has none.
    """
    key = "kind" if section == "trackers" else "name"
    default = section_at([section]).model_fields[key].default
    names = [entry.get(key, default) if isinstance(entry, Mapping) else None for entry in entries]
    return [name if isinstance(name, str) else "" for name in names]


def config_fields() -> list[str]:
    """Every leaf key as a dotted path, in order of definition; lists of sections are written `data[].source`."""
    return list(_fields_of(Config, ""))


def _fields_of(section: type[Section], prefix: str) -> list[str]:
    names: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is None:
            names.append(prefix + name)
        else:
            mark = "[]." if "tuple" in str(field.annotation) else "."
            names.extend(_fields_of(inner, f"{prefix}{name}{mark}"))
    return names
