"""Messages as frames: one msgpack envelope, then raw array frames. No pickle, and nothing in a message is ever run.

    frame 0   envelope   protocol, kind, id, method, sizes of the frames that follow, body (msgpack)
    frame 1   packed     every array below 64 KiB, one after the other, each at a multiple of 8 bytes
    frame 2…  large      one array each, sent and received without a copy

An array anywhere inside a body is replaced by a reference (frame, offset, dtype, shape). Only fixed-size numeric types
travel, little-endian. Received arrays are read-only views of the frames: copy one to keep it longer than its message
or to write to it. An array that was sent must not be written to afterwards (large ones are not copied).

Everything that arrives is checked before it is used: sizes against the envelope, references against the frames, the
total against the limit. Whatever does not fit raises `ProtocolError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from offbeat.errors import ProtocolError

PROTOCOL = "offbeat/1"
MAX_MESSAGE_BYTES = 1 << 30
MAX_DIMENSIONS = 16
MAX_FRAMES = 1 << 15
PACK_BELOW_BYTES = 1 << 16
_ALIGNMENT = 8
_ARRAY_EXTENSION = 1

_DTYPES: dict[str, np.dtype[Any]] = {
    code: np.dtype(code)
    for code in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}

Frame = bytes | bytearray | memoryview
T = TypeVar("T")
_MALFORMED = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Frame 0. Unknown fields are ignored, so that a newer peer of the same major version can say more."""

    protocol: str = ""
    kind: str
    id: int = 0
    """Of the call; 0 where a message belongs to none."""
    method: str = ""
    frames: tuple[int, ...] = ()
    """Bytes of each frame that follows."""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class _Reference(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    frame: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Message:
    """One received message whose envelope and sizes are already checked; `body` decodes the rest."""

    def __init__(self, envelope: Envelope, frames: Sequence[Frame]) -> None:
        self.envelope = envelope
        self.frames = frames

    def body(self, kind: type[T]) -> T:
        """The body as `kind`, its arrays read-only views of the frames.

        Raises:
            ProtocolError: the body is not a `kind`, or an array reference does not fit its frame.
        """
        arrays = _Arrays(self.frames)
        try:
            return msgspec.msgpack.decode(
                self.envelope.body, type=kind, ext_hook=arrays.extension, dec_hook=arrays.convert
            )
        except _MALFORMED as error:
            what = self.envelope.method or self.envelope.kind
            raise ProtocolError(f"{what[:80]!r}: not a valid {kind.__name__}: {str(error)[:500]}") from error


def encode(kind: str, body: Any, *, id: int = 0, method: str = "", max_bytes: int = MAX_MESSAGE_BYTES) -> list[Frame]:
    """The frames of one message.

    Raises:
        ProtocolError: something in `body` cannot travel (its type, a dtype, a lone surrogate, an integer beyond
            64 bits), or the message is larger than `max_bytes`.
    """
    packer = _Packer()
    try:
        encoded = msgspec.msgpack.encode(body, enc_hook=packer.replace)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, NotImplementedError) as error:
        raise ProtocolError(f"{method or kind!r} cannot be sent: {str(error)[:500]}") from error
    frames = packer.frames()
    envelope = Envelope(
        protocol=PROTOCOL,
        kind=kind,
        id=id,
        method=method,
        frames=tuple(len(frame) for frame in frames),
        body=msgspec.Raw(encoded),
    )
    message = [msgspec.msgpack.encode(envelope), *frames]
    _check_size(sum(len(frame) for frame in message), len(message), max_bytes)
    return message


def decode(frames: Sequence[Frame], *, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Checks sizes and opens the envelope; the body stays closed until its type is known.

    Raises:
        ProtocolError: the frames are not a message of this protocol.
    """
    if not frames:
        raise ProtocolError("an empty message")
    _check_size(sum(len(frame) for frame in frames), len(frames), max_bytes)
    try:
        envelope = msgspec.msgpack.decode(frames[0], type=Envelope)
    except _MALFORMED as error:
        raise ProtocolError(f"not an offbeat message: {str(error)[:500]}") from error
    sizes = tuple(len(frame) for frame in frames[1:])
    if sizes != envelope.frames:
        raise ProtocolError(
            f"{envelope.kind[:80]!r}: {len(sizes)} array frames of {sum(sizes)} bytes arrived, "
            f"{len(envelope.frames)} of {sum(envelope.frames)} were announced"
        )
    return Message(envelope, frames[1:])


def check_protocol(theirs: str, who: str) -> None:
    """Raises `ProtocolError` that names both versions unless the major versions are equal."""
    if _major(theirs) != _major(PROTOCOL):
        raise ProtocolError(
            f"{who} speaks protocol {theirs[:40]!r}, this side speaks {PROTOCOL!r}: "
            "install the same offbeat on both sides"
        )


def _major(protocol: str) -> str:
    return protocol.partition(".")[0]


def _check_size(total: int, count: int, max_bytes: int) -> None:
    if total > max_bytes:
        raise ProtocolError(f"a message of {total} bytes exceeds the limit of {max_bytes} (max_message_bytes)")
    if count > MAX_FRAMES:
        raise ProtocolError(f"a message of {count} frames exceeds the limit of {MAX_FRAMES}")


class _Packer:
    """Takes the arrays out of a body: the encoder's hook calls `replace` for each, in order."""

    def __init__(self) -> None:
        self._packed = bytearray()
        self._large: list[memoryview] = []

    def replace(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._reference(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(
            f"values of type {type(value).__qualname__} do not travel; send numbers, texts, structs or arrays"
        )

    def _reference(self, value: np.ndarray) -> msgspec.msgpack.Ext:
        little = value.dtype.newbyteorder("<")
        if little.str not in _DTYPES:
            raise TypeError(f"arrays of dtype {value.dtype} do not travel; known are {', '.join(_DTYPES)}")
        if value.ndim > MAX_DIMENSIONS:
            raise TypeError(f"an array of {value.ndim} dimensions; at most {MAX_DIMENSIONS} travel")
        array = np.ascontiguousarray(value, dtype=little)
        frame, offset = 0, 0
        if array.nbytes < PACK_BELOW_BYTES:
            offset = len(self._packed) + -len(self._packed) % _ALIGNMENT
            self._packed.extend(bytes(offset - len(self._packed)))
            self._packed.extend(array.tobytes())
        else:
            self._large.append(array.reshape(-1).view(np.uint8).data)
            frame = len(self._large)
        reference = _Reference(frame, offset, little.str, tuple(value.shape))
        return msgspec.msgpack.Ext(_ARRAY_EXTENSION, msgspec.msgpack.encode(reference))

    def frames(self) -> list[Frame]:
        """The packed frame (index 0, present whenever any large one is) and the large ones."""
        return [self._packed, *self._large] if self._packed or self._large else []


class _Arrays:
    """Puts arrays back in: the decoder's hooks. Every reference is checked against the frames that arrived."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self._bytes: dict[int, np.ndarray] = {}

    def extension(self, code: int, data: memoryview) -> np.ndarray:
        if code != _ARRAY_EXTENSION:
            raise ValueError(f"unknown extension type {code}")
        return self._view(msgspec.msgpack.decode(data, type=_Reference))

    def convert(self, kind: type, value: Any) -> Any:
        if kind is np.ndarray and isinstance(value, np.ndarray):
            return value
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")

    def _view(self, reference: _Reference) -> np.ndarray:
        dtype = _DTYPES.get(reference.dtype)
        if dtype is None:
            raise ValueError(f"array dtype {reference.dtype[:40]!r} is not allowed")
        if len(reference.shape) > MAX_DIMENSIONS or any(size < 0 for size in reference.shape):
            raise ValueError(f"array shape {reference.shape[:MAX_DIMENSIONS]} is not possible")
        count = 1
        for size in reference.shape:
            count *= size
        need = count * dtype.itemsize
        if need == 0:
            return _frozen(_empty(reference.shape, dtype))
        if not 0 <= reference.frame < len(self._frames):
            raise ValueError(f"array in frame {reference.frame} of {len(self._frames)}")
        have = len(self._frames[reference.frame])
        exact = reference.frame > 0
        if reference.offset < 0 or reference.offset % _ALIGNMENT or (exact and reference.offset):
            raise ValueError(f"array offset {reference.offset} is not possible")
        if reference.offset + need > have or (exact and need != have):
            raise ValueError(f"array of {need} bytes at {reference.offset} does not fit its frame of {have} bytes")
        raw = self._aligned(reference.frame)[reference.offset : reference.offset + need]
        return _frozen(raw.view(dtype).reshape(reference.shape))

    def _aligned(self, frame: int) -> np.ndarray:
        """The frame's bytes; copied once where the transport put them at an odd address."""
        if frame not in self._bytes:
            raw = np.frombuffer(self._frames[frame], dtype=np.uint8)
            self._bytes[frame] = raw if raw.ctypes.data % _ALIGNMENT == 0 else raw.copy()
        return self._bytes[frame]


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """numpy refuses some shapes even with a zero in them: the product of the others must be addressable."""
    if any(size > 1 << 40 for size in shape):
        raise ValueError(f"array shape {shape} is not possible")
    return np.empty(shape, dtype=dtype)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
