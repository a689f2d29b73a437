"""Read, follow and write the journal, `events.jsonl`: append-only, one JSON object per line.

`engine.runs.events` defines the format. A last line that a crash left incomplete is ignored."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.base.codec import (
    FORMAT,
    Header,
    InvalidRecordError,
    Record,
    UnixTime,
    decode,
    encode,
    format_problem,
    parser,
)
from engine.base.files import append_to_file, open_regular_file
from engine.runs.command_events import CodeChanged, CodeRecorded, CommandResumed, CommandStarted
from engine.runs.events import (
    CheckpointSaved,
    ConfigRejected,
    ControlEvent,
    EpochEvent,
    Event,
    FinalTest,
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
    SessionStarted,
    StepEvent,
    WaitingForGpus,
    WarningEvent,
    type_name,
)

READ_CHUNK_BYTES = 1 << 20
# Longer lines are skipped. `run_started` has 1.1 MB for 8,192 ranks, `step` 20 bytes for each step of `run.log_every`.
MAX_LINE_BYTES = 1 << 24
# Replaces the beginning of a line that is too long. It is not JSON, so neither is the line.
_SKIPPED_BEGINNING = b"\0"


# Other events, which only the terminal shows, are never read.
EVENT_TYPES: dict[str, type[Event]] = {
    type_name(kind): kind
    for kind in (
        RunStarted,
        RunResumed,
        CommandStarted,
        CommandResumed,
        CodeRecorded,
        CodeChanged,
        StepEvent,
        EpochEvent,
        FinalTest,
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


# A session begins with one of them. A journal of another format is refused by it.
SESSION_TYPES = (RunStarted, RunResumed, CommandStarted, CommandResumed)


class _LineStart(Record, frozen=True, kw_only=True):
    """The fields that every line has. A reader knows by them whether it needs the rest."""

    type: str
    time: UnixTime


_parse_start = parser(_LineStart)


def to_line(event: Event) -> str:
    """Return the event as one line of JSON, without a newline."""
    return encode(event).decode()


def event_type(line: bytes | str) -> type[Event] | None:
    """Return the type of the event of a line; None if it is unknown or the line is not valid JSON."""
    try:
        return EVENT_TYPES.get(_parse_start(line).type)
    except (ValueError, RecursionError):
        # `decode` also takes escaped surrogates, as of a path that is not UTF-8.
        with suppress(InvalidRecordError):
            return EVENT_TYPES.get(decode(line, _LineStart).type)
    return None


def from_line(line: bytes | str) -> Event | None:
    """Parse one line of a journal.

    Returns None if the line is incomplete, its type is unknown, or a field is missing or not valid.
    """
    kind = event_type(line)
    if kind is None:
        return None
    try:
        event = parser(kind)(line)
    except (ValueError, RecursionError):
        # msgspec 0.23 has no error of its own for bytes that are not UTF-8.
        if isinstance(line, bytes) and (text := line.decode(errors="replace")).encode() != line:
            return from_line(text)
        try:
            event = decode(line, kind)
        except InvalidRecordError:
            return None
    return event if not isinstance(event, SessionStarted) or event.format == FORMAT else None


class Journal:
    """Appends events to a journal, each with a single write.

    Events that cannot be written wait in memory, in their order, and are written with the next one.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal. Raises OSError."""
        self._file = append_to_file(path)
        size = os.fstat(self._file).st_size
        # Terminate a line that a crash left incomplete, or the next event would become part of it.
        self._incomplete = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        self._unwritten: deque[bytes] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether events are not in the file."""
        return bool(self._unwritten)

    @property
    def is_deleted(self) -> bool:
        """Whether somebody has deleted the file, which takes events until it is closed."""
        return os.fstat(self._file).st_nlink == 0

    def append(self, event: Event) -> None:
        """Append one event. Raises OSError if it has to wait in memory."""
        data = (b"\n" if self._incomplete else b"") + encode(event) + b"\n"
        self._incomplete = False
        self._unwritten.append(data)
        self.catch_up()

    def catch_up(self) -> None:
        """Write the events that wait in memory. Raises OSError."""
        while self._unwritten:
            data = self._unwritten[0]
            count = os.write(self._file, data)
            # The rest of a line continues where the disk was full, so the line is not torn.
            if count < len(data):
                self._unwritten[0] = data[count:]
            else:
                self._unwritten.popleft()

    def sync(self) -> None:
        """Flush all events to disk (fsync). Raises OSError."""
        self.catch_up()
        os.fsync(self._file)

    def close(self) -> None:
        """Write what waits, if there is space by now, and close the file."""
        with suppress(OSError):
            self.catch_up()
        os.close(self._file)


class JournalReader:
    """Follows a journal. It begins again with the first line when the journal shrinks or another file has its name.

    `offset` is the byte position of the next read; before the first `poll` it can be set to the beginning of any line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = self.size = self._inode = 0
        """`size` is that of the journal at the last `poll`, and `offset` if it is missing or unreadable."""
        self.was_replaced = False
        """Whether the last `poll` found another journal, which voids the events before."""
        self._damage: str | None = None
        self._access_problem: str | None = None
        self._partial_line = b""

    @property
    def problem(self) -> str | None:
        """Why the journal or a part of it cannot be read; None if it can."""
        return self._access_problem or self._damage

    def poll(self, max_bytes: int | None = None, kinds: tuple[type[Event], ...] = ()) -> Iterator[Event]:
        """Yield the events appended since the last call, at most those of the next `max_bytes` bytes.

        With `kinds`, only events of these types are parsed. Nothing if the journal does not exist; see `poll_lines`.
        """
        for line in self.poll_lines(max_bytes):
            if kinds and event_type(line) not in kinds:
                continue
            if (event := from_line(line)) is not None:
                yield event
            elif (reason := _session_problem(line)) is not None:
                self._damage = f"{self._path.name} {reason}"

    def poll_lines(self, max_bytes: int | None = None) -> Iterator[bytes]:
        """Yield the complete lines appended since the last call, at most those of the next `max_bytes` bytes.

        An incomplete last line is kept for the next call. At most one chunk and one line of `MAX_LINE_BYTES` are in
        memory; longer lines are skipped.
        """
        self.was_replaced = False
        try:
            with open_regular_file(self._path) as file:
                self._access_problem = None
                status = os.fstat(file.fileno())
                is_other = self._inode not in (0, status.st_ino)
                self.was_replaced = self.offset > 0 and (is_other or status.st_size < self.offset)
                if self.was_replaced:
                    self.offset, self._damage, self._partial_line = 0, None, b""
                self._inode, self.size = status.st_ino, status.st_size
                end = self.size if max_bytes is None else min(self.size, self.offset + max_bytes)
                file.seek(self.offset)
                while data := file.read(min(max(end - self.offset, 0), READ_CHUNK_BYTES)):
                    self.offset += len(data)
                    *lines, self._partial_line = (self._partial_line + data).split(b"\n")
                    if len(self._partial_line) > MAX_LINE_BYTES:
                        self._partial_line = _SKIPPED_BEGINNING
                        limit = f"{MAX_LINE_BYTES >> 20} MiB"
                        self._damage = f"{self._path.name} is damaged: it has a line of more than {limit}"
                    yield from lines
        except OSError as error:
            self.size = self.offset
            # A journal that is missing keeps the events that were read.
            if not isinstance(error, FileNotFoundError):
                self._access_problem = f"{self._path.name} cannot be read: {error.strerror}"


def find_session_problem(path: Path) -> str | None:
    """Return why a session in a journal cannot be read, as a clause that follows its name; None if all can."""
    lines = (line for line in JournalReader(path).poll_lines() if event_type(line) in SESSION_TYPES)
    return next((_session_problem(line) for line in lines if from_line(line) is None), None)


def _session_problem(line: bytes) -> str | None:
    """Return why an invalid line cannot be read, as a clause that follows the name of the journal; None if it does not
    start a session."""
    kind = event_type(line)
    if kind not in SESSION_TYPES:
        return None
    try:
        if (problem := format_problem(decode(line, Header).format)) is not None:
            return problem
        decode(line, kind)
    except InvalidRecordError as error:
        return str(error)
    return None
