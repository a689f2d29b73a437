"""One run as a row of a list: its record, and what only a reader can tell, such as whether its owner lives.

`engine.runs.run_list` reads the rows of a folder, `engine.runs.query` filters and sorts them, `tui.screens.tables.runs`
formats them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.base.codec import asdict
from engine.base.text import printable
from engine.base.units import format_duration
from engine.runs.claim import MAX_TEXT_CHARS, observe_claim
from engine.runs.folder import LIVE_STATES, RunFolder, RunState
from engine.runs.labels import NO_LABELS, RunLabels, read_labels
from engine.runs.record_completion import completed_record, read_listed_record
from engine.runs.run_config import all_values
from engine.runs.run_record import (
    DIVERGED,
    NO_RECORD,
    RunRecord,
    find_stored_record,
    read_run_record,
    shown_state,
    stored_form,
)

UNREADABLE = "unreadable"
"""What lists show in place of the state of a run whose files cannot be read."""
UNKNOWN_STATE = "unknown"
"""The state of a run that was live when its host was last heard."""
NO_CONFIG = "config.yaml cannot be read"
# A live run with a problem of its disk has no news if its record is older than this.
NO_NEWS_SECONDS = 2.0


class RunRow(NamedTuple):
    """One run. A tuple: 10,000 of them are made in 15 ms, those of a frozen dataclass in 80 ms.

    `state` is the state now, which that of the record is only while its owner lives. `message` says why the run waits
    or ended, why its files are `unreadable`, or why a live run records nothing. `foreign` is why other users can change
    the run, None if they cannot. `tags`, `note` and `archived` are the labels of the run. `sweep` is the sweep that the
    run is a trial of, "" if it is none. A row that stands for a sweep has `trials`, their number
    (`engine.runs.trials`). `formats` are those of the logs of a run of another program (`engine.runs.foreign_record`),
    and in a comparison also of the metrics of a command.

    `has_open_job`: no process owns the run, but its job in a batch system may start it again.

    `problem` says why a part of its files cannot be read.
    """

    name: str
    folder: str
    state: str
    record: RunRecord = NO_RECORD
    message: str = ""
    unreadable: bool = False
    foreign: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    archived: bool = False
    sweep: str = ""
    trials: int = 0
    formats: tuple[str, ...] = ()
    problem: str | None = None
    has_open_job: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what commands print of the run as JSON: its record, and what only a reader can tell.

        `state` is the state now, and `config` has every key of a training, not only the changed ones.
        """
        config = self.record.config or {}
        # The other keys belong to trainings.
        is_complete = self.record.command or self.record.config is None
        own = {name: getattr(self, name) for name in ("name", "folder", "unreadable", "foreign", "tags", "note")}
        own |= {"archived": self.archived, "sweep": self.sweep, "age_seconds": self.age_seconds}
        own |= {"state": self.state, "message": self.message, "diverged": self.shown_state == DIVERGED}
        own["config"] = config if is_complete else all_values(self.name, config)
        return asdict(stored_form(self.record)) | own

    @property
    def shown_state(self) -> str:
        """The state in lists, where `diverged` and `unreadable` stand for states that say less."""
        if self.unreadable:
            return UNREADABLE
        return shown_state(self.state, self.record)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The value of every config key of a training, or the parameters of another program; None if unknown."""
        if self.formats or self.record.command:
            return self.record.command_parameters or None
        return None if self.record.config is None else all_values(self.name, self.record.config)

    @property
    def live(self) -> bool:
        """Whether a process owns the run."""
        return self.state in LIVE_STATES

    @property
    def age_seconds(self) -> float:
        """Seconds since the latest session started, or since the files of a run of another program were written; 0 if
        that is unknown or in the future."""
        return age_of(self.record.updated_at if self.formats else self.record.started_at)


def read_row(folder: RunFolder, status: os.stat_result | None = None) -> RunRow | None:
    """Return the row of a run from its record, or from its journal if it has none; None if the folder is no run.

    Of a run that has ended, opens the record and the labels only. An error in one run must not hide the others.
    `status` is that of the folder, if it is known.
    """
    try:
        lock = os.stat(f"{folder.path}/lock", follow_symlinks=False)  # noqa: PTH116 - a Path takes longer
        has_lock, claimed_ns = stat.S_ISREG(lock.st_mode), lock.st_mtime_ns
    except (OSError, ValueError):
        has_lock, claimed_ns = False, 0
    try:
        stored = find_stored_record(folder)
        if stored is None and not has_lock:
            return None
        if stored is None:
            record, problem = read_listed_record(folder)
            return make_row(folder, record, problem=problem, status=status)
        record, written_ns = stored
        # Whoever claims a run touches its lock.
        if not record.state.live and written_ns >= claimed_ns:
            return make_row(folder, record, folder.state(record.state, is_owned=False), status=status)
        state = folder.state(record.state)
        if record.state.live and not state.live:
            # The owner may have written its last record and released the lock since.
            record = read_run_record(folder) or record
            state = folder.state(record.state, is_owned=False)
        return make_row(folder, record, state, status=status)
    except Exception as error:
        # Without its labels, which may be the reason.
        message = f"cannot be read: {type(error).__name__}: {error}"
        return make_row(folder, NO_RECORD, RunState.CRASHED, problem=message, labels=NO_LABELS)


def open_run(folder: RunFolder) -> RunRow:
    """Return the row of a run, whose record is completed from the journal if the owner left it behind."""
    # First the lock: an owner writes the last record before it releases the lock.
    is_owned = folder.is_owned()
    record = completed_record(folder, is_owned=is_owned)
    if is_owned and not record.state.live:
        # It may have ended since.
        is_owned = folder.is_owned()
    return make_row(folder, record, folder.state(record.state, is_owned=is_owned))


def make_row(
    folder: RunFolder,
    record: RunRecord,
    state: RunState | None = None,
    *,
    problem: str | None = None,
    status: os.stat_result | None = None,
    labels: RunLabels | None = None,
) -> RunRow:
    """Return the row of a run with this record. `state` is its state now, `status` that of the folder and `labels` its
    labels, unless they are to be found out. `problem` says why its journal cannot be read."""
    state, labels = state or folder.state(record.state), labels or read_labels(folder)
    # The owner of a live run knows its state.
    has_owner = state.live and state is record.state and state is not RunState.WAITING
    view = None if has_owner else folder.job_view(record.state)
    told = view.message if view is not None and view.state is state else ""
    message = problem or told or claim_message(folder, state) or state_message(record, state)
    return RunRow(
        name=folder.name,
        folder=str(folder.path),
        state=state,
        record=record,
        message=message or (recording_problem(record) if state.live else ""),
        unreadable=problem is not None,
        problem=NO_CONFIG if record.config is None and not record.command else problem,
        foreign=folder.owner_problem(status),
        tags=labels.tags,
        note=labels.note,
        archived=labels.archived,
        sweep=folder.sweep,
        has_open_job=view is not None and view.is_open,
    )


def claim_message(folder: RunFolder, state: RunState) -> str:
    """Return what is known of the process on another host that claimed a crashed run; empty if none did."""
    if state is not RunState.CRASHED:
        return ""
    observed = observe_claim(folder.owner)
    if observed is None:
        return ""
    claim = observed.claim
    last = f"no more heartbeats from {claim.process} (the last one: {claim.last_heartbeat()})"
    return f"{last}; `gputrain resume` resumes from the last checkpoint"


def state_message(record: RunRecord, state: RunState) -> str:
    """Return why a run waits or ended; empty while it trains."""
    if state is RunState.INTERRUPTED:
        return "its supervisor was killed while it waited; `gputrain queue resume` starts it again"
    if state is RunState.CRASHED and record.command:
        return "supervisor exited unexpectedly, and its command with it; `gputrain resume` starts the command again"
    if state is RunState.CRASHED:
        return "supervisor exited unexpectedly; `gputrain resume` resumes from the last checkpoint"
    return record.message if state is RunState.WAITING or not state.live else ""


def recording_problem(record: RunRecord) -> str:
    """Return why a live run cannot record; "" if it can."""
    age_s = age_of(record.updated_at)
    problem = printable(record.problem[:MAX_TEXT_CHARS])
    if not problem:
        return ""
    news = f"no news for {format_duration(age_s)}: " if age_s >= NO_NEWS_SECONDS else ""
    return f"{news}{problem}; the run goes on, and stop works"


def age_of(past: float | None) -> float:
    """Return seconds since a time in Unix seconds; 0 if it is unknown or in the future."""
    return 0.0 if past is None else round(max(time.time() - past, 0.0), 1)
