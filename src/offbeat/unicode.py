"""Text that UTF-8 can hold."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with every lone surrogate replaced by U+FFFD: tokenizers and UTF-8 files accept none."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
