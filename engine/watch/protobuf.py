"""Read the fields of a Protocol Buffers message without a schema, for the formats of TensorBoard and W&B.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.base.event_file import I32, I64, LEN, VARINT

_MAX_VARINT_BYTES = 10


class ProtobufError(ValueError):
    """The bytes are not a message."""


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield each field's number and value: an int of 64 bits for a varint, bytes for all others.

    Raises ProtobufError. Groups, which proto3 does not have, are an error.
    """
    position, end = 0, len(data)
    try:
        while position < end:
            # Most varints have one byte.
            tag = data[position]
            position += 1
            if tag >= 0x80:
                tag, position = _varint(data, position - 1)
            kind = tag & 7
            if kind in (LEN, VARINT):
                length = data[position]
                position += 1
                if length >= 0x80:
                    length, position = _varint(data, position - 1)
                if kind == VARINT:
                    yield tag >> 3, length
                    continue
            elif kind in (I64, I32):
                length = 8 if kind == I64 else 4
            else:
                raise ProtobufError(f"unknown wire type {kind}")
            if length > end - position:
                raise ProtobufError("a field is longer than its message")
            yield tag >> 3, data[position : position + length]
            position += length
    except IndexError as error:
        raise ProtobufError("a field is incomplete") from error


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + index + 1
    raise ProtobufError("a varint is incomplete")


def packed_varints(data: bytes) -> Iterator[int]:
    """Yield the integers of a packed repeated field. Raises ProtobufError."""
    position = 0
    while position < len(data):
        value, position = _varint(data, position)
        yield value


def to_signed(value: int) -> int:
    """Return a varint as int64: negative numbers are stored as two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def bytes_of(message: Mapping[int, int | bytes], number: int) -> bytes:
    """Return a field of bytes; b"" if there is none, or one of another type."""
    value = message.get(number)
    return value if isinstance(value, bytes) else b""


def repeated(data: bytes, number: int) -> Iterator[bytes]:
    """Yield the bytes of a field that may be there several times. Raises ProtobufError."""
    return (value for key, value in fields(data) if key == number and isinstance(value, bytes))


def text_of(value: int | bytes) -> str:
    """Return a string field; "" if the field has another type. Invalid UTF-8 is replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
