"""Make the record of a run from its journal, where its owner could not: it crashed, or the record is missing.

`engine.runs.run_row` calls it for whoever opens such a run, and for lists only of a run without any record.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from typing import NamedTuple

from engine.base.codec import replace
from engine.base.files import config_folder, file_size, is_file
from engine.runs.folder import RunFolder
from engine.runs.run_record import (
    NO_RECORD,
    RunRecord,
    StoredRecord,
    find_stored_record,
    with_logged,
    write_summary,
)

# Reading as much takes a fifth of a second. Longer journals may come from another user.
MAX_LISTED_JOURNAL_BYTES = 8 << 20


class JournalRecord(NamedTuple):
    """The record that the journal and the config of a run give. `problem` says why a part of the journal cannot be
    read; None if all can."""

    record: RunRecord
    problem: str | None


def read_journal_record(folder: RunFolder) -> JournalRecord:
    """Return the record that the journal and the config of a run give, and the problem of the journal."""
    # Events and the config schema take 0.3 s to import, and nearly every run has a record.
    from engine.runs.history import history_from_events
    from engine.runs.journal import JournalReader
    from engine.runs.run_config import read_changed_config

    reader = JournalReader(folder.journal)
    record = history_from_events(reader.poll()).record(read_changed_config(folder.config))
    return JournalRecord(record, reader.problem)


def read_listed_record(folder: RunFolder) -> JournalRecord:
    """Return the record of a run that has none, for a list, which must not wait for a long journal."""
    if file_size(folder.journal) > MAX_LISTED_JOURNAL_BYTES:
        advice = f"`gputrain attach {shlex.quote(folder.name)}` rebuilds it"
        return JournalRecord(NO_RECORD, f"{folder.summary.name} is missing; {advice}")
    return read_journal_record(folder)


def completed_record(folder: RunFolder, *, is_owned: bool) -> RunRecord:
    """Return the record of a run, completed from the journal if the owner left it behind.

    A completed record is stored if this user alone can change the folder and no process owns or claims the run."""
    stored = find_stored_record(folder)
    if stored is not None and (is_owned or _is_current(folder, *stored)):
        return stored.record
    journal_bytes = file_size(folder.journal)
    record, problem = read_journal_record(folder)
    record = with_stored_metrics(record, stored and stored.record)
    if record.started_at is None:
        # The journal has no event: its owner was killed while it started, or it was deleted.
        return record if stored is None else stored.record
    if problem is None and not is_owned and folder.is_own:
        _store(folder, record, journal_bytes, stored)
    return record


def with_stored_metrics(record: RunRecord, stored: RunRecord | None) -> RunRecord:
    """Return the record of a journal; of a command, with the metrics of the stored one, which the journal lacks, and
    with the command itself and its parameters, which the journal of a run that waits lacks."""
    if stored is None or not (record.command or stored.command):
        return record
    if not record.command:
        record = replace(record, command=stored.command, command_parameters=stored.command_parameters)
    return with_logged(record, stored.values, stored.metric_names)


def _is_current(folder: RunFolder, record: RunRecord, written_ns: int) -> bool:
    """Whether the record of a run without an owner has all events of its journal."""
    try:
        if not record.state.live:
            # Whoever claims a run touches its lock.
            return written_ns >= folder.lock.stat().st_mtime_ns
        # An owner that cannot write the journal leaves the events that wait out of the record.
        return not record.problem and written_ns > folder.journal.stat().st_mtime_ns
    except OSError:
        # There is no journal, or no lock.
        return True


def _store(folder: RunFolder, record: RunRecord, journal_bytes: int, stored: StoredRecord | None) -> None:
    """Store a record that was made of the first bytes of the journal, unless the run has changed since.

    The file gets a time after those of journal and lock, also if the clock was set back since they were written.
    """
    from engine.runs.ownership import try_lock_unclaimed

    with suppress(OSError):
        if not is_file(folder.lock):
            return
        lock = try_lock_unclaimed(folder)
        if lock is None:
            return
        try:
            if file_size(folder.journal) != journal_bytes or find_stored_record(folder) != stored:
                return
            if stored is None or record != stored.record:
                write_summary(folder.summary, record)
            times = [path.stat().st_mtime_ns for path in (folder.journal, folder.lock, folder.summary)]
            os.utime(folder.summary, ns=(max(times) + 1, max(times) + 1))
        finally:
            lock.close()
        if record.state.live:
            _report_crash(folder, record)


def _report_crash(folder: RunFolder, record: RunRecord) -> None:
    """Start the process that sends the message that the run has crashed, if it may send any. Raises OSError."""
    if (record.config or {}).get("notify.urls") or os.path.lexists(config_folder() / "notify"):
        command = [sys.executable, "-P", "-m", "engine.jobs.notify.run_messages", str(folder.path)]
        null = subprocess.DEVNULL
        subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)  # noqa: S603 (our own)
