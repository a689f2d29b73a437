"""Hold the rest of a batch of jobs whose first ones fail at once, so that they do not all fail overnight.

A batch is what one user queues within ten minutes from one folder with one program and the same code: what is queued
after the code was mended is another batch. `engine.queue.place` polls a guard while its run waits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.queue.state import QueueStage, QueueState, read_queue_state
from engine.runs.folder import RunFolder, RunState
from engine.runs.root import is_listed
from engine.runs.run_record import RunRecord, read_run_record
from engine.utils.files import shown_path
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
        is_by_person = record.exit_code in _ENDED_BY_PERSON
        return None if is_by_person else JobStart(folder.name, began, _cause(folder, record), updated)
    is_early = is_early and _last_heartbeat(folder) - began <= EARLY_SECONDS
    if record.state.live and has_started and is_early and not folder.is_owned():
        return JobStart(folder.name, began, "its supervisor was killed", updated)
    if has_started and (record.state is RunState.FINISHED or not is_early):
        return JobStart(folder.name, began)
    return None


def _last_heartbeat(folder: RunFolder) -> float:
    """When the supervisor last wrote that it lives, in Unix seconds: a command without metrics has no events."""
    try:
        return folder.owner.stat().st_mtime
    except OSError:
        return 0.0


def _cause(folder: RunFolder, record: RunRecord) -> str:
    # The journal of a run that failed early is short; its record also says how to resume it.
    failures = folder.history().failures
    return failures[-1].cause if failures else record.message


@dataclass
class _Member:
    """A run that may belong to the batch, as it was when its folder had this modification time. `is_recent`: it was
    queued together with the run of the guard."""

    stamp: int
    state: QueueState | None
    is_recent: bool = False
    start: JobStart | None = None

    @property
    def is_settled(self) -> bool:
        """Whether only a change of the folder can change what the guard knows of it. A kill changes no folder."""
        is_running = self.state is not None and self.state.stage in (QueueStage.GRANTED, QueueStage.STARTED)
        return self.start is not None or not (self.is_recent and is_running)


class CrashGuard:
    """Finds out whether the batch of a waiting run fails at once. `poll` costs a stat(2) for each run of the batch."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._root_stamp = 0
        self._members: dict[str, _Member] = {}
        self._others: set[str] = set()
        """Names of the runs in the runs folder that are not of the batch."""

    def poll(self, state: QueueState) -> tuple[str | None, float]:
        """Return why the batch of a run with this place is held, and when the user last released a run of it.

        Failures before that release do not count."""
        if not state.program:
            return None, 0.0
        self._read_members(state)
        batch = [member for member in self._members.values() if member.is_recent and member.state is not None]
        released_at = max([state.released_at, *(member.state.released_at for member in batch if member.state)])
        starts = (member.start for member in batch if member.start is not None)
        return hold_reason(each for each in starts if each.failure is None or each.ended_at > released_at), released_at

    def is_first(self, state: QueueState) -> bool:
        """Whether no other run of the batch that waits was queued before this one, so that one of them sends a
        message."""
        own = state.submitted_at, self._folder.name
        root = shown_path(self._folder.root).parent
        return not any(
            member.is_recent
            and member.state is not None
            and member.state.stage is QueueStage.WAITING
            and (member.state.submitted_at, name) < own
            and RunFolder(root / name).is_owned()
            for name, member in self._members.items()
        )

    def _read_members(self, state: QueueState) -> None:
        path = shown_path(self._folder.root)
        self._find_members(path.parent, path.name, state)
        for name, member in list(self._members.items()):
            try:
                stamp = os.stat(f"{path.parent}/{name}").st_mtime_ns  # noqa: PTH116
            except OSError:
                # Deleted or renamed, and then it has another name.
                del self._members[name]
                continue
            if stamp != member.stamp or not member.is_settled:
                self._members[name] = self._read(RunFolder(path.parent / name), stamp, state)
            read = self._members[name]
            if read.state is not None and not read.is_recent:
                del self._members[name]
                self._others.add(name)

    def _find_members(self, root: Path, own: str, state: QueueState) -> None:
        """Add the runs that may belong to the batch, if there is a new run in the runs folder."""
        try:
            stamp = os.stat(root).st_mtime_ns  # noqa: PTH116
            if stamp == self._root_stamp:
                return
            with os.scandir(root) as entries:
                for entry in entries:
                    name = entry.name
                    if name in self._others or name in self._members or name == own or not is_listed(name):
                        continue
                    # Of thousands of runs, nearly all were queued long before.
                    changed_at = entry.stat(follow_symlinks=False).st_mtime
                    is_candidate = changed_at >= state.submitted_at - BATCH_SECONDS
                    if is_candidate and entry.is_dir(follow_symlinks=False) and RunFolder(root / name).is_own:
                        self._members[name] = _Member(0, None)
                    else:
                        self._others.add(name)
        except OSError:
            # A runs folder that cannot be read for a moment. The next poll tries again.
            return
        self._root_stamp = stamp

    @staticmethod
    def _read(folder: RunFolder, stamp: int, state: QueueState) -> _Member:
        """Read a run. One without a place in the queue may still get one."""
        read = read_queue_state(folder)
        if read is None:
            return _Member(stamp, None)
        is_recent = (read.program, read.cwd, read.code) == (state.program, state.cwd, state.code)
        is_recent = is_recent and abs(read.submitted_at - state.submitted_at) <= BATCH_SECONDS
        return _Member(stamp, read, is_recent, judge_start(folder, read) if is_recent else None)
