"""Follow a run until it has ended or meets a condition: `gputrain wait` polls it.

A run whose folder was moved counts as deleted, also if another one has taken its place. As for every reader, the lock
of the run says whether its owner lives, and a heartbeat of its owner on another host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

from engine.base.codec import Integer, Seconds, asdict
from engine.base.errors import UsageError
from engine.report.outcome import RunOutcome, find_outcome, is_held
from engine.runs.claim import read_claim
from engine.runs.fields import as_text, find_field, names_of
from engine.runs.folder import RunFolder, RunState
from engine.runs.metrics import (
    BEST_PREFIX,
    METRIC_PREFIX,
    SHORT_NAMES,
    Better,
    better_of_name,
    fold_name,
)
from engine.runs.query import Query, condition_keys, parse_query
from engine.runs.run_row import RunRow, open_run

# A run whose owner has gone may still be deleted, because it never began.
CRASH_GRACE_SECONDS = 2.0
# torchrun restarts the ranks of a run, whose rank 0 then owns it again.
RESTART_GRACE_SECONDS = 60.0
LOST_STATES = (RunState.CRASHED, RunState.INTERRUPTED)


class Result(StrEnum):
    """What became of the wait for a run. A run that ended without meeting the condition is UNMET only if it
    finished."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    DELETED = "deleted"
    MET = "met"
    UNMET = "unmet"
    TIMEOUT = "timeout"


class AwaitedRun(RunOutcome, frozen=True, kw_only=True):
    """What became of the wait for a run."""

    name: str
    """Name of the run."""
    folder: str
    """Path of the run folder."""
    result: str
    """finished, failed, stopped, crashed, interrupted (killed while it waited for GPUs), deleted, timeout (the run goes
    on); with `--until` also met, or unmet if the run finished without."""
    state: str
    """State of the run at that moment: waiting, starting, running, paused, stopping, finished, stopped, failed, crashed
    or interrupted."""
    message: str
    """Why the run waits, why or with which result it ended, or why the condition was not met."""
    exit_code: Integer | None
    """Exit code of a command, negative for the signal that ended it; null if it has none."""
    seconds: Seconds
    """Duration of all sessions of the run together, in seconds, without pauses."""


class RunWait:
    """The wait for one run. `result` is None as long as it goes on; `row` is the run as last seen."""

    def __init__(self, folder: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder` is identified."""
        self.folder, self._clock = folder, clock
        self.row = RunRow(folder.name, str(folder.path), RunState.STARTING)
        self._read()
        self.result: Result | None = None
        self._lost_since: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether its user, or failed jobs of its batch, hold the run in the queue."""
        return self.row.state == RunState.WAITING and is_held(self.folder)

    def poll(self, condition: Query | None) -> None:
        """Find out whether the run has ended, or meets the condition."""
        if self.folder.is_gone:
            self.result = Result.DELETED
            return
        self._read()
        if condition is not None and condition.matches(self.row):
            self.result = Result.MET
        elif self._has_ended():
            finished = self.row.state == RunState.FINISHED
            self.result = Result.UNMET if finished and condition is not None else Result(self.row.state)

    def _read(self) -> None:
        # A file server may not answer for a while, and a run may be deleted at any moment.
        with suppress(OSError):
            self.row = open_run(self.folder)

    def _has_ended(self) -> bool:
        """Whether the run has ended: one that has lost its owner may be restarted at once."""
        if self.row.state not in LOST_STATES:
            self._lost_since = None
            return not (self.row.live or self.row.has_open_job)
        self._lost_since = self._clock() if self._lost_since is None else self._lost_since
        claim = read_claim(self.folder.owner)
        is_restarted = claim is not None and claim.agents
        return self._clock() - self._lost_since >= (RESTART_GRACE_SECONDS if is_restarted else CRASH_GRACE_SECONDS)

    def describe(self, condition: Query | None, directions: Mapping[str, Better]) -> AwaitedRun:
        """Return what became of the wait; of a run that goes on, that the time is up."""
        row, result = self.row, self.result or Result.TIMEOUT
        message = row.message
        if result is Result.DELETED:
            outcome, message = RunOutcome(figures={}, failure=None, remedy=""), "the run was deleted"
        else:
            outcome = find_outcome(self.folder, row, directions)
        if result is Result.UNMET and condition is not None:
            message = unmet_reason(condition, row, directions)
        return AwaitedRun(
            name=row.name,
            folder=row.folder,
            result=result,
            state=row.state,
            message=message,
            exit_code=row.record.exit_code,
            seconds=row.record.seconds,
            **asdict(outcome),
        )


def parse_condition(text: str, rows: Sequence[RunRow], directions: Mapping[str, Better]) -> tuple[Query, list[str]]:
    """Return a condition of `gputrain runs` on runs that may not have its metrics yet, and why each unknown key may be
    wrong.

    Raises UsageError if it is no condition."""
    names, notes = names_of(rows, directions), list[str]()
    own = dict(names.metrics)
    keys, words = condition_keys(text), text.split()
    is_condition = keys or any(word in set(RunState) for word in words)
    if not is_condition or any(word.startswith("-") for word in words):
        reason = f"{text} is no condition on a value or a state, such as 'val/acc>0.9' or paused"
        raise UsageError.one("--until", reason, code="invalid-value")
    for key in keys:
        logged = key.removeprefix("best_")
        if fold_name(logged) in SHORT_NAMES:
            # A command may print a metric that it calls so: `loss` is then that one, and not the validation loss.
            own.setdefault(logged, directions.get(logged) or better_of_name(logged))
        try:
            find_field(key, replace(names, metrics=tuple(own.items())))
        except UsageError as error:
            [problem] = error.problems
            if problem.code != "unknown-key":
                raise
            name = key.removeprefix(METRIC_PREFIX).removeprefix(BEST_PREFIX).removeprefix("best_")
            own[name] = directions.get(name) or better_of_name(name)
            notes.append(f"no run has {key} yet{f'; {problem.advice}' if problem.advice else ''}")
    return parse_query(text, replace(names, metrics=tuple(own.items()))), notes


def unmet_reason(condition: Query, row: RunRow, directions: Mapping[str, Better]) -> str:
    """Return why a run that has finished does not meet a condition."""
    names, found = names_of([row], directions), list[str]()
    for key in condition_keys(condition.text):
        value = None
        with suppress(UsageError):
            value = find_field(key, names).value(row)
        found.append(f"{key} is {'unknown' if value is None else as_text(value)}")
    return f"finished without {condition.text}{': ' if found else ''}{', '.join(found)}"
