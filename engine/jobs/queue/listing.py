"""List the queue of this host: what waits for GPUs, of all users, and this user's runs that wait as jobs of a batch
system or whose wait was interrupted.

`gputrain queue` and the screen show it. Uses the reservations of `engine.gpus` and the `queue.json` of run folders.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from operator import itemgetter
from pathlib import Path

from engine.base.text import pluralize
from engine.base.trust import name_of_user
from engine.gpus.queue_terms import own_order, queue_order
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.run_queue import SILENT
from engine.jobs.queue.state import PENDING_STAGES, QueueState, read_queue_state
from engine.runs.batch.job import pending_job, read_job
from engine.runs.folder import RunFolder, list_runs


class RowState(StrEnum):
    """How a run waits. SCHEDULED: for its begin time. LIMITED: for other runs of its user, because of a limit.
    INTERRUPTED: its supervisor is gone, and `gputrain queue resume` starts it again. PENDING: its job waits in a batch
    system."""

    WAITING = "waiting"
    HELD = "held"
    DEPENDENT = "dependent"
    SCHEDULED = "scheduled"
    LIMITED = "limited"
    INTERRUPTED = "interrupted"
    PENDING = "pending"


@dataclass(frozen=True)
class QueueRow:
    """A run in the queue. `place` counts from 1 among those that wait for GPUs only; None for the others.

    `since` is when the run joined the queue, in Unix seconds; `gpus` its `device.gpus`. `reason` is what it waits for,
    as a sentence that may come from another user. `min_free` is the memory in bytes that it reserves of each GPU, 0 for
    whole GPUs, and `begin` the Unix time before which it does not start, 0 for none. `folder` is empty, and so is
    `after`, the names of the runs that it was told to wait for, for the runs of other users.
    """

    name: str
    user: str
    uid: int
    state: RowState
    place: int | None
    since: float
    reason: str
    gpus: str
    priority: int = 0
    position: float = 0.0
    share: int = 1
    min_free: int = 0
    begin: float = 0.0
    folder: str = ""
    after: tuple[str, ...] = ()
    key: str = ""

    @property
    def is_own(self) -> bool:
        return self.uid == os.geteuid()

    @property
    def is_live(self) -> bool:
        """Whether a process waits."""
        return self.state not in (RowState.INTERRUPTED, RowState.PENDING)

    @property
    def waited_s(self) -> float:
        return max(time.time() - self.since, 0.0)

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON values."""
        values = asdict(self)
        del values["key"], values["position"]
        return values | {"waited_s": round(self.waited_s, 1)}


def list_queue(root: Path | None = None) -> list[QueueRow]:
    """Return the runs that wait for GPUs in queue order, then those that are held or wait for other runs, then the
    stored rows of the runs folder `root`. Raises UsageError if `root` cannot be read."""
    reservations = [each for each in read_reservations() if each.is_waiting]
    ready = queue_order(reservations)
    rows = [_row(each, ready[:place], place + 1) for place, each in enumerate(ready)]
    blocked = sorted((each for each in reservations if each.blocked), key=lambda each: (each.uid, own_order(each)))
    rows += [_row(each, (), None) for each in blocked]
    return rows + (stored_rows(root) if root is not None else [])


def find_row(folder: RunFolder) -> QueueRow | None:
    """Return the row of a waiting run of this user; None if it does not wait."""
    path = str(folder.path)
    return next((row for row in list_queue() if row.is_own and row.folder == path), None)


def stored_rows(root: Path) -> list[QueueRow]:
    """Return the runs of this user in a runs folder that wait without a process here: in a batch system, or because
    their wait was interrupted. Raises UsageError if the folder cannot be read."""
    jobs = [(run, job) for run in list_runs(root) if run.is_own and (job := read_job(run)) is not None]
    found = [(job.submitted_at, run, wait) for run, job in jobs if (wait := pending_job(run)) is not None]
    rows = [_stored_row(run, RowState.PENDING, since, wait) for since, run, wait in sorted(found, key=itemgetter(0))]
    return rows + interrupted_rows(root)


def interrupted_rows(root: Path) -> list[QueueRow]:
    """Return the runs of this user in a runs folder whose wait was interrupted, in their old order.

    Raises UsageError if the folder cannot be read."""
    found: list[tuple[QueueState, RunFolder]] = []
    for run in list_runs(root):
        state = read_queue_state(run) if run.is_own else None
        if state is not None and state.stage in PENDING_STAGES and not run.is_owned():
            found.append((state, run))
    found.sort(key=lambda pair: (-pair[0].priority, pair[0].position, pair[1].name))
    return [
        replace(
            _stored_row(
                run,
                RowState.INTERRUPTED,
                state.submitted_at,
                f"its supervisor was killed while it waited; `gputrain queue resume {run.name}` starts it",
            ),
            priority=state.priority,
            position=state.position,
            begin=state.begin,
        )
        for state, run in found
    ]


def _stored_row(run: RunFolder, state: RowState, since: float, reason: str) -> QueueRow:
    user, path = name_of_user(os.geteuid()), str(run.path)
    return QueueRow(run.name, user, os.geteuid(), state, None, since, reason, gpus="", folder=path, key=path)


def _row(entry: ReservationInfo, ahead: Sequence[ReservationInfo], place: int | None) -> QueueRow:
    states = {
        "": RowState.WAITING,
        "held": RowState.HELD,
        "begin": RowState.SCHEDULED,
        "limit": RowState.LIMITED,
    }
    folder = entry.run_folder()
    state = read_queue_state(RunFolder(Path(folder))) if folder and entry.blocked == "dependency" else None
    return QueueRow(
        name=entry.run,
        user=entry.user,
        uid=entry.uid,
        state=states.get(entry.blocked, RowState.DEPENDENT),
        place=place,
        since=entry.since,
        reason=SILENT if entry.is_silent else entry.reason or describe_wait(entry, ahead),
        gpus=entry.selection,
        priority=entry.priority,
        position=entry.position,
        share=entry.share,
        min_free=entry.min_free,
        begin=entry.begin,
        folder=folder,
        after=() if state is None else tuple(dependency.name for dependency in state.after),
        key=f"waiting {entry.key}",
    )


def describe_wait(waiter: ReservationInfo, ahead: Sequence[ReservationInfo]) -> str:
    """Return `waits for --gpus free:2, 1 run ahead`, for a run that does not say more."""
    position = f"{pluralize(len(ahead), 'run')} ahead" if ahead else "next in the queue"
    return f"waits for --gpus {waiter.selection}, {position}"
