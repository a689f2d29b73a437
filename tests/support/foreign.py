"""Files of foreign metrics, byte by byte, for tests that need what a library does not write."""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from engine.watch.event_records import length_checksum
from engine.watch.points import Point
from engine.watch.reading import POLL_BYTES, Source
from engine.watch.wandb_log import BLOCK_BYTES, FILE_HEADER


def varint(value: int) -> bytes:
    """Encode an unsigned integer of 64 bits."""
    value &= (1 << 64) - 1
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, value: int | float | str | bytes) -> bytes:
    """Encode a field of a protocol buffer: an integer as varint, a float as double, text and bytes with a length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def scalar(tag: str, value: float) -> bytes:
    """Encode a `Summary.Value` with a `simple_value`."""
    return field(1, tag) + b"\x15" + struct.pack("<f", value)


def event(step: int, *values: bytes, time: float = 1.8e9) -> bytes:
    """Encode a TensorBoard `Event` with a summary of the values."""
    summary = b"".join(field(1, value) for value in values)
    return field(1, time) + (field(2, step) if step else b"") + field(5, summary)


def session_start(step: int) -> bytes:
    """Encode an `Event` with `SessionLog.START`."""
    return field(1, 1.8e9) + field(2, step) + field(7, field(1, 1))


def frame(record: bytes) -> bytes:
    """Frame a record as TFRecord does, without the checksum of its data."""
    return struct.pack("<QI", len(record), length_checksum(len(record))) + record + bytes(4)


def event_file(*records: bytes) -> bytes:
    """Return the content of an event file."""
    return b"".join(frame(record) for record in records)


def wandb_record(number: int, items: Mapping[str, Any]) -> bytes:
    """Encode a W&B `Record`: 2 is a row of the history, 5 a part of the configuration."""
    parts = (field(1, field(1, key) + field(16, json.dumps(value))) for key, value in items.items())
    return field(number, b"".join(parts))


def wandb_file(rows: Iterable[Mapping[str, Any]] = (), records: Iterable[bytes] = ()) -> bytes:
    """Return the content of a `.wandb` file with records, and with rows of the history after them."""
    data = bytearray(FILE_HEADER)
    for record in [*records, *(wandb_record(2, row) for row in rows)]:
        rest, is_first = record, True
        while is_first or rest:
            room = BLOCK_BYTES - len(data) % BLOCK_BYTES
            if room < 7:
                data += bytes(room)
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if is_first else 4) if not rest else (2 if is_first else 3)
            data += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            is_first = False
    return bytes(data)


def points_of(source: Source, max_bytes: int = POLL_BYTES) -> list[Point]:
    """Poll a source until it has been read to its end, and return all points. Nothing must be dropped."""
    points: list[Point] = []
    for _ in range(10_000):
        reading = source.poll(max_bytes)
        assert reading.drop_from is None
        points += reading.points
        if reading.share >= 1:
            return points
    raise AssertionError("the source was not read to its end")


def values_of(points: Iterable[Point], name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric."""
    return [(point.step, point.value) for point in points if point.name == name]


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for writing, and commit at the end."""
    with closing(sqlite3.connect(path)) as database:
        yield database
        database.commit()
