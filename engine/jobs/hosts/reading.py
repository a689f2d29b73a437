"""What a host has said: `HostReading`, the answer of `watch` for one host, and the parsers of its lines.

A host may be hostile, so its answers are parsed as data of limited size; whoever shows them escapes the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from engine.base.codec import (
    FORMAT,
    Count,
    FileRecord,
    InvalidRecordError,
    Meta,
    decode,
    define_record,
    field,
    format_problem,
)
from engine.gpus.snapshot import Snapshot
from engine.jobs.hosts import probe
from engine.runs.run_record import StoredForm, read_back
from engine.runs.run_row import RunRow

MAX_GPUS, MAX_PROCESSES, MAX_RUNS = 64, 1000, 200
MAX_LINE_BYTES, MAX_RUN_BYTES = 1 << 20, 1 << 17
MAX_TEXT_BYTES = 2000  # of one text in a reading of GPUs
_LONG_TEXT = re.compile(rb'"[^"]{%d}' % MAX_TEXT_BYTES)
_OWN_FORMAT = b'{"format":%d,' % FORMAT
_PROBE_BEGINNING = b'{"probe":1,'
_FORMAT = re.compile(rb'\{\s*"format":\s*(\d{1,4}),')
_NEWS = tuple(b'{"format":%d,"%s":' % (FORMAT, name) for name in (b"gone", b"listed"))
FORMATS_APART = 1  # versions that the gputrain of a host may be older or newer than this one


class HostState(StrEnum):
    """How current a reading is: not reached yet, current, without news for a while, or out of reach."""

    CONNECTING = "connecting"
    OK = "ok"
    STALE = "stale"
    DOWN = "down"


@dataclass(frozen=True)
class HostReading:
    """The last word of a host. The same object means that nothing has changed.

    `snapshot` has its GPUs and their processes, None if it said nothing of them; those of a stale or lost host are
    stale, too. `rows` are its newest runs, named HOST:RUN, whose folders are paths there, as soon as it `has_all_rows`.
    `age_s` are the whole seconds since its last word if the host is stale or down, None without one. `reason` says why
    the host is stale or down, or what it lacks, such as a driver, escaped; often in the words of ssh. `must_ask` means
    that ssh would ask for a password or for a new host key, see `HostWatch.ask`.
    """

    name: str
    state: HostState = HostState.CONNECTING
    reason: str = ""
    age_s: int | None = None
    snapshot: Snapshot | None = None
    rows: tuple[RunRow, ...] = ()
    has_all_rows: bool = False
    has_gputrain: bool = False
    must_ask: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether it has neither said all nor failed."""
        return self.state is HostState.CONNECTING or (self.state is HostState.OK and not self.has_all_rows)


def list_rows(readings: Sequence[HostReading]) -> list[RunRow]:
    """Return the runs of hosts, the latest start first.

    All hosts that share a folder list its runs: one belongs to the host that it runs on, else to the first one.
    """
    owned: dict[tuple[str, float | None], RunRow] = {}
    for reading in readings:
        host = None if reading.snapshot is None else reading.snapshot.host
        for row in reading.rows:
            key = row.folder, row.record.started_at
            if key not in owned or row.record.host == host:
                owned[key] = row
    return sorted(owned.values(), key=lambda row: -(row.record.started_at or 0.0))


class ListNews(FileRecord, frozen=True, kw_only=True):
    """A line of `gputrain runs --watch --json` that is no run: one that is no longer listed, or how many were there at
    the start."""

    gone: str | None = None
    listed: Count | None = None


ListedRun: Any = define_record(
    "ListedRun",
    {
        "name": (Annotated[str, Meta(pattern="^[^/]+$", max_length=255)], field()),
        **dict.fromkeys(("folder", "note"), (Annotated[str, Meta(max_length=4096)], "")),
        **dict.fromkeys(("unreadable", "archived"), (bool, False)),
        "foreign": (Annotated[str, Meta(max_length=4096)] | None, None),
        "tags": (Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=100)], ()),
    },
    (StoredForm,),
)
"""A line of `gputrain runs --watch --json` about a run, as `RunRow.to_json` writes it. The sweep is left out:
its folder is on the host."""
_ROW_FIELDS = ("name", "folder", "message", "unreadable", "foreign", "tags", "note", "archived")


def parse_snapshot(line: bytes) -> Snapshot:
    """Return the snapshot in a line of `gputrain gpus --watch --json` or of the probe. Raises InvalidRecordError."""
    if _LONG_TEXT.search(line):
        raise InvalidRecordError(f"has a text of more than {MAX_TEXT_BYTES} bytes", code="too-large")
    is_probe = _FORMAT.match(line) is None
    own = _OWN_FORMAT + line[len(_PROBE_BEGINNING) :] if is_probe else _in_own_format(line)
    snapshot = decode(own, Snapshot)
    if is_probe:
        # Not a word of nvidia-smi for three of its turns.
        snapshot = snapshot.as_of(snapshot.time, 3.0 * probe.LOOP_SECONDS)
    processes = sum(len(gpu.processes.value or ()) for gpu in snapshot.gpus)
    if len(snapshot.gpus) > MAX_GPUS or processes > MAX_PROCESSES:
        raise InvalidRecordError(f"has more than {MAX_GPUS} GPUs or {MAX_PROCESSES} processes", code="too-large")
    return snapshot


def parse_run(line: bytes) -> RunRow | ListNews:
    """Return what a line of `gputrain runs --watch --json` says, or the run that `gputrain runs show --json` prints.

    Raises InvalidRecordError."""
    line = _in_own_format(line)
    if line.startswith(_NEWS):
        return decode(line, ListNews)
    listed = decode(line, ListedRun)
    record = read_back(listed)
    return RunRow(state=listed.state, record=record, **{name: getattr(listed, name) for name in _ROW_FIELDS})


def _in_own_format(line: bytes) -> bytes:
    """Return a line of a gputrain that is one version older or newer as if it were of this version.

    Fields that this version lacks are ignored; one that is missing or means another type is found by the decoder.
    """
    match = _FORMAT.match(line)
    if match is None or abs(int(match[1]) - FORMAT) > FORMATS_APART:
        problem = format_problem(match and int(match[1])) or ""
        raise InvalidRecordError(f"{problem}; install the same gputrain there and here", code="wrong-version")
    return _OWN_FORMAT + line[match.end() :]
