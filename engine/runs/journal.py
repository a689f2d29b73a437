"""Reads and writes `events.jsonl`: one JSON object per line, append-only, a torn last line tolerated."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from engine.runs.events import EVENT_TYPES, Event
from engine.runs.records import LARGEST, GpuSample, RankDevice, RankEpochTiming, RankPeakMemory
from engine.utils.files import open_regular_file

READ_CHUNK_BYTES = 1 << 20


# What JSON may hold for a field of each type; a number that JSON cannot hold is null.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float, type(None)),
    "str": (str,),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
}


# Fields that are lists of objects, and what makes records of these.
OBJECT_LIST_FIELDS: Mapping[str, Callable[[list[dict[str, Any]]], list[Any]]] = {
    "ranks": RankDevice.from_objects,
    "gpus": GpuSample.from_objects,
    "memory": RankPeakMemory.from_objects,
    "work": RankEpochTiming.from_objects,
}


_FIELD_TYPES = {
    name: {part.name: _JSON_TYPES[str(part.type).partition("[")[0]] for part in fields(kind)} | {"time": (int, float)}
    for name, kind in EVENT_TYPES.items()
}


def _nonfinite_to_none(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_nonfinite_to_none(part) for part in value]
    return value


def to_line(event: Event) -> str:
    """The event as one line of JSON, without the line's end."""
    values = asdict(event)
    ordered = {"type": event.type, "time": round(values.pop("time"), 3)}
    return json.dumps(ordered | {key: _nonfinite_to_none(value) for key, value in values.items()}, allow_nan=False)


def from_line(line: str) -> Event | None:
    """The event of a line of JSON; None for a torn line, an unknown type, or one that lacks a field or has one of
    another type."""
    try:
        values = json.loads(line, parse_constant=_constant_to_none)
        name = values["type"]
        known = _FIELD_TYPES[name]
        kept = {key: value for key, value in values.items() if key in known}
        # What happened now knows its time by itself; what is read does not.
        if "time" not in kept or not all(
            isinstance(value, known[key]) and _in_range(value) for key, value in kept.items()
        ):
            return None
        for field in OBJECT_LIST_FIELDS.keys() & kept.keys():
            if not all(isinstance(one, dict) for one in kept[field]):
                return None
            kept[field] = OBJECT_LIST_FIELDS[field](kept[field])
        return EVENT_TYPES[name](**kept)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _constant_to_none(_: str) -> None:
    """Python's JSON reads NaN and Infinity, which are no JSON."""


def _in_range(value: Any) -> bool:
    """Whether a number is one that can be computed with."""
    return not isinstance(value, int | float) or -LARGEST < value < LARGEST


class Journal:
    """Appends events to a file, each with one write. Raises OSError where the disk does not take them."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        # A line that a crash left torn is ended first, or it would take the next one with it.
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def append(self, event: Event) -> None:
        data = ("\n" if self._torn else "") + to_line(event) + "\n"
        encoded = data.encode()
        self._torn = True
        self._torn = os.write(self._file, encoded) != len(encoded)

    def sync(self) -> None:
        """Returns when what was appended is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class JournalReader:
    """Reads the events that were appended since the last look. `offset` is where the next look begins, in bytes; it may
    be set, to the beginning of a line, before the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        self._partial_line = b""

    def poll(self, max_bytes: int | None = None) -> Iterator[Event]:
        """The events of the lines that are whole by now, of `max_bytes` bytes where given; none where there is no
        journal yet. Of a long journal no more than a piece is in memory."""
        try:
            with open_regular_file(self._path) as file:
                end = os.fstat(file.fileno()).st_size
                end = end if max_bytes is None else min(end, self.offset + max_bytes)
                file.seek(self.offset)
                while data := file.read(min(max(end - self.offset, 0), READ_CHUNK_BYTES)):
                    self.offset += len(data)
                    *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                    for line in lines:
                        event = from_line(line.decode(errors="replace"))
                        if event is not None:
                            yield event
        except OSError:
            return
