"""Read the history and the configuration of W&B's offline runs, `run-ID.wandb`.

The file is a log of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes,
with the CRC-32 of zlib as checksum. Its records are `Record` messages of
https://github.com/wandb/wandb/blob/main/wandb/proto/wandb_internal.proto.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.watch.growing_file import RowFile
from engine.watch.parameters import flatten, without_wandb_keys
from engine.watch.protobuf import ProtobufError, bytes_of, fields, text_of
from engine.watch.reading import MAX_ROW_VALUES, Columns, Listing, Log, Reading, flat_numbers, parse_json, row_points

FILE_HEADER = b":W&B\xe1\xbe\x00"
BLOCK_BYTES = 1 << 15
MAX_RECORD_BYTES = 1 << 20
MAX_FLOAT_DIGITS = 30
_HEADER = struct.Struct("<IHB")
_HEADER_BYTES = _HEADER.size
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Fields of `Record`, `RunRecord` and of the items of history and configuration.
_HISTORY, _CONFIG, _RUN, _EXIT = 2, 5, 17, 18
_RUN_CONFIG = 4
_ITEM, _KEY, _NESTED_KEY, _VALUE_JSON = 1, 1, 2, 16


def find(listing: Listing) -> list[Log]:
    """Return a log for each `.wandb` file of a folder."""
    return [_log(listing.folder / name) for name in listing.files if name.endswith(".wandb")]


def _log(path: Path) -> Log:
    return Log("wandb", (path,), lambda: WandbLog(path))


class WandbLog(RowFile):
    """Follows one `.wandb` file. Records that are damaged or too large are passed over."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts = b""
        self._is_joining = self._has_ended = False
        self._damage = ""

    def restart(self) -> None:
        self._parts, self._is_joining, self._has_ended, self._damage = b"", False, False, ""

    @property
    def problem(self) -> str | None:
        return self._damage or super().problem

    def read(self, max_bytes: int, reading: Reading) -> None:
        data = self._file.read(max(max_bytes, 2 * BLOCK_BYTES))
        if self._file.offset == 0 and len(data) >= len(FILE_HEADER) and not data.startswith(FILE_HEADER):
            reading.problem = f"{self._file.path.name} is no W&B file of version 0"
        else:
            self._file.offset += self._parse(data, reading)
        reading.has_ended = self._has_ended

    def _parse(self, data: bytes, reading: Reading) -> int:
        """Read the complete fragments at the beginning of `data`, and return their number of bytes."""
        base, end = self._file.offset, len(data)
        position = len(FILE_HEADER) if base == 0 and end >= len(FILE_HEADER) else 0
        while True:
            left_in_block = BLOCK_BYTES - (base + position) % BLOCK_BYTES
            if left_in_block < _HEADER_BYTES:
                if position + left_in_block > end:
                    return position
                position += left_in_block
                continue
            if position + _HEADER_BYTES > end:
                return position
            checksum, length, kind = _HEADER.unpack_from(data, position)
            after = position + _HEADER_BYTES + length
            if length > left_in_block - _HEADER_BYTES:
                kind = 0  # no fragment crosses a block
            elif after > end:
                return position
            content = data[position + _HEADER_BYTES : after]
            crc = zlib.crc32(content, zlib.crc32(bytes((kind,))))
            if not _FULL <= kind <= _LAST or crc != checksum:
                if position + left_in_block > end:
                    return position  # the writer may not have finished the block
                self._damage = self._damage or f"{self._file.path.name} is damaged at byte {base + position:,}"
                position, self._is_joining = position + left_in_block, False
                continue
            position = after
            self._add_fragment(kind, content, reading)

    def _add_fragment(self, kind: int, content: bytes, reading: Reading) -> None:
        if kind in (_FULL, _FIRST):
            self._parts, self._is_joining = b"", True
        if not self._is_joining:
            return
        if len(self._parts) + len(content) > MAX_RECORD_BYTES:
            self._parts, self._is_joining = b"", False
            return
        self._parts = self._parts + content if self._parts else content
        if kind in (_FULL, _LAST):
            record, self._parts, self._is_joining = self._parts, b"", False
            try:
                self._read_record(record, reading)
            except ProtobufError:
                self._damage = self._damage or f"{self._file.path.name} has a record that is damaged"

    def _read_record(self, record: bytes, reading: Reading) -> None:
        """Read a `Record`: a row of the history, a part of the configuration, or the exit. Raises ProtobufError."""
        message = dict(fields(record))
        if _HISTORY in message:
            row = flat_numbers(dict(_items(bytes_of(message, _HISTORY))))
            reading.points.extend(row_points(row, Columns.find(row), self._num_rows, self._names))
            self._num_rows += 1
        self._has_ended = self._has_ended or _EXIT in message
        configs = bytes_of(message, _CONFIG), bytes_of(dict(fields(bytes_of(message, _RUN))), _RUN_CONFIG)
        for config in filter(None, configs):
            self._update_config(config, reading)

    def _update_config(self, data: bytes, reading: Reading) -> None:
        reading.parameters |= flatten(without_wandb_keys(dict(_items(data))))


def _items(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a `HistoryRecord` or a `ConfigRecord`. Nested keys are joined with dots."""
    num_items = 0
    for number, item in fields(data):
        if number != _ITEM or not isinstance(item, bytes) or num_items == MAX_ROW_VALUES:
            continue
        num_items += 1
        key, nested, text = "", [], b""
        for part, value in fields(item):
            if part == _KEY:
                key = text_of(value)
            elif part == _NESTED_KEY:
                nested.append(text_of(value))
            elif part == _VALUE_JSON and isinstance(value, bytes):
                text = value
        yield key or ".".join(nested), _parse_json(text)


def _parse_json(text: bytes) -> Any:
    """Return a JSON value, None if it is damaged."""
    # Most values are numbers. With `float`, reading takes a quarter less time. An integer keeps its type.
    if len(text) < MAX_FLOAT_DIGITS and b"." in text and text[-1:].isdigit():
        try:
            return float(text)
        except ValueError:
            pass
    return parse_json(text)
