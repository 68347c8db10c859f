"""The reward of the equivalence tests. A file of its own: the reward process imports it, and needs no torch for it."""

from __future__ import annotations

LIKED = frozenset("abcdef012")


def liked(completion: str) -> float:
    """How many of the characters are liked ones, up to two: equal in some groups, not in most."""
    return float(min(2, sum(character in LIKED for character in completion)))
