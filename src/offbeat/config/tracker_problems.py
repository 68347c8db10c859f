"""What is wrong with `[[trackers]]`, in sentences. Pure; no library is looked at."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from offbeat.config.sections import TrackerLibrary, TrackerSection

OPTIONS: Mapping[TrackerLibrary, tuple[str, ...]] = {
    "tensorboard": ("max_queue", "flush_secs", "filename_suffix"),
    "wandb": ("entity", "group", "job_type", "notes", "save_code"),
    "trackio": (
        "group",
        "space_id",
        "bucket_id",
        "private",
        "auto_log_gpu",
        "gpu_log_interval",
        "auto_log_cpu",
        "cpu_log_interval",
    ),
    "mlflow": ("artifact_location",),
}
"""What `options` may hold: keyword arguments of the library's own call."""
FIELDS: Mapping[str, tuple[TrackerLibrary | None, ...]] = {
    "project": ("wandb", "trackio", "mlflow", None),
    "mode": ("wandb",),
    "url": ("wandb", "trackio", "mlflow"),
    "dir": ("tensorboard", "wandb"),
    "tags": ("wandb", "mlflow", None),
}
"""Which trackers have a field; None: one of the user's own."""
ENVIRONMENT: Mapping[TrackerLibrary, str] = {
    "tensorboard": "its own environment variable",
    "wandb": "WANDB_API_KEY",
    "trackio": "HF_TOKEN or TRACKIO_WRITE_TOKEN",
    "mlflow": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}
SECRET = re.compile(r"(api|access|private)[_-]?key|token|passw|secret|credential|webhook", re.IGNORECASE)
"""Names of what must not be written down."""
_SECRET_OPTION = re.compile(rf"{SECRET.pattern}|auth(?!or)|pwd", re.IGNORECASE)
_SECRET_QUERY = re.compile(rf"{_SECRET_OPTION.pattern}|key|^sig", re.IGNORECASE)


def tracker_problems(sections: Sequence[TrackerSection]) -> list[str]:
    """One sentence for each problem, in order."""
    problems: list[str] = []
    for index, section in enumerate(sections):
        where = f"trackers.{index}"
        if section.kind in [earlier.kind for earlier in sections[:index]]:
            problems.append(f"{where}.kind = {section.kind!r}: is there already; keep one of them.")
        problems += [*_kind(where, section), *_fields(where, section), *_options(where, section), *_url(where, section)]
    return problems


def _kind(where: str, section: TrackerSection) -> Iterator[str]:
    place, _, name = section.kind.rpartition(":")
    if section.library is None and not (place and name.isidentifier()):
        near = difflib.get_close_matches(section.kind, list(OPTIONS), n=1)
        known = f"one of {', '.join(OPTIONS)}; or file.py:Class, package.module:Class for your own"
        yield f"{where}.kind = {section.kind!r}: {f'did you mean {near[0]!r}?' if near else f'must be {known}.'}"


def _fields(where: str, section: TrackerSection) -> Iterator[str]:
    what = section.library or "a tracker of your own"
    for name, having in FIELDS.items():
        if getattr(section, name) and section.library not in having:
            others = ", ".join(kind for kind in having if kind)
            yield f"{where}.{name}: {what} has none, only {others}; remove it."


def _options(where: str, section: TrackerSection) -> Iterator[str]:
    known = None if section.library is None else OPTIONS[section.library]
    for name, value in _entries(section.options):
        if _SECRET_OPTION.search(name):
            yield (
                f"{where}.options.{name}: secrets do not belong into a config, which is kept in the run folder; "
                f"remove it and set {_place(section)}."
            )
        elif _is_address_with_secret(value):
            yield _secret_in_url(f"{where}.options.{name}", section)
    for name in section.options:
        if known is not None and name not in known and not _SECRET_OPTION.search(name):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}."
            yield f"{where}.options.{name}: unknown option of {section.kind}; {hint}"


def _place(section: TrackerSection) -> str:
    """Where a secret belongs."""
    return "an environment variable" if section.library is None else ENVIRONMENT[section.library]


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of a table and of all inside it but what has a secret's name; what is in a list has that of the
    list."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            if not _SECRET_OPTION.search(str(key)):
                yield from _entries(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield name, inner
            yield from _entries(inner, name)


def _is_address_with_secret(value: Any) -> bool:
    try:
        return isinstance(value, str) and "://" in value and _holds_secret(value)
    except ValueError:  # no address
        return False


def _url(where: str, section: TrackerSection) -> Iterator[str]:
    try:
        held = _holds_secret(section.url or "")
    except ValueError as error:
        yield f"{where}.url: is no address ({error}); write e.g. https://host:5000."
        return
    if held:
        yield _secret_in_url(f"{where}.url", section)


def _holds_secret(url: str) -> bool:
    """A password, a user name of a web address (which is how tokens are written there), or a query that names one.

    Raises `ValueError` for what is no address.
    """
    parts = urlsplit(url)
    named = any(_SECRET_QUERY.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    return bool(parts.password) or (bool(parts.username) and parts.scheme in ("http", "https")) or named


def _secret_in_url(where: str, section: TrackerSection) -> str:
    """The sentence does not repeat the url."""
    return f"{where}: holds a password or token, which would be kept in the run folder; set {_place(section)} instead."
