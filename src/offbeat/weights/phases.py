"""Where the seconds of a transfer went: five phases, one after the other, from what the controller and the members saw.

    controller   hello, offer, prepare │ move                                │ verify │ probe │ commit
    members                            │ rendezvous │ load weights │ digest  │
    phases       rendezvous                         │ transfer     │ verify           │ probe │ commit

A phase lasts until the slowest member is through with it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from offbeat.rpc.messages import WeightsMoved, WorkSpan

BEFORE = ("hello", "offer", "prepare")


def sync_phases(seen: Mapping[str, tuple[float, float]], moved: Iterable[WeightsMoved]) -> tuple[WorkSpan, ...]:
    """`seen`: phase of the controller → (start, end) on its clock; `moved`: what every member told.

    A member that tells nothing counts all of `move` as transfer. No probe, no span of it.
    """
    spans = [span for one in moved for span in one.spans]
    move_start, move_end = seen["move"]
    start = min(seen[name][0] for name in (*BEFORE, "move") if name in seen)
    joined = _latest(spans, ("rendezvous",), default=move_start, low=move_start, high=move_end)
    loaded = _latest(spans, ("load weights", "send weights"), default=move_end, low=joined, high=move_end)
    phases = [
        WorkSpan("rendezvous", start, joined),
        WorkSpan("transfer", joined, loaded),
        WorkSpan("verify", loaded, seen["verify"][1]),
    ]
    return (*phases, *(WorkSpan(name, *seen[name]) for name in ("probe", "commit") if name in seen))


def _latest(spans: Iterable[WorkSpan], names: tuple[str, ...], *, default: float, low: float, high: float) -> float:
    """When the last of these ended; never outside `low` to `high`, whatever clock a member has."""
    return min(max(max((span.end_s for span in spans if span.name in names), default=default), low), high)
