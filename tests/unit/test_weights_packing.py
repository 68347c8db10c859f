"""The packing plan: every byte once, in order, within its bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import WeightSyncError
from offbeat.rpc.messages import TensorEntry
from offbeat.weights.packing import ALIGN, ITEM_BYTES, entry_bytes, pack, phase_of

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
ENTRIES = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(ITEM_BYTES))), max_size=12).map(
    lambda rows: tuple(TensorEntry(f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(rows))
)


@given(ENTRIES, st.integers(ALIGN, 5000))
def test_every_byte_is_carried_once_in_manifest_order(entries: tuple[TensorEntry, ...], bucket_bytes: int) -> None:
    plan = pack(entries, bucket_bytes)
    position = dict.fromkeys(range(len(entries)), 0)
    last = 0
    for bucket in plan:
        assert bucket.pieces
        assert bucket.size <= bucket_bytes
        used = 0
        for piece in bucket.pieces:
            assert piece.size > 0
            assert piece.entry >= last
            assert piece.start == position[piece.entry]
            assert piece.start % ALIGN == piece.offset % ALIGN == 0
            assert piece.offset >= used
            assert piece.size % ITEM_BYTES[entries[piece.entry].dtype] == 0
            position[piece.entry] += piece.size
            used, last = piece.offset + piece.size, piece.entry
        assert used == bucket.size
    assert position == {index: entry_bytes(entry) for index, entry in enumerate(entries)}


@given(ENTRIES, st.integers(ALIGN, 5000))
def test_a_tensor_is_split_only_if_it_is_larger_than_a_bucket(entries: tuple[TensorEntry, ...], size: int) -> None:
    pieces = [piece.entry for bucket in pack(entries, size) for piece in bucket.pieces]
    for index in set(pieces):
        if entry_bytes(entries[index]) <= size - size % ALIGN:
            assert pieces.count(index) == 1


def test_the_plan_depends_on_what_the_sender_states_and_nothing_else_B165() -> None:
    entries = (TensorEntry("a", (1000,), "float32"), TensorEntry("b", (3,), "bfloat16"))
    assert pack(entries, 1024) == pack(entries, 1024)
    assert [len(b.pieces) for b in pack(entries, 1024)] == [1, 1, 1, 2]


def test_a_bucket_too_small_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="at least 64"):
        pack((), 63)


@pytest.mark.parametrize("entry", [TensorEntry("x", (2,), "foo16"), TensorEntry("x", (-1,), "float32")])
def test_what_cannot_be_sent_is_named(entry: TensorEntry) -> None:
    with pytest.raises(WeightSyncError, match="'x'"):
        pack((entry,), 1024)


def test_a_phase_names_the_bucket_and_its_tensors_B169() -> None:
    entries = (TensorEntry("first", (4,), "float32"), TensorEntry("second", (4,), "float32"))
    assert phase_of("sending", 0, pack(entries, 1024), entries) == "sending bucket 1 of 1 (first … second)"
