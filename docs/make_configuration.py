"""Writes docs/configuration.md from config/sections.py: types and defaults from the models, texts from docstrings.

    python docs/make_configuration.py

A test fails when the page is not what this script makes.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offbeat.config import RECIPES, Config, sections

PAGE = Path(__file__).parent / "configuration.md"
HEAD = """\
# Configuration

<!-- Made by docs/make_configuration.py from src/offbeat/config/sections.py. -->

A run is one TOML file. A value comes from, in rising order of precedence: the default, the `recipe`, the file, and
`key=value` on the command line (`offbeat train run.toml trainer.lr=1e-5 data.0.weight=2`). `offbeat check run.toml`
shows what a file means without starting anything, and every run keeps its resolved values in `config.json`.

On the command line an entry of `[[data]]`, `[[eval]]` or `[[trackers]]` is given by its number from 0, or by its name
where no other entry has it: `data.gsm8k.weight=2`, `eval.heldout.every_steps=20`. An entry without a `name` has the
default one (`data.data.weight=2`), a tracker is named by its kind (`trackers.wandb.project=sums`), and digits are
always a number.

An unknown key is an error that names the nearest known one, the places where that key exists, or what offbeat calls a
key of TRL, verl or transformers (`learning_rate`: `trainer.lr`). All problems of a file are reported at once.

Relative paths are taken from the folder of the file, whatever folder a command is called in: those on the command line
too, also after a run (`offbeat resume RUN key=value`, `eval`, `rescore`), which keeps the folder of its file in
`origin.json`.
"""


def page() -> str:
    """The whole page."""
    texts = field_texts()
    parts = [HEAD, table("Top level", "", Config, texts)]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section:
            repeated = "tuple" in str(field.annotation)
            title = f"[[{name}]]" if repeated else f"[{name}]"
            parts.append(table(f"`{title}`", inspect.cleandoc(section.__doc__ or ""), section, texts))
    parts.append(recipes())
    return "\n".join(parts)


def field_texts() -> dict[tuple[str, str], str]:
    """(class, field) → the string under the field."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sections)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[node.name, field.target.id] = inspect.cleandoc(after.value.value)
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Section`, `Section | None` or `tuple[Section, ...]`."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def table(title: str, intro: str, model: type[BaseModel], texts: dict[tuple[str, str], str]) -> str:
    """One heading, one row a field."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if section_of(field.annotation) is None:
            text = " ".join(texts.get((model.__name__, name), "").split())
            rows.append(f"| `{name}` | {kind(properties[name])} | {default(field)} | {cell(text)} |")
    return "\n".join([f"## {title}\n", *([intro, ""] if intro else []), *rows, ""])


def kind(schema: dict[str, Any]) -> str:
    """A field's type and bounds in words."""
    if "anyOf" in schema:
        return " or ".join(kind(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " ".join(f"`{json.dumps(value)}`" for value in values)
    if schema.get("type") == "array":
        inner: list[dict[str, Any]] = schema.get("prefixItems", [schema.get("items", {})])
        return f"list of {len(inner)}: {kind(inner[0])}" if "prefixItems" in schema else f"list: {kind(inner[0])}"
    if schema.get("type") == "object":
        return "table"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}.items()
        if key in schema
    ]
    return " ".join([words[schema["type"]], ", ".join(bounds)]).strip()


def default(field: FieldInfo) -> str:
    """In TOML's notation; a dash where leaving the key out means that nothing is set."""
    if field.is_required():
        return "required"
    if field.default is None:
        return "–"
    return f"`{json.dumps(field.default)}`"


def recipes() -> str:
    rows = [
        "## Recipes\n",
        "A recipe sets fields that the file can still override.\n",
        "| recipe | sets |",
        "|---|---|",
    ]
    for name, values in RECIPES.items():
        sets = [
            f"`{section}.{key} = {json.dumps(value)}`"
            for section, keys in values.items()
            for key, value in keys.items()
        ]
        rows.append(f"| `{name}` | {', '.join(sets) or 'nothing: the defaults are this recipe'} |")
    return "\n".join([*rows, ""])


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
