"""An exception as bounded, valid text. The object itself never travels: it may need arguments, modules or a lock that
the other side does not have, and loading it there would run code."""

from __future__ import annotations

import traceback

from offbeat.rpc.wire import Failure

MAX_MESSAGE = 4096
MAX_TRACEBACK = 24_000
MAX_FRAMES = 40
MAX_CAUSES = 8


def failure_of(error: BaseException) -> Failure:
    """Never raises, whatever the exception's own `__str__` does."""
    kind = type(error)
    module = "" if kind.__module__ in {"builtins", "__main__"} else f"{kind.__module__}."
    try:
        message = str(error)
    except BaseException as inner:  # SystemExit too
        message = f"(no message: its __str__ raised {type(inner).__name__})"
    return Failure(
        type_name=clean(f"{module}{kind.__qualname__}", 200),
        message=clean(message, MAX_MESSAGE),
        traceback_text=clean(_traceback(error), MAX_TRACEBACK),
    )


def _traceback(error: BaseException) -> str:
    """Causes first, as Python prints them; each part is cut before they are joined, so a huge message costs little."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(parts) < MAX_CAUSES:
        seen.add(id(current))
        try:
            stack = "".join(traceback.format_tb(current.__traceback__, limit=-MAX_FRAMES))
            last = "".join(traceback.format_exception_only(current))
        except BaseException as inner:  # SystemExit too
            stack, last = "", f"{type(current).__name__} (cannot be printed: {type(inner).__name__})\n"
        parts.append(f"Traceback (most recent call last):\n{stack}{clean(last, MAX_MESSAGE)}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nThe exception above led to the one below:\n\n".join(reversed(parts))


def clean(text: str, limit: int) -> str:
    """Cut in the middle and made valid UTF-8 (lone surrogates become escapes)."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} … ({len(text)} characters) … {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
