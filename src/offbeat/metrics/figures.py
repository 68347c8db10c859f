"""Numbers as people read them: `.49`, `61 %`, `9.1s`, `51 min`, `▂▃▄▅`. Pure; what is measured may be None or NaN."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "–"
YEAR_S = 365 * 86400.0


def is_number(value: object) -> bool:
    """A finite number; `True` is not one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def decimal(value: float | None, digits: int = 2) -> str:
    """`.49`, `-.30`, `1.25`; tiny values keep their first digits (`2e-06`), so that small is never shown as zero."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value != 0 and abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def short(value: float | None) -> str:
    """A value of its own, not a mean: `0`, `.5`, `1`, `-.707`, `12.5`; no zeros that say nothing."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.3g}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def signed(value: float | None, digits: int = 3) -> str:
    """`+.085`, `-.010`."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:+.{digits}f}"
    return text.replace("0.", ".", 1) if text[1:].startswith("0.") else text


def percent(share: float | None) -> str:
    """`61 %`; a share that is small but not zero is `<1 %`."""
    if share is None or not math.isfinite(share):
        return MISSING
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def seconds(value: float | None) -> str:
    """A measured time: `.2s`, `9.1s`, `231s`."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value >= 99.95:
        return f"{value:.0f}s"
    if value < 0.05:
        return f"{decimal(value, 3)}s" if value > 0 else "0s"
    return f"{decimal(value, 1)}s"


def duration(value: float | None) -> str:
    """A time to plan with: `45 s`, `51 min`, `3 h 20 min`, `2 d 4 h`, and no more than `> 1 year`."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value > YEAR_S:
        return "> 1 year"
    total = round(value)
    if total < 90:
        return f"{total} s"
    minutes = round(total / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def count(value: float | None) -> str:
    """`12,345`."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def size(number: float) -> str:
    """Bytes in a fitting unit: `512 bytes`, `1.7 MiB`, `26.4 GiB`, `430 MiB`."""
    if number < 1024:
        return counted(round(number), "byte")
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1000 or unit == "GiB":
            break
    return f"{number:,.{1 if number < 99.95 else 0}f} {unit}"


def counted(number: int, what: str) -> str:
    """`1 sample`, `1,024 samples`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def with_error(value: float, error: float | None) -> str:
    """`.402 ±.020`."""
    return decimal(value, 3) if error is None else f"{decimal(value, 3)} ±{decimal(error, 3)}"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken at ` · ` if that will do, else between words, else anywhere."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for part in paragraph.split(" · "):
            joined = f"{line} · {part}" if line else part
            if len(joined) <= width:
                line = joined
                continue
            if line:
                lines.append(f"{line} ·" if len(line) + 2 <= width else line)
            *full, line = textwrap.wrap(part, max(1, width), break_on_hyphens=False) or [""]
            lines += full
        lines.append(line)
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """One block a bucket of neighbouring values, lowest to highest; all equal is drawn in the middle."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if len(found) < 2 or width < 1:
        return ""
    buckets = min(width, len(found))
    edges = [round(i * len(found) / buckets) for i in range(buckets + 1)]
    means = [sum(found[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return BLOCKS[3] * len(means)
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


_ASCII = str.maketrans(
    {"·": "|", "│": "|", "×": "x", "±": "+-", "–": "-", "→": "->", "…": "...", "≥": ">=", "≤": "<=", "━": "-"}
    | {block: " .:-=+*#"[i] for i, block in enumerate(BLOCKS)}
)


def printable(text: str, encoding: str | None) -> str:
    """The text as this encoding can show it: nothing is lost in UTF-8, ASCII gets look-alikes, then `?`.

    Control characters other than line feeds and tabs become `?` too: text from a model must not steer a terminal.
    """
    text = "".join(c if c.isprintable() or c in "\n\t" else " " if c.isspace() else "?" for c in text)
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text
