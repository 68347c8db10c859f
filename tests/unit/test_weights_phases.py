"""Phases of a transfer from what controller and members saw."""

from __future__ import annotations

import itertools

from offbeat.rpc.messages import WeightsMoved, WorkSpan
from offbeat.weights.phases import sync_phases

SEEN = {
    "offer": (10.0, 11.0),
    "prepare": (11.0, 12.0),
    "move": (12.0, 20.0),
    "verify": (20.0, 20.5),
    "commit": (21.0, 22.0),
}


def moved(*spans: WorkSpan) -> WeightsMoved:
    return WeightsMoved(version=1, digests=(), bytes_moved=0, seconds=1.0, spans=spans)


def test_a_phase_lasts_until_the_slowest_member_is_through() -> None:
    trainer = moved(WorkSpan("rendezvous", 12.0, 13.0), WorkSpan("send weights", 13.0, 17.0))
    engine = moved(
        WorkSpan("rendezvous", 12.0, 14.0), WorkSpan("load weights", 14.0, 18.0), WorkSpan("digest", 18.0, 19.0)
    )
    phases = sync_phases(SEEN, [trainer, engine])
    assert phases == (
        WorkSpan("rendezvous", 10.0, 14.0),
        WorkSpan("transfer", 14.0, 18.0),
        WorkSpan("verify", 18.0, 20.5),
        WorkSpan("commit", 21.0, 22.0),
    )
    probed = sync_phases({**SEEN, "probe": (20.5, 21.0)}, [trainer, engine])
    assert probed[3] == WorkSpan("probe", 20.5, 21.0)


def test_a_member_that_tells_nothing_leaves_all_of_the_move_to_the_transfer() -> None:
    phases = {span.name: (span.start_s, span.end_s) for span in sync_phases(SEEN, [moved(), moved()])}
    assert phases["rendezvous"] == (10.0, 12.0)
    assert phases["transfer"] == (12.0, 20.0)


def test_a_member_with_another_clock_cannot_move_a_phase_out_of_the_transfer() -> None:
    for shift in (-1e6, 1e6):
        strange = moved(WorkSpan("rendezvous", shift, shift + 1), WorkSpan("load weights", shift + 1, shift + 2))
        phases = sync_phases(SEEN, [strange])
        assert all(10.0 <= span.start_s <= span.end_s <= 22.0 for span in phases)
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(phases))
