"""Messages as frames: what goes in comes out, and what is not a message is refused and never run."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offbeat.errors import ProtocolError
from offbeat.rpc import codec, messages
from offbeat.rpc.codec import Envelope, Frame
from offbeat.rpc.messages import Arguments
from offbeat.types import Rollout

SOURCE = Path(codec.__file__).parents[1]


class Inner(msgspec.Struct, frozen=True):
    ids: np.ndarray
    mask: np.ndarray | None = None


class Call(Arguments, frozen=True):
    inner: tuple[Inner, ...]
    extra: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class Newer(msgspec.Struct, frozen=True):
    value: int
    array: np.ndarray
    added_later: str = "x"


class Older(msgspec.Struct, frozen=True):
    value: int


def through(body: Any, kind: Any) -> Any:
    frames = [memoryview(bytes(frame)) for frame in codec.encode("call", body, id=7, method="m")]
    message = codec.decode(frames)
    assert (message.envelope.kind, message.envelope.id, message.envelope.method) == ("call", 7, "m")
    return message.body(kind)


dtypes = st.sampled_from(["?", "i1", "u1", "<i2", ">i4", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", ">f4", "<f8"])
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=6)))


@settings(max_examples=50)
@given(
    st.lists(st.tuples(arrays, st.none() | arrays), max_size=5), st.dictionaries(st.text(), arrays | st.integers(0, 9))
)
def test_arrays_anywhere_survive_the_round_trip(parts: list[tuple[Any, Any]], extra: dict[str, Any]) -> None:
    call = Call(inner=tuple(Inner(*part) for part in parts), extra=extra)
    back = through(call, Call)
    pairs = [(a.ids, b.ids) for a, b in zip(call.inner, back.inner, strict=True)]
    pairs += [(a.mask, b.mask) for a, b in zip(call.inner, back.inner, strict=True)]
    pairs += [(extra[key], back.extra[key]) for key in extra]
    for sent, received in pairs:
        if isinstance(sent, np.ndarray):
            assert received.dtype == sent.dtype.newbyteorder("<")
            assert not received.flags.writeable
            np.testing.assert_array_equal(received, sent)
        else:
            assert received == sent


def test_large_arrays_are_neither_copied_when_sent_nor_when_received() -> None:
    array = np.arange(100_000, dtype=np.int32).reshape(100, 1000)
    frames = codec.encode("call", Inner(array))
    assert len(frames) == 3
    assert np.shares_memory(np.frombuffer(frames[2], np.int32), array)
    back = codec.decode(frames).body(Inner)
    assert np.shares_memory(back.ids, array)
    np.testing.assert_array_equal(back.ids, array)


def test_small_arrays_share_one_frame_and_stay_aligned() -> None:
    frames = codec.encode("call", Call(inner=tuple(Inner(np.arange(n, dtype=np.int64)) for n in range(1, 200))))
    assert len(frames) == 2
    # The transport may put a frame at any address.
    odd = memoryview(b"x" + bytes(frames[1]))[1:]
    back = codec.decode([frames[0], odd]).body(Call)
    assert all(part.ids.flags.aligned for part in back.inner)
    assert [part.ids.sum() for part in back.inner] == [n * (n - 1) // 2 for n in range(1, 200)]


def test_arrays_that_are_not_contiguous_arrive_as_they_look() -> None:
    array = np.arange(60_000, dtype=np.float32).reshape(200, 300).T[::2]
    np.testing.assert_array_equal(through(Inner(array), Inner).ids, array)


def test_a_rollout_costs_12_bytes_a_token_and_little_more() -> None:
    tokens = 10_000
    rollout = Rollout(
        prompt_id="p/1",
        sample_index=0,
        epoch=0,
        prompt_token_ids=np.arange(10, dtype=np.int32),
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=((3, tokens),),
        finish_reason="length",
        engine="engine-0",
        started_s=0.0,
        finished_s=1.0,
    )
    size = sum(len(frame) for frame in codec.encode("reply", rollout))
    assert size < 8 * tokens + 600
    assert through(rollout, Rollout).versions == rollout.versions


def test_scalars_of_numpy_travel_as_numbers() -> None:
    back = through({"a": np.float32(1.5), "b": np.int64(3), "c": np.bool_(True), "d": math.inf}, dict[str, Any])
    assert back == {"a": 1.5, "b": 3, "c": True, "d": math.inf}


def test_arguments_refuse_unknown_fields_and_results_ignore_them() -> None:
    assert through(Newer(1, np.arange(3)), Older) == Older(1)
    with pytest.raises(ProtocolError, match="unknown field `later`"):
        through({"inner": [], "later": 1}, Call)
    with pytest.raises(ProtocolError, match="unknown field"):
        through({"later": 1}, messages.Nothing)


def test_unknown_envelope_fields_are_ignored() -> None:
    envelope = msgspec.msgpack.encode({"kind": "call", "id": 3, "protocol": "offbeat/1", "colour": "green"})
    assert codec.decode([envelope]).envelope == Envelope(kind="call", id=3, protocol="offbeat/1")


def test_another_major_version_is_refused_with_both_named() -> None:
    codec.check_protocol("offbeat/1.7", "engine-0")
    for other in ("offbeat/2", "offbeat/11", "", "x" * 1000):
        with pytest.raises(ProtocolError, match=r"engine-0 speaks protocol .* this side speaks 'offbeat/1'"):
            codec.check_protocol(other, "engine-0")


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([1 + 2j]),
        np.zeros(1, dtype=[("a", "i4")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        "\udcff",
        1 << 70,
        object(),
        lambda: None,
        type("Made", (), {}),
        ValueError("an exception object"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_cannot_travel_is_refused_by_the_sender_B057_B093(value: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        codec.encode("call", {"value": value}, method="m")


def test_a_message_beyond_the_limit_is_refused_on_both_sides() -> None:
    body = Inner(np.zeros(1_000_000, np.uint8))
    with pytest.raises(ProtocolError, match="exceeds the limit of 1000 "):
        codec.encode("call", body, max_bytes=1000)
    frames = codec.encode("call", body)
    with pytest.raises(ProtocolError, match="exceeds the limit of 1000 "):
        codec.decode(frames, max_bytes=1000)
    with pytest.raises(ProtocolError, match="frames exceeds"):
        codec.decode([b""] * (codec.MAX_FRAMES + 1))


def reference(frame: Any, offset: Any, dtype: Any, shape: Any) -> bytes:
    data = msgspec.msgpack.encode([frame, offset, dtype, shape])
    return msgspec.msgpack.encode({"ids": msgspec.msgpack.Ext(1, data)})


@pytest.mark.parametrize(
    "body",
    [
        reference(0, 0, "<i4", [-1]),
        reference(0, 0, "<i4", [5]),
        reference(0, 8, "<i4", [3]),
        reference(0, 4, "<i4", [1]),
        reference(0, -8, "<i4", [1]),
        reference(1, 0, "<i4", [1]),
        reference(1, 8, "<i4", [1]),
        reference(9, 0, "<i4", [1]),
        reference(-1, 0, "<i4", [1]),
        reference(0, 0, "<i4", [1 << 62, 1 << 62]),
        reference(0, 0, "<i4", [1 << 62, 0]),
        reference(0, 0, "<i4", [1] * 40),
        reference(0, 0, "|O", [1]),
        reference(0, 0, "V16", [1]),
        reference(0, 0, "<U4", [1]),
        reference(0, 0, ">i4", [4]),
        reference("a", 0, "<i4", [4]),
        msgspec.msgpack.encode({"ids": msgspec.msgpack.Ext(2, b"")}),
        msgspec.msgpack.encode({"ids": msgspec.msgpack.Ext(1, b"")}),
        msgspec.msgpack.encode({"ids": [1, 2]}),
    ],
)
def test_an_array_reference_that_does_not_fit_is_refused(body: bytes) -> None:
    frames: list[Frame] = [bytes(16), bytes(16)]
    envelope = Envelope(kind="call", frames=(16, 16), body=msgspec.Raw(body))
    message = codec.decode([msgspec.msgpack.encode(envelope), *frames])
    with pytest.raises(ProtocolError):
        message.body(Inner)


HOSTILE = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\x40\x00\x00\x00",
    b"\x91" * 100_000,
    b"\xa4\xff\xfe\xfd\xfc",
    b"\x80\x04\x95cposix\nsystem\n(S'touch /tmp/marker'\ntR.",
    struct.pack(">BI", 0xC9, 1 << 30) + b"\x01",
]


@pytest.mark.parametrize("data", HOSTILE)
def test_hostile_bytes_are_refused_B002_B175(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode([data])
    with pytest.raises(ProtocolError):
        codec.decode([])
    hostile_body = b"".join([b"\x82\xa4kind\xa1x\xa4body", data])
    with pytest.raises(ProtocolError):
        codec.decode([hostile_body]).body(Call)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=300)
def test_random_bytes_raise_protocol_error_and_nothing_else(frames: list[bytes]) -> None:
    try:
        codec.decode(frames).body(Call)
    except ProtocolError:
        return
    pytest.fail("random bytes were taken for a message")


VALID = codec.encode(
    "call", Call(inner=(Inner(np.arange(9, dtype=np.int32)), Inner(np.zeros(20_000, np.float32)))), id=1
)


@given(st.data())
@settings(max_examples=300)
def test_truncated_messages_are_refused(data: st.DataObject) -> None:
    frames = [bytes(frame) for frame in VALID]
    which = data.draw(st.integers(0, len(frames) - 1))
    frames[which] = frames[which][: data.draw(st.integers(0, len(frames[which]) - 1))]
    with pytest.raises(ProtocolError):
        codec.decode(frames).body(Call)


@pytest.mark.parametrize("kept", range(len(VALID)))
def test_a_message_without_its_last_frames_is_refused(kept: int) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(VALID[:kept]).body(Call)
    with pytest.raises(ProtocolError, match="announced"):
        codec.decode([*VALID, b"one more"])


@given(st.data())
@settings(max_examples=300)
def test_mutated_messages_are_refused_or_are_still_valid_values(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in VALID]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frames[0]) - 1))
        frames[0][at] = data.draw(st.integers(0, 255))
    try:
        call = codec.decode(frames).body(Call)
    except ProtocolError:
        return
    held = sum(part.ids.nbytes for part in call.inner)
    assert held <= sum(len(frame) for frame in frames)


FORBIDDEN = re.compile(
    r"\b(import|from)\s+(pickle|cPickle|_pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\b(recv|send)_pyobj\b|(?<![.\w])(eval|exec)\(|\ballow_pickle\s*=\s*True"
)


def test_no_source_file_unpickles_or_evaluates_what_it_is_given_B002() -> None:
    found: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        found += [f"{path.name}: {match.group(0)}" for match in FORBIDDEN.finditer(text)]
        for match in re.finditer(r"\btorch\.load\(", text):
            call = text[match.start() : text.index("\n\n", match.start()) if "\n\n" in text[match.start() :] else None]
            if "weights_only=True" not in call:
                found.append(f"{path.name}: torch.load without weights_only=True")
    assert found == []
    assert FORBIDDEN.search("from pickle import loads")
    assert FORBIDDEN.search("x = eval(text)")
    assert not FORBIDDEN.search("model.eval()")
