"""The place of a run in the queue, which `RUN/queue.json` keeps over a reboot; its reservation in /tmp is lost then.

Only the owner of the run writes the file. `place` and `engine.jobs.launch.phases` update it; `listing` reads it to find
runs whose wait was interrupted.
"""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from typing import Annotated

from engine.base.codec import ENTRIES, Count, FileNumber, FileRecord, Meta, Record, UnixTime, find_record, write_record
from engine.gpus.queue_terms import BeginTime, Priority, QueuePosition
from engine.runs.folder import RunFolder

MAX_QUEUE_BYTES = 1 << 16


class QueueStage(StrEnum):
    """How far a run has come. WAITING and GRANTED without an owner: the wait was interrupted."""

    WAITING = "waiting"
    GRANTED = "granted"
    STARTED = "started"
    ENDED = "ended"


PENDING_STAGES = (QueueStage.WAITING, QueueStage.GRANTED)
# The name of a folder: another user may have written a path that leads elsewhere.
RunName = Annotated[str, Meta(pattern=r"^(?!\.{0,2}\Z)[^/\x00]*\Z")]


class Dependency(Record, frozen=True, kw_only=True):
    """A run to wait for. `any_end`: however it ends. `device` and `inode` identify its folder after it was renamed."""

    name: RunName
    any_end: bool
    device: FileNumber
    inode: FileNumber


class QueueState(FileRecord, frozen=True, kw_only=True):
    """Content of `queue.json`. `submitted_at` is in Unix seconds, `pid` that of the latest supervisor, `begin` the Unix
    time before which the run does not start, 0 if it has none.

    `priority` and `position` order the waiting runs of one user, see `engine.gpus.queue_terms`.
    """

    submitted_at: QueuePosition
    position: QueuePosition
    priority: Priority
    held: bool
    after: Annotated[tuple[Dependency, ...], ENTRIES]
    stage: QueueStage
    pid: Count
    begin: BeginTime = 0.0
    program: str = ""
    """What it starts, as the beginning of its default name; empty: it belongs to no batch, see `place`."""
    cwd: str = ""
    """Working folder of the job."""
    code: str = ""
    """Fingerprint of its code when it was queued; empty if that is not recorded."""
    granted_at: UnixTime | None = None
    """When it got its devices, in Unix seconds."""
    crash_hold: str = ""
    """Why it is held although the user does not hold it, as a clause: runs of its batch failed at once."""
    crash_held_at: UnixTime = 0.0
    """When the last of them failed."""
    released_at: UnixTime = 0.0
    """When the user last released it: no earlier failure holds its batch."""


def read_queue_state(folder: RunFolder) -> QueueState | None:
    """Return the place of a run in the queue; None if it never had one or the file is not valid."""
    return find_record(folder.queue, QueueState, MAX_QUEUE_BYTES)


def write_queue_state(folder: RunFolder, state: QueueState) -> None:
    """Replace `queue.json`. Errors are ignored: a full disk must not end a run that waits."""
    with suppress(OSError):
        write_record(folder.queue, state)


def is_interrupted(folder: RunFolder) -> bool:
    """Whether a run was waiting, or had not begun to train, when its supervisor was killed."""
    state = read_queue_state(folder)
    return state is not None and state.stage in PENDING_STAGES and not folder.is_owned()
