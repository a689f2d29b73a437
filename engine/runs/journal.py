"""Read and write the journal, `events.jsonl`: append-only, one JSON object per line.

`engine.runs.events` defines the format. A last line that a crash left incomplete is ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

from engine.runs.events import (
    CheckpointSaved,
    ConfigRejected,
    ControlEvent,
    EpochEvent,
    Event,
    FlushJournal,
    GpuEvent,
    GpusGranted,
    PhaseChanged,
    Profiled,
    RankFailed,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    StepEvent,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.records import LARGEST, GpuSample, RankDevice, RankEpochTiming, RankPeakMemory
from engine.utils.files import append_to_file, open_regular_file, replace_file

READ_CHUNK_BYTES = 1 << 20
# From this size, a journal is parsed with pydantic-core: three times as fast, but its import takes 20 ms.
BULK_BYTES = 1 << 18
# Longer lines are skipped. `run_started` has 1.1 MB for 8,192 ranks, `step` 20 bytes for each step of `run.log_every`.
MAX_LINE_BYTES = 1 << 24
# What a full disk does not take waits in memory. Beyond this size, readings that come often are dropped.
MAX_UNWRITTEN_BYTES = 1 << 26
DROPPED_TYPES = frozenset({StepEvent.type, GpuEvent.type, PhaseChanged.type})
# Disk space that is kept for the last events of a run: it must not look crashed because its disk is full. A part of it
# is for its summary and the end of its log.
RESERVED_BYTES, RESERVED_JOURNAL_BYTES = 1 << 16, 3 << 14
# Replaces the beginning of a line that is too long. It is not JSON, so neither is the line.
_SKIPPED_BEGINNING = b"\0"


# Other events, which only the terminal shows, are never read.
EVENT_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        RunStarted,
        RunResumed,
        StepEvent,
        EpochEvent,
        GpuEvent,
        CheckpointSaved,
        WarningEvent,
        WaitingForGpus,
        GpusGranted,
        ControlEvent,
        RunPaused,
        RunContinued,
        Profiled,
        PhaseChanged,
        RankFailed,
        RunFinished,
        ConfigRejected,
        FlushJournal,
    )
}
# JSON types that are accepted for each field type. A non-finite float is null in JSON.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float, type(None)),
    "str": (str,),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
}
# JSON types that are accepted for the elements of lists and the values of dicts.
_ELEMENT_TYPES: dict[str, set[type]] = {
    "list[str]": {str},
    "list[float]": {int, float, type(None)},
    "dict[str, str]": {str},
    "dict[str, float]": {int, float, type(None)},
    "list[list[str]]": {list},
}


# Fields that are lists of JSON objects, and the functions that convert these to records.
OBJECT_LIST_FIELDS: Mapping[str, Callable[[list[dict[str, Any]]], list[Any]]] = {
    "ranks": RankDevice.from_objects,
    "gpus": GpuSample.from_objects,
    "memory": RankPeakMemory.from_objects,
    "work": RankEpochTiming.from_objects,
}


# A union takes three times as long to check, and a journal has millions of numbers.
_NUMBERS = (int, float)
_FIELD_TYPES = {
    name: {part.name: _JSON_TYPES[str(part.type).partition("[")[0]] for part in fields(kind)} | {"time": (int, float)}
    for name, kind in EVENT_TYPES.items()
}
_FIELD_ELEMENT_TYPES = {
    name: {part.name: types for part in fields(kind) if (types := _ELEMENT_TYPES.get(str(part.type))) is not None}
    for name, kind in EVENT_TYPES.items()
}


def _nonfinite_to_none(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_nonfinite_to_none(part) for part in value]
    if isinstance(value, dict):
        return {key: _nonfinite_to_none(part) for key, part in value.items()}
    return value


def to_line(event: Event) -> str:
    """Return the event as one line of JSON, without a newline."""
    values = asdict(event)
    ordered = {"type": event.type, "time": round(values.pop("time"), 3)}
    return json.dumps(ordered | {key: _nonfinite_to_none(value) for key, value in values.items()}, allow_nan=False)


def _constant_to_none(_: str) -> None:
    """Return None for NaN and Infinity, which json.loads accepts although they are not JSON."""


# json.loads makes a decoder for each line.
_DECODER = json.JSONDecoder(parse_constant=_constant_to_none)


def from_line(line: str) -> Event | None:
    """Parse one line of a journal.

    Returns None if the line is incomplete, its type is unknown, or a field is missing or has the wrong type.
    """
    try:
        return _to_event(_DECODER.decode(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def bulk_parser() -> Callable[[bytes], Event | None]:
    """Return a faster `from_line` for many lines: 8 s instead of 20 s per million `step` events."""
    from pydantic_core import from_json

    def parse(line: bytes) -> Event | None:
        try:
            values = from_json(line, allow_inf_nan=False)
        except ValueError:
            # NaN, lone surrogates and invalid UTF-8: only `json` accepts these.
            return from_line(line.decode(errors="replace"))
        try:
            return _to_event(values)
        except (KeyError, TypeError):
            return None

    return parse


def _to_event(values: Any) -> Event | None:
    """Return the event of a JSON object; None if a field has the wrong type. Raises KeyError or TypeError if a field is
    missing, the type unknown, or this no object."""
    name = values["type"]
    field_types = _FIELD_TYPES[name]
    event_values: dict[str, Any] = {}
    for key, value in values.items():
        if (types := field_types.get(key)) is not None:
            if not isinstance(value, types) or (isinstance(value, _NUMBERS) and not -LARGEST < value < LARGEST):
                return None
            event_values[key] = value
    # Event.time defaults to the current time, which would be wrong for an event that is read.
    if "time" not in event_values:
        return None
    if "code" in field_types:
        event_values.setdefault("code", "")  # old journals have none
    for field, element_types in _FIELD_ELEMENT_TYPES[name].items():
        elements = event_values.get(field, ())
        if not element_types.issuperset(map(type, elements.values() if isinstance(elements, dict) else elements)):
            return None
    for field in OBJECT_LIST_FIELDS.keys() & event_values.keys():
        if not all(isinstance(item, dict) for item in event_values[field]):
            return None
        event_values[field] = OBJECT_LIST_FIELDS[field](event_values[field])
    return EVENT_TYPES[name](**event_values)


class Journal:
    """Appends events to a journal, each with a single write.

    Events that cannot be written wait in memory, in their order, and are written with the next one. With a `reserve`,
    that file keeps disk space for the last events until the journal is closed.
    """

    def __init__(self, path: Path, reserve: Path | None = None) -> None:
        """Open the journal. Raises OSError."""
        self._path, self._file = path, append_to_file(path)
        size = os.fstat(self._file).st_size
        # Terminate a line that a crash left incomplete, or the next event would become part of it.
        self._incomplete = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._unwritten: deque[tuple[str, bytes]] = deque()
        self._unwritten_bytes = 0
        self._is_torn = self._is_deleted = False
        self.dropped = 0
        """Number of events that are lost, because memory or disk space did not suffice for them."""
        self._reserve = reserve
        if reserve is not None:
            _reserve_space(reserve)

    @property
    def is_behind(self) -> bool:
        """Whether events are not in the file."""
        return bool(self._unwritten) or self._is_deleted

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError if it has to wait in memory."""
        data = (("\n" if self._incomplete else "") + to_line(event) + "\n").encode()
        self._incomplete = False
        if self._unwritten_bytes + len(data) > MAX_UNWRITTEN_BYTES and event.type in DROPPED_TYPES:
            self.dropped += 1
        else:
            self._unwritten.append((event.type, data))
            self._unwritten_bytes += len(data)
        self.catch_up()

    def catch_up(self) -> None:
        """Write the events that wait in memory. Raises OSError."""
        if self._is_deleted:
            self._restore()
        while self._unwritten:
            kind, data = self._unwritten[0]
            count = os.write(self._file, data)
            self._unwritten_bytes -= count
            # The rest of a line continues where the disk was full, so the line is not torn.
            self._is_torn = count < len(data)
            if self._is_torn:
                self._unwritten[0] = (kind, data[count:])
            else:
                self._unwritten.popleft()

    def use_reserve(self) -> None:
        """Give up the reserved disk space, and drop what does not fit there: frequent events first, then old epochs."""
        if self._reserve is None:
            return
        with suppress(OSError):
            self._reserve.unlink(missing_ok=True)
        self._reserve = None
        if self._unwritten_bytes <= RESERVED_JOURNAL_BYTES:
            return
        waiting = list(self._unwritten)
        # The rest of a line that is partly written must follow it.
        kept = {0} if self._is_torn else set[int]()
        room = RESERVED_JOURNAL_BYTES - sum(len(waiting[index][1]) for index in kept)
        for is_epoch in (False, True):
            for index in reversed(range(len(waiting))):
                kind, data = waiting[index]
                if index in kept or kind in DROPPED_TYPES or (kind == EpochEvent.type) != is_epoch or len(data) > room:
                    continue
                kept.add(index)
                room -= len(data)
        self.dropped += len(waiting) - len(kept)
        self._unwritten = deque(waiting[index] for index in sorted(kept))
        self._unwritten_bytes = sum(len(data) for _, data in self._unwritten)

    def sync(self) -> bool:
        """Flush all events to disk (fsync). Return whether the file was deleted and is written anew. Raises OSError."""
        was_deleted = self._is_deleted = self._is_deleted or os.fstat(self._file).st_nlink == 0
        self.catch_up()
        os.fsync(self._file)
        return was_deleted

    def _restore(self) -> None:
        """Copy the deleted file, which is readable as long as it is open, to its path. Raises OSError."""

        def copy(file: BinaryIO) -> None:
            position = 0
            while data := os.pread(self._file, READ_CHUNK_BYTES, position):
                file.write(data)
                position += len(data)

        replace_file(self._path, copy, durable=True)
        deleted, self._file = self._file, append_to_file(self._path)
        os.close(deleted)
        self._is_deleted = False

    def close(self) -> None:
        """Write what waits, if there is space by now, and close the file."""
        self.use_reserve()
        with suppress(OSError):
            self.catch_up()
        os.close(self._file)


def _reserve_space(path: Path) -> None:
    """Allocate `RESERVED_BYTES` of disk space. Without space or permission, there is no reserve."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    try:
        os.posix_fallocate(handle, 0, RESERVED_BYTES)
    except OSError:
        with suppress(OSError):
            path.unlink()
    finally:
        os.close(handle)


class JournalReader:
    """Reads a growing journal. `offset` is the byte position of the next read; before the first `poll` it can be set to
    the beginning of any line. `problem` says why the journal or a part of it cannot be read, None if it can."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        self.problem: str | None = None
        self._partial_line = b""

    def poll(self, max_bytes: int | None = None) -> Iterator[Event]:
        """Yield the events appended since the last call, at most those of the next `max_bytes` bytes.

        Nothing if the journal does not exist; see `poll_lines`.
        """
        parse: Callable[[bytes], Event | None] | None = None
        start = self.offset
        for line in self.poll_lines(max_bytes):
            if parse is None:
                # The first chunk has been read.
                parse = bulk_parser() if self.offset - start >= BULK_BYTES else _from_bytes
            if (event := parse(line)) is not None:
                yield event

    def poll_lines(self, max_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the complete lines appended since the last call, at most those of the next `max_bytes` bytes.

        An incomplete last line is kept for the next call. At most one chunk and one line of `MAX_LINE_BYTES` are in
        memory; longer lines are skipped.
        """
        try:
            with open_regular_file(self._path) as file:
                end = os.fstat(file.fileno()).st_size
                end = end if max_bytes is None else min(end, self.offset + max_bytes)
                file.seek(self.offset)
                while data := file.read(min(max(end - self.offset, 0), READ_CHUNK_BYTES)):
                    self.offset += len(data)
                    *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                    if len(self._partial_line) > MAX_LINE_BYTES:
                        self._partial_line, self.problem = _SKIPPED_BEGINNING, long_line_problem(self._path)
                    yield from lines
        except FileNotFoundError:
            return
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"


def _from_bytes(line: bytes) -> Event | None:
    return from_line(line.decode(errors="replace"))


def long_line_problem(path: Path) -> str:
    """Return the sentence about a line of more than `MAX_LINE_BYTES`."""
    return f"{path.name} is damaged: it has a line of more than {MAX_LINE_BYTES >> 20} MiB"
