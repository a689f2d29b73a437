"""Read the scalars and hyperparameters of TensorBoard event files.

An event file has TFRecord framing around `Event` protocol buffers:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details and `event.proto`, `summary.proto`,
`tensor.proto` and `hparams/plugin_data.proto` in https://github.com/tensorflow/tensorboard.

The checksum of a record's length is verified, that of its data is not: CRC-32C of 50 bytes takes longer in Python than
all else. Damaged data is no message, or reads as a message without scalars.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from engine.base.event_file import SESSION_START
from engine.watch.growing_file import FileFolder, GrowingFile
from engine.watch.parameters import flatten
from engine.watch.points import Point, PointColumns, Points
from engine.watch.protobuf import ProtobufError, bytes_of, fields, packed_varints, repeated, text_of, to_signed
from engine.watch.reading import (
    MAX_STEP,
    Listing,
    Log,
    MetricNames,
    Reading,
    Scalar,
    list_folder,
    to_unix_time,
)

MAX_RECORD_BYTES = 1 << 18  # larger records hold images, audio or a graph
MAX_READ_BYTES = 1 << 20
# After a skipped record the next one is likely to be skipped, too.
MIN_READ_BYTES = 1 << 14
MAX_FILES = 1000

_DOUBLE, _FLOAT = struct.Struct("<d"), struct.Struct("<f")
# `SummaryWriter.add_hparams` of torch writes to a subfolder named for the time.
_HPARAMS_FOLDER = re.compile(r"\d{9,11}\.\d+")
# Length of what follows a damaged length: no file has as many bytes. A file server may still write it.
_DAMAGED = 1 << 64
# DataType in `types.proto`: the number of the field with the values, and the format of one value.
_TENSOR_TYPES = {1: (5, "<f"), 2: (6, "<d"), 3: (7, "<i"), 9: (10, "<q"), 14: (13, "<H"), 19: (13, "<e")}
_HALF_TYPE, _BFLOAT16_TYPE = 19, 14


def find(listing: Listing) -> list[Log]:
    """Return the log of a folder with event files. All of its files are one log, as in TensorBoard."""
    files = [listing.folder / name for name in event_files(listing.files)]
    if not files:
        return []
    owned = tuple(name for name in listing.folders if _HPARAMS_FOLDER.fullmatch(name))
    folder = listing.folder
    source = partial(EventFolder, folder)
    list_files, open_until = EventFolder(folder).list_files, partial(EventFolder, folder)
    return [Log("tensorboard", tuple(files), source, "", owned, list_files, open_until)]


def event_files(names: Iterable[str]) -> list[str]:
    """Return the names of event files, in the order in which they were begun."""
    return sorted(name for name in names if ".tfevents." in name or name.endswith(".tfevents"))[:MAX_FILES]


@dataclass
class _Written:
    """What all files of a folder have so far: the latest time and step, the metrics, and the number of writers.

    `latest` is the file that went on where earlier ones had ended, as far as was seen.
    """

    time: float = -math.inf
    step: int = -1
    names: set[str] = field(default_factory=set)
    num_writers: int = 1
    latest: _EventReader | None = None


class EventFolder(FileFolder):
    """Follows the event files of one folder, and of its subfolders with hyperparameters, from the oldest file on."""

    def __init__(self, folder: Path, sizes: Mapping[Path, int] | None = None) -> None:
        """With `sizes`, only these files are read, each up to its size."""
        super().__init__(folder)
        self._written, self._sizes = _Written(), sizes

    def add_files(self) -> None:
        if not self._files:
            self._written = _Written()
        for path in self.list_files():
            if path not in self._files:
                limit = None if self._sizes is None else self._sizes[path]
                self._files[path] = _EventReader(GrowingFile(path, limit), self._names, self._written)

    def list_files(self) -> Iterator[Path]:
        """Yield the event files of the folder and its subfolders."""
        listing = list_folder(self._folder)
        inner = [name for name in listing.folders if _HPARAMS_FOLDER.fullmatch(name)][:MAX_FILES]
        for part in (listing, *(list_folder(self._folder / name) for name in inner)):
            for name in event_files(part.files):
                if self._sizes is None or part.folder / name in self._sizes:
                    yield part.folder / name


class _EventReader:
    """One event file and the position of the first unread record, see `FolderFile`."""

    def __init__(self, file: GrowingFile, names: MetricNames, written: _Written) -> None:
        self.file, self._written = file, written
        self._is_begun = False
        self._group = ""
        """What the names of a further writer begin with."""
        self.problem: str | None = None
        self._names = names
        self._tags: dict[bytes, str | None] = {}
        self.is_held = False

    def poll(self, max_bytes: int, reading: Reading) -> tuple[int, bool]:
        """Add the points of new records, and return the number of bytes read and whether the file was replaced.

        `is_held` then tells that the next record begins a session, which the next poll reads. Raises OSError.
        """
        self.is_held, num_read, wanted, before = False, 0, MIN_READ_BYTES * 4, self.file.offset
        with self.file.opened() as was_replaced:
            while not was_replaced and not self.is_held and num_read < max_bytes and self.file.unread_bytes:
                data = self.file.read(wanted)
                num_read += len(data)
                used, next_record = self._parse(data, reading)
                self.file.offset += used
                if next_record > self.file.unread_bytes or (used == 0 and len(data) < wanted):
                    break  # the last record is incomplete
                if next_record > MAX_RECORD_BYTES:
                    self.file.offset += next_record
                    wanted = MIN_READ_BYTES
                else:
                    wanted = max(min(wanted * 2, MAX_READ_BYTES), next_record)
        # An earlier file that grows has not ended: its writer and that of a later one are two.
        latest = self._written.latest
        is_alive = self._is_begun and latest is not None and latest is not self and self.file.offset > before
        return num_read, was_replaced or is_alive

    def _parse(self, data: bytes, reading: Reading) -> tuple[int, int]:
        """Parse the complete records at the beginning of `data`.

        Return the number of bytes used, and the length of the incomplete record that follows, 0 if it is unknown.
        """
        # It imports numpy, which a search for runs does not need.
        from engine.watch.event_records import FRAME_BYTES, find_records, parse_scalars

        knows_metrics = not self._names.is_empty
        records = find_records(data)
        if records.is_damaged:
            reading.problem = f"{self.file.path.name} is damaged at byte {self.file.offset + records.end:,}"
        scalars = parse_scalars(data, records, self._name_of)
        others, record_of_other = Points(), list[int]()
        end, next_record = records.end, _DAMAGED if records.is_damaged else records.next_bytes
        for index in scalars.other_records:
            start, length = int(records.starts[index]), int(records.lengths[index])
            if length > MAX_RECORD_BYTES:
                continue
            has_points = bool(reading.points or others) or scalars.has_point_before(index)
            event = _Event.parse(data[start : start + length])
            if event.starts_session and (knows_metrics or has_points):
                if has_points or reading.drop_from is not None:
                    self.is_held, end, next_record = True, start - FRAME_BYTES, 0
                    scalars = scalars.before(index)
                    break
                reading.void_from(event.step)
            self._read_event(event, reading, others)
            record_of_other += [index] * (len(others) - len(record_of_other))
        columns = scalars.joined(others, record_of_other)
        if self._is_beside(columns):
            self._written.num_writers += 1
            self._group, self._tags, self._is_begun = f"writer{self._written.num_writers}/", {}, True
            return self._parse(data, reading)
        if self._goes_on(columns):
            if reading.points or reading.drop_from is not None:
                # The next poll voids what this one has read of the files before.
                self.is_held = True
                return 0, 0
            reading.void_from(int(columns.steps[0]))
            self._written.latest = self
        self._note_written(columns)
        reading.points.add_columns(columns)
        return end, next_record

    def _is_beside(self, columns: PointColumns) -> bool:
        """Whether this file begins while an earlier one with its metrics is written: it has another writer."""
        written = self._written
        if self._is_begun or not len(columns) or written.names.isdisjoint(columns.names):
            return False
        return bool(columns.times[0] < written.time and columns.steps[0] <= written.step)

    def _goes_on(self, columns: PointColumns) -> bool:
        """Whether this file begins when the earlier ones have ended, and writes steps of their metrics again."""
        written = self._written
        if self._is_begun or not len(columns) or not written.names.issuperset(columns.names):
            return False
        return bool(columns.times[0] > written.time and columns.steps[0] <= written.step)

    def _note_written(self, columns: PointColumns) -> None:
        if not len(columns):
            return
        self._is_begun, written = True, self._written
        times = columns.times[columns.times == columns.times]  # not NaN
        written.time = max(written.time, float(times.max()) if len(times) else -math.inf)
        written.step = max(written.step, int(columns.steps.max()))
        written.names.update(columns.names)

    def _name_of(self, tag: bytes) -> str | None:
        name = self._tags.get(tag)
        if name is None and (name := self._names.get(self._group + tag.decode(errors="replace"))) is not None:
            self._tags[tag] = name
        return name

    def _read_event(self, event: _Event, reading: Reading, points: Points) -> None:
        """Add the points and hyperparameters of any event."""
        with suppress(ProtobufError):
            for value in repeated(event.summary, 1):
                self._read_value(value, event, reading, points)

    def _read_value(self, data: bytes, event: _Event, reading: Reading, points: Points) -> None:
        """Add one `Summary.Value`: a scalar, a tensor with one number, or hyperparameters."""
        message = dict(fields(data))
        scalar, tensor, metadata = (bytes_of(message, key) for key in (2, 8, 9))
        if metadata:
            plugin, content = _plugin_data(metadata)
            if plugin == "hparams":
                reading.parameters |= _hyperparameters(content)
                return
            if plugin not in ("", "scalars"):
                return
        number = _FLOAT.unpack(scalar)[0] if len(scalar) == 4 else _tensor_number(tensor)
        name = self._name_of(bytes_of(message, 1))
        if number is not None and name is not None and abs(event.step) <= MAX_STEP:
            points.append(Point(name, event.step, number, None, event.wall_time))


class _Event(NamedTuple):
    """The fields of an `Event` that are read, as far as it is a message."""

    wall_time: float | None
    step: int
    summary: bytes
    starts_session: bool

    @classmethod
    def parse(cls, data: bytes) -> _Event:
        message: dict[int, int | bytes] = {}
        starts_session = False
        # The checksum of the data is not verified. What is before damage is kept.
        with suppress(ProtobufError):
            message.update(fields(data))
            starts_session = (1, SESSION_START) in fields(bytes_of(message, 7))
        time, step = bytes_of(message, 1), message.get(2)
        wall_time = to_unix_time(_DOUBLE.unpack(time)[0]) if len(time) == 8 else None
        return cls(wall_time, to_signed(step) if isinstance(step, int) else 0, bytes_of(message, 5), starts_session)


def _plugin_data(metadata: bytes) -> tuple[str, bytes]:
    """Return `plugin_name` and `content` of a `SummaryMetadata`."""
    plugin = dict(fields(bytes_of(dict(fields(metadata)), 1)))
    return text_of(plugin.get(1, b"")), bytes_of(plugin, 2)


def _tensor_number(tensor: bytes) -> float | None:
    """Return the only number of a `TensorProto`, None if it has none or several."""
    message = dict(fields(tensor))
    kind, content, num_values = message.get(1, 0), bytes_of(message, 4), 1
    for size in repeated(bytes_of(message, 2), 2):
        num_values *= next((to_signed(part) for _, part in fields(size) if isinstance(part, int)), 0)
    if num_values != 1 or not isinstance(kind, int) or kind not in _TENSOR_TYPES:
        return None
    field_number, code = _TENSOR_TYPES[kind]
    value = content or message.get(field_number, b"")
    if isinstance(value, bytes):
        if content or code in ("<f", "<d"):
            if len(value) != struct.calcsize(code):
                return None
            unpacked = struct.unpack(code, value)[0]
            return _bfloat16(unpacked) if kind == _BFLOAT16_TYPE else float(unpacked)
        # Integers and float16 are varints, packed or not.
        value = next(packed_varints(value), 0)
    if kind == _HALF_TYPE:
        return float(struct.unpack("<e", (value & 0xFFFF).to_bytes(2, "little"))[0])
    if kind == _BFLOAT16_TYPE:
        return _bfloat16(value & 0xFFFF)
    return float(to_signed(value))


def _bfloat16(bits: int) -> float:
    """Return a bfloat16: the upper half of a float32."""
    return float(_FLOAT.unpack(struct.pack("<I", bits << 16))[0])


def _hyperparameters(content: bytes) -> dict[str, Scalar]:
    """Return the hyperparameters of an `HParamsPluginData`, whose `session_start_info` has a map of them."""
    found: dict[str, object] = {}
    for info in repeated(content, 3):
        for entry in map(dict, map(fields, repeated(info, 1))):
            found[text_of(entry.get(1, b""))] = _json_value(bytes_of(entry, 2))
    return flatten(found)


def _json_value(data: bytes) -> Scalar:
    """Return a scalar `google.protobuf.Value`, None for a list or an object."""
    message = dict(fields(data))
    if len(number := bytes_of(message, 2)) == 8:
        value = float(_DOUBLE.unpack(number)[0])
        return int(value) if value.is_integer() else value
    if 3 in message:
        return text_of(message[3])
    if 4 in message:
        return bool(message[4])
    return None
