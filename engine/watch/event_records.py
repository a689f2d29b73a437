"""Parse the records of a TensorBoard event file many at once: the framing, and events with one scalar.

`tensorboard` reads the files and parses all other events one by one. The formats are named there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.base.event_file import masked_crc32c
from engine.watch.points import PointColumns, Points
from engine.watch.reading import UNIX_TIMES

FRAME_BYTES = 12
"""Length of a record's data as uint64, and its checksum."""
FRAMING_BYTES = FRAME_BYTES + 4
"""The checksum of the data follows them."""
_LENGTH = struct.Struct("<Q")
# Keys of `Event.wall_time`, `step` and `summary`, of `Summary.value`, and of `Value.tag` and `simple_value`.
_WALL_TIME, _STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE_VALUE = 0x09, 0x10, 0x2A, 0x0A, 0x0A, 0x15
_MAX_STEP_BYTES = 8
# The shortest event with a scalar: time, keys and lengths of summary, value and tag, and the number.
_MIN_EVENT_BYTES = 20
Number = TypeVar("Number", np.uint32, np.float32, np.float64)
# The rest of a buffer, so that an index beyond the end of a short record is valid.
_PADDING = bytes(64)


@dataclass(frozen=True, slots=True)
class Records:
    """The complete records at the beginning of a buffer."""

    starts: NDArray[np.int64]
    """Position of the data of each record."""
    lengths: NDArray[np.int64]
    end: int
    """Where the next record begins."""
    next_bytes: int
    """Number of bytes of the incomplete record that follows, 0 if it is unknown."""
    is_damaged: bool
    """Whether what follows is no record."""


def find_records(data: bytes) -> Records:
    """Find the records of a buffer. The checksums of their lengths are verified."""
    position, end, starts, next_bytes = 0, len(data), list[int](), 0
    unpack = _LENGTH.unpack_from
    while end - position >= FRAME_BYTES:
        after = position + unpack(data, position)[0] + FRAMING_BYTES
        if after > end:
            next_bytes = after - position
            break
        starts.append(position)
        position = after
    bounds = np.array([*starts, position], np.int64)
    lengths = np.diff(bounds) - FRAMING_BYTES
    buffer = np.frombuffer(data, np.uint8)
    is_valid = _numbers(buffer, bounds[:-1] + 8, np.uint32) == _checksums(lengths)
    if not is_valid.all():
        num_valid = int(is_valid.argmin())
        return Records(bounds[:num_valid] + FRAME_BYTES, lengths[:num_valid], int(bounds[num_valid]), 0, True)
    if next_bytes:
        length = next_bytes - FRAMING_BYTES
        checksum = int.from_bytes(data[position + 8 : position + FRAME_BYTES], "little")
        if checksum != length_checksum(length):
            return Records(bounds[:-1] + FRAME_BYTES, lengths, position, 0, True)
    return Records(bounds[:-1] + FRAME_BYTES, lengths, position, next_bytes, False)


def _checksums(lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    different, index = np.unique(lengths, return_inverse=True)
    return np.array([length_checksum(length) for length in different.tolist()], np.uint32)[index]


@lru_cache(maxsize=4096)
def length_checksum(length: int) -> int:
    """Return the checksum of the length of a record."""
    return masked_crc32c(length.to_bytes(8, "little"))


@dataclass(frozen=True, slots=True)
class Scalars:
    """The points of the records that are events with one scalar."""

    columns: PointColumns
    record_of_point: NDArray[np.int64]
    """Index of the record that a point comes from, in ascending order."""
    other_records: list[int]
    """Indices of the records that are something else."""

    def has_point_before(self, record: int) -> bool:
        """Whether an earlier record has a point."""
        return len(self.record_of_point) > 0 and bool(self.record_of_point[0] < record)

    def before(self, record: int) -> Scalars:
        """Return the points of earlier records."""
        rows = np.arange(np.searchsorted(self.record_of_point, record))
        return Scalars(self.columns.at(rows), self.record_of_point[rows], self.other_records)

    def joined(self, others: Points, record_of_other: Sequence[int]) -> PointColumns:
        """Return these points and those of the other records, in the order of the records."""
        if not others:
            return self.columns
        columns = PointColumns.joined([self.columns, others.columns()])
        return columns.at(np.argsort(np.append(self.record_of_point, record_of_other), kind="stable"))


def parse_scalars(data: bytes, records: Records, name_of: Callable[[bytes], str | None]) -> Scalars:
    """Parse the events that consist of a wall time, a step, and one `simple_value`.

    `name_of` returns the name of a tag, None if it is refused.
    """
    buffer = np.frombuffer(data + _PADDING, np.uint8)
    rows = np.flatnonzero(records.lengths >= _MIN_EVENT_BYTES)
    starts = records.starts[rows]
    steps, step_ends, is_scalar = _read_steps(buffer, starts)
    # Positions behind a step that is none may be beyond the buffer.
    step_ends = np.minimum(step_ends, len(data))
    tag_lengths = buffer[step_ends + 5].astype(np.int64)
    tag_starts = step_ends + 6
    value_starts = tag_starts + tag_lengths
    ends = starts + records.lengths[rows]
    is_scalar &= (
        (buffer[starts] == _WALL_TIME)
        & (buffer[step_ends] == _SUMMARY)
        & (buffer[step_ends + 1] == tag_lengths + 9)
        & (buffer[step_ends + 2] == _VALUE)
        & (buffer[step_ends + 3] == tag_lengths + 7)
        & (buffer[step_ends + 4] == _TAG)
        # Lengths from 128 on have two bytes.
        & (tag_lengths + 9 < 0x80)
        & (value_starts + 5 == ends)
    )
    is_scalar[is_scalar] = buffer[value_starts[is_scalar]] == _SIMPLE_VALUE
    rows, starts, steps = rows[is_scalar], starts[is_scalar], steps[is_scalar]
    tag_starts, value_starts = tag_starts[is_scalar], value_starts[is_scalar]
    is_other = np.ones(len(records.starts), bool)
    is_other[rows] = False
    tags = [data[start:end] for start, end in zip(tag_starts.tolist(), value_starts.tolist(), strict=True)]
    names = {tag: name_of(tag) for tag in dict.fromkeys(tags)}
    indices = {name: index for index, name in enumerate(dict.fromkeys(name for name in names.values() if name))}
    index_of_tag = {tag: indices.get(name or "", -1) for tag, name in names.items()}
    name_index = np.fromiter(map(index_of_tag.__getitem__, tags), np.int16, len(tags))
    times = _numbers(buffer, starts + 1, np.float64)
    times[~((times >= UNIX_TIMES[0]) & (times <= UNIX_TIMES[1]))] = np.nan
    values = _numbers(buffer, value_starts + 1, np.float32).astype(np.float64)
    has_name = name_index >= 0
    columns = PointColumns(
        tuple(indices),
        name_index[has_name],
        steps[has_name],
        values[has_name],
        np.full(int(has_name.sum()), np.nan),
        times[has_name],
    )
    return Scalars(columns, rows[has_name], np.flatnonzero(is_other).tolist())


def _read_steps(
    buffer: NDArray[np.uint8], starts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the steps of events, the positions behind them, and which of them have a step of at most 8 bytes.

    A step of 0 may be missing.
    """
    positions = starts + 9
    has_step = buffer[positions] == _STEP
    steps, is_open = np.zeros(len(starts), np.int64), has_step.copy()
    positions = positions + has_step
    for index in range(_MAX_STEP_BYTES):
        if not is_open.any():
            break
        byte = buffer[positions].astype(np.int64)
        steps |= np.where(is_open, byte & 0x7F, 0) << (7 * index)
        positions = positions + is_open
        is_open &= byte >= 0x80
    return steps, positions, ~is_open


def _numbers(buffer: NDArray[np.uint8], starts: NDArray[np.int64], kind: type[Number]) -> NDArray[Number]:
    """Return the little-endian number at each position."""
    stored = np.dtype(kind).newbyteorder("<")
    parts = buffer[starts[:, None] + np.arange(stored.itemsize)]
    numbers: NDArray[Number] = parts.view(stored).reshape(-1).astype(kind, copy=False)
    return numbers
