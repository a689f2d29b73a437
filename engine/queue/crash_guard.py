"""Hold the rest of a batch of jobs whose first ones fail at once, so that they do not all fail overnight.

A batch is what one user queues within ten minutes from one folder with one program and the same code: what is queued
after the code was mended is another batch. `engine.queue.place` asks for its state while a run waits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from engine.queue.state import QueueStage, QueueState, read_queue_state
from engine.runs.folder import RunFolder, RunState
from engine.runs.root import is_listed
from engine.runs.run_record import read_run_record
from engine.utils.text import list_names, printable

EARLY_SECONDS = 30.0
"""A job that fails within this time after its start, or before it, fails early."""
BATCH_SECONDS = 600.0
MAX_EARLY_FAILURES = 2
MAX_CAUSE_CHARS = 200
# The command was ended from outside, by a person as far as can be known.
_ENDED_BY_PERSON = (-signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class JobStart:
    """A job that has shown whether it works. `failure` is why it failed early; None if it worked.

    `started_at` and `ended_at` are in Unix seconds; `ended_at` is that of a failure.
    """

    name: str
    started_at: float
    failure: str | None = None
    ended_at: float = 0.0


def hold_reason(starts: Iterable[JobStart]) -> str | None:
    """Return why the rest of a batch is held, as a clause; None if it is not.

    It is held if the last jobs that were started, and at least `MAX_EARLY_FAILURES` of them, failed early: a job that
    works shows that the program does.
    """
    failed: list[JobStart] = []
    for start in sorted(starts, key=lambda each: (each.started_at, each.name)):
        failed = [*failed, start] if start.failure is not None else []
    if len(failed) < MAX_EARLY_FAILURES:
        return None
    cause = printable(failed[-1].failure or "")
    cause = cause if len(cause) <= MAX_CAUSE_CHARS else f"{cause[: MAX_CAUSE_CHARS - 1]}…"
    names = [each.name for each in failed]
    listed = " and ".join(names) if len(names) == MAX_EARLY_FAILURES else list_names(names)
    return f"{listed} failed within {EARLY_SECONDS:.0f} s ({cause})"


def judge_start(folder: RunFolder, state: QueueState) -> JobStart | None:
    """Return what the start of a queued run has shown; None if it waits, has just started, or a person ended it."""
    record = read_run_record(folder)
    if record is None or state.granted_at is None:
        return None
    has_started = state.stage is QueueStage.STARTED
    began = record.started_at if has_started and record.started_at is not None else state.granted_at
    updated = max(record.updated_at or began, began)
    is_early = updated - began <= EARLY_SECONDS or not has_started
    if record.state is RunState.FAILED and is_early:
        # The journal of a run that failed early is short; its record also says how to resume it.
        failures = folder.history().failures
        cause = failures[-1].cause if failures else record.message
        return None if record.exit_code in _ENDED_BY_PERSON else JobStart(folder.name, began, cause, updated)
    with suppress(OSError):
        # When its supervisor last wrote that it lives: a command without metrics has no events.
        is_early = is_early and folder.owner.stat().st_mtime - began <= EARLY_SECONDS
    if record.state.live and has_started and is_early and not folder.is_owned():
        return JobStart(folder.name, began, "its supervisor was killed", updated)
    if has_started and (record.state is RunState.FINISHED or not is_early):
        return JobStart(folder.name, began)
    return None


class JobBatch(NamedTuple):
    """What the other jobs of a waiting run's batch mean for it: why it is held, None if it is not; when the user last
    released a job, before which no failure counts; and whether no other job that waits was queued before it."""

    held_because: str | None = None
    released_at: float = 0.0
    is_first: bool = True


def read_batch(folder: RunFolder, state: QueueState) -> JobBatch:
    """Read the batch of a waiting run."""
    if not state.program:
        return JobBatch()
    others = _other_jobs(folder, state)
    released_at = max(state.released_at, *(other.released_at for other in others.values()), 0.0)
    starts = [start for run, other in others.items() if (start := judge_start(run, other)) is not None]
    held_because = hold_reason(each for each in starts if each.failure is None or each.ended_at > released_at)
    own = state.submitted_at, folder.name
    before = (run for run, other in others.items() if (other.submitted_at, run.name) < own)
    is_first = not any(others[run].stage is QueueStage.WAITING and run.is_owned() for run in before)
    return JobBatch(held_because, released_at, is_first)


def _other_jobs(folder: RunFolder, state: QueueState) -> dict[RunFolder, QueueState]:
    """Return the other jobs of a batch. One stat(2) for each run: of thousands, nearly all were queued long before."""
    path, found = folder.path, dict[RunFolder, QueueState]()
    entries = list[os.DirEntry[str]]()
    with suppress(OSError), os.scandir(path.parent) as listing:
        entries = [entry for entry in listing if entry.name != path.name and is_listed(entry.name)]
    for entry in entries:
        # A run that is deleted at this moment hides no other.
        with suppress(OSError):
            is_old = entry.stat(follow_symlinks=False).st_mtime < state.submitted_at - BATCH_SECONDS
            if is_old or not entry.is_dir(follow_symlinks=False):
                continue
            run = RunFolder(path.parent / entry.name)
            other = read_queue_state(run) if run.is_own else None
            if other is None or abs(other.submitted_at - state.submitted_at) > BATCH_SECONDS:
                continue
            if (other.program, other.cwd, other.code) == (state.program, state.cwd, state.code):
                found[run] = other
    return found
