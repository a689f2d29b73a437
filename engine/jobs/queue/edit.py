"""Change the place of a waiting run of this user: hold, release, cancel, priority, order and begin time.

The supervisor of the run carries out the requests (`place`), because only the owner of a run writes to its folder. An
interrupted run has no supervisor; it can only be cancelled, or started again with `engine.jobs.launch.detached`.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from engine.base.codec import UNSET, UnsetType, replace
from engine.base.errors import UsageError
from engine.base.units import format_date
from engine.base.wait import wait_until
from engine.config.begin_time import NOT_A_BEGIN_TIME, begin_time
from engine.config.queue_section import MAX_PRIORITY
from engine.config.run_name import normalize_name
from engine.config.schema import Config
from engine.jobs.queue.listing import QueueRow, RowState, list_queue
from engine.jobs.queue.state import PENDING_STAGES, QueueStage, read_queue_state, write_queue_state
from engine.runs.batch.job import cancel_job
from engine.runs.control import QueueRequestName, send_request
from engine.runs.events import RunFinished
from engine.runs.find import find_run
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from engine.runs.recorder import Recorder
from engine.runs.root import LAST_RUN
from engine.runs.run_row import open_run

# A supervisor polls once per second.
APPLY_TIMEOUT_SECONDS = 5.0
Destination = Literal["first", "last"]


def find_own_row(reference: str, root: Path, rows: Sequence[QueueRow] | None = None) -> QueueRow:
    """Return the waiting run of this user that a name, a folder or `last` refers to.

    Raises UsageError if there is none or several, or if it is that of another user."""
    rows, reference = list_queue(root) if rows is None else rows, normalize_name(reference)
    own = [row for row in rows if row.is_own and row.folder]
    # A name may exist in several runs folders.
    here = [row for row in own if Path(row.folder).parent == root]
    for candidates in (here, own):
        matches = [row for row in candidates if reference in (row.name, row.folder)]
        if reference == LAST_RUN and candidates:
            return max(candidates, key=lambda row: row.since)
        if len(matches) == 1:
            return matches[0]
        if matches:
            listed = ", ".join(row.folder for row in matches)
            raise UsageError.one(
                reference, f"is the name of several waiting runs: {listed}", "type a folder", code="ambiguous-name"
            )
    foreign = next((row for row in rows if not row.is_own and row.name == reference), None)
    if foreign is not None:
        raise UsageError.one(
            reference, f"belongs to {foreign.user}; only that user can change its place", code="foreign-owner"
        )
    # Says that there is no such run, if there is none. Of a run of others, only the state is read.
    folder = find_run(root, reference, trust_owner=True)
    row, name = open_run(folder), shlex.quote(folder.name)
    advice = f"`gputrain stop {name}` stops it" if row.live else f"`gputrain resume {name} --queue` queues it again"
    raise UsageError.one(folder.name, f"is not in the queue: it is {row.state}", advice, code="wrong-state")


def hold(row: QueueRow) -> str:
    """Keep a run from starting. Return what became of it, as a sentence. Raises UsageError."""
    return _request(row, "hold", lambda now: now.state is RowState.HELD, "is held")


def release(row: QueueRow) -> str:
    """Let a held run start. Return what became of it, as a sentence. Raises UsageError."""
    state = read_queue_state(RunFolder(Path(row.folder)))
    # The other runs of its batch see that this one is released.
    result = "is released, and so is the rest of its batch" if state and state.crash_hold else "is released"
    return _request(row, "release", lambda now: now.state is not RowState.HELD, result)


def set_priority(row: QueueRow, priority: int) -> str:
    """Order a run among those of this user: the highest priority first. Raises UsageError."""
    if abs(priority) > MAX_PRIORITY:
        raise UsageError.one(
            "priority", f"{priority} is not between -{MAX_PRIORITY} and {MAX_PRIORITY}", code="out-of-range"
        )
    return _order(row, priority, row.position, f"has priority {priority}")


def parse_begin(text: str) -> float:
    """Return the Unix time that a typed begin time means, 0 for one that has passed. Raises UsageError."""
    now = time.time()
    if (begin := begin_time(text, now)) is None:
        raise UsageError.one("", f"{text!r} {NOT_A_BEGIN_TIME}", code="invalid-value")
    return begin if begin > now else 0.0


def set_begin(row: QueueRow, begin: float) -> str:
    """Set the Unix time before which a run does not start, 0 for none. Return the result as a sentence.

    Raises UsageError."""
    result = f"begins at {format_date(begin)}" if begin else "has no begin time"
    return _request(row, "begin", lambda now: now.begin == begin, result, begin=begin)


def move(row: QueueRow, rows: Sequence[QueueRow], before: QueueRow | Destination) -> str:
    """Move a run before another run of this user, or to the beginning or the end of them.

    Return what became of it, as a sentence. Raises UsageError."""
    others = _other_runs(row, rows)
    if not isinstance(before, QueueRow):
        return _place(row, others, 0 if before == "first" else len(others))
    if before.key == row.key:
        raise UsageError.one(row.name, "cannot be moved before itself", code="conflict")
    index = next((index for index, each in enumerate(others) if each.key == before.key), None)
    if index is None:
        raise UsageError.one(before.name, "is not one of your waiting runs", code="wrong-state")
    return _place(row, others, index)


def shift(row: QueueRow, rows: Sequence[QueueRow], step: Literal[-1, 1]) -> str:
    """Move a run by one place among those of this user. Return what became of it, as a sentence. Raises UsageError."""
    others = _other_runs(row, rows)
    return _place(row, others, min(max(_place_among(row, others) + step, 0), len(others)))


def _place(row: QueueRow, others: Sequence[QueueRow], index: int) -> str:
    """Move a run before the other run of this index, or behind all. It takes the priority of its new neighbor."""
    if not others:
        return f"{row.name} is the only one of your runs that waits."
    if index == _place_among(row, others) and index in (0, len(others)):
        return f"{row.name} is already the {'last' if index else 'first'} of your runs."
    if index == len(others):
        return _order(row, others[-1].priority, others[-1].position + 1)
    target, previous = others[index], others[max(index - 1, 0)]
    if index == 0 or previous.priority != target.priority:
        return _order(row, target.priority, target.position - 1)
    middle = (previous.position + target.position) / 2
    if previous.position < middle < target.position:
        return _order(row, target.priority, middle)
    # No number lies between the two: shift those before the target.
    for step, other in enumerate(reversed([each for each in others[:index] if each.priority == target.priority])):
        _order(other, other.priority, target.position - 2 - step)
    return _order(row, target.priority, target.position - 1)


def _other_runs(row: QueueRow, rows: Sequence[QueueRow]) -> list[QueueRow]:
    """Return the other waiting runs of this user in their order."""
    return sorted((each for each in rows if each.is_own and each.is_live and each.key != row.key), key=_rank)


def _place_among(row: QueueRow, others: Sequence[QueueRow]) -> int:
    return sum(_rank(each) < _rank(row) for each in others)


def _rank(row: QueueRow) -> tuple[int, float, float]:
    return -row.priority, row.position, row.since


def _order(row: QueueRow, priority: int, position: float, result: str = "is moved") -> str:
    def is_done(now: QueueRow) -> bool:
        return now.priority == priority and math.isclose(now.position, position, rel_tol=1e-15, abs_tol=1e-9)

    return _request(row, "order", is_done, result, priority, position)


def _request(
    row: QueueRow,
    request: QueueRequestName,
    is_done: Callable[[QueueRow], bool],
    result: str,
    priority: int | UnsetType = UNSET,
    position: float | UnsetType = UNSET,
    begin: float | UnsetType = UNSET,
) -> str:
    """Send a request and wait until the supervisor has carried it out. Return the result as a sentence."""
    if not row.is_live:
        raise UsageError.one(row.name, row.reason, code="wrong-state")
    control = RunFolder(Path(row.folder)).control
    send_request(control, request, priority=priority, position=position, begin=begin)

    def outcome() -> str:
        now = next((each for each in list_queue() if each.folder == row.folder and each.is_own), None)
        if now is not None:
            return result if is_done(now) else ""
        state = read_queue_state(RunFolder(Path(row.folder)))
        return "has ended" if state is None or state.stage is QueueStage.ENDED else "has started"

    unanswered = "has not answered yet: its supervisor is suspended or the host is busy"
    return f"{row.name} {wait_until(outcome, APPLY_TIMEOUT_SECONDS) or unanswered}."


def cancel(row: QueueRow) -> str:
    """Remove a run from the queue; its folder stays, as a stopped run. Return what became of it, as a sentence.

    Raises UsageError."""
    folder = RunFolder(Path(row.folder))
    if row.state is RowState.PENDING:
        cancel_job(folder)
    elif not row.is_live:
        cancel_interrupted(folder)
    else:
        send_request(folder.control, "stop")
        if not wait_until(lambda: not folder.is_owned(), APPLY_TIMEOUT_SECONDS):
            return f"Sent the request to {row.name}."
    return f"{row.name} is stopped."


def cancel_interrupted(folder: RunFolder) -> bool:
    """Record that a run without a supervisor does not start any more. Return whether it was in the queue.

    Raises UsageError if it has a supervisor by now."""
    held = find_run(folder.path.parent, str(folder.path))
    ownership = Ownership(held)
    try:
        state = read_queue_state(held)
        if state is None or state.stage not in PENDING_STAGES:
            return False
        recorder = Recorder(held, Config(), lambda _: None)
        recorder.record(RunFinished(state="stopped", message="cancelled after its wait was interrupted"))
        recorder.close()
        write_queue_state(held, replace(state, stage=QueueStage.ENDED))
        return True
    finally:
        ownership.release()
