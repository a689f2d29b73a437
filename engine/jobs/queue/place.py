"""The place of this run in the queue while its supervisor waits: serves requests, follows the runs to wait for.

`engine.jobs.launch.phases` creates it once the run folder is claimed, and `engine.gpus.allocation` polls its terms once
per second.

The rest of a batch is held whose first jobs fail at once, so that they do not all fail overnight. A batch is what one
user queues within ten minutes from one folder with one program and the same code: what is queued after the code was
mended is another batch."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.base.codec import UNSET, replace
from engine.base.errors import CodedError
from engine.base.text import list_names, printable
from engine.base.units import format_date
from engine.config.begin_time import begin_time
from engine.config.schema import Config
from engine.gpus.queue_terms import MAX_PRIORITY, MAX_TIME, Blocked, QueueTerms
from engine.jobs.queue.dependencies import Predecessor
from engine.jobs.queue.listing import find_row
from engine.jobs.queue.state import PENDING_STAGES, QueueStage, QueueState, read_queue_state, write_queue_state
from engine.runs.control import QUEUE_REQUEST_NAMES, REFUSAL_OUTCOMES, ControlRequest, consume_requests
from engine.runs.events import ControlEvent, GpusGranted, WaitingForGpus
from engine.runs.folder import RunFolder, RunState
from engine.runs.recorder import Recorder
from engine.runs.root import is_listed
from engine.runs.run_record import read_run_record

EARLY_SECONDS = 30.0
"""A job that fails within this time after its start, or before it, fails early."""
BATCH_SECONDS = 600.0
MAX_EARLY_FAILURES = 2
MAX_CAUSE_CHARS = 200
# The command was ended from outside, by a person as far as can be known.
_ENDED_BY_PERSON = (-signal.SIGINT, -signal.SIGTERM)


class JobStart(NamedTuple):
    """A job that has shown whether it works. `failure` is why it failed early; None if it worked."""

    started_at: float
    name: str
    failure: str | None
    ended_at: float


def judge_start(folder: RunFolder, state: QueueState) -> JobStart | None:
    """Return what the start of a queued run has shown; None if it waits, has just started, or was ended by a person."""
    record = read_run_record(folder)
    if record is None or state.granted_at is None:
        return None
    has_started = state.stage is QueueStage.STARTED
    began, ended = (record.started_at if has_started else None) or state.granted_at, record.updated_at
    if record.state.live:
        with suppress(OSError):
            # When its supervisor last wrote that it lives: a command without metrics has no events.
            ended = folder.owner.stat().st_mtime
    ended = ended or began
    has_run = has_started and ended - began > EARLY_SECONDS
    failure = record.message if record.state is RunState.FAILED else None
    if record.state.live and has_started and not folder.is_owned():
        failure = "its supervisor was killed"
    if failure is not None and not has_run and record.exit_code not in _ENDED_BY_PERSON:
        return JobStart(began, folder.name, failure, ended)
    return JobStart(began, folder.name, None, ended) if has_run or record.state is RunState.FINISHED else None


class JobBatch(NamedTuple):
    """What the other jobs of a waiting run's batch mean for it: why it is held, as a clause, "" if it is not; when the
    last of them failed; when the user last released one; and whether no other job that waits was queued before it."""

    held_because: str = ""
    failed_at: float = 0.0
    released_at: float = 0.0
    is_first: bool = True


def read_batch(folder: RunFolder, state: QueueState) -> JobBatch:
    """Read the batch of a waiting run.

    It is held if the last jobs that were started, and at least `MAX_EARLY_FAILURES` of them, failed early, after the
    user last released one: a job that works shows that the program does."""
    others = _other_jobs(folder, state) if state.program else {}
    released_at = max(state.released_at, *(other.released_at for other in others.values()), 0.0)
    failed: list[JobStart] = []
    for start in sorted(start for run, other in others.items() if (start := judge_start(run, other)) is not None):
        if start.failure is None:
            failed = []
        elif start.ended_at > released_at:
            failed.append(start)
    if len(failed) < MAX_EARLY_FAILURES:
        return JobBatch(released_at=released_at)
    cause = printable(failed[-1].failure or "")
    cause = cause if len(cause) <= MAX_CAUSE_CHARS else f"{cause[: MAX_CAUSE_CHARS - 1]}…"
    reason = f"{list_names([each.name for each in failed])} failed within {EARLY_SECONDS:.0f} s ({cause})"
    own = state.submitted_at, folder.name
    before = [run for run, other in others.items() if (other.submitted_at, run.name) < own]
    is_first = not any(others[run].stage is QueueStage.WAITING and run.is_owned() for run in before)
    return JobBatch(reason, max(each.ended_at for each in failed), released_at, is_first)


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


# A reason may change every second, for as long as a run waits.
RECORD_INTERVAL_SECONDS = 30.0
MAX_BATCH_SHARE = 0.01  # of a core, to read the other jobs of the batch of a run


class CancelledError(CodedError):
    """A stop request arrived while the run waited; the message says from whom."""

    code = "stopped"


@dataclass
class QueuePlace:
    """The place of this run in the queue. `fixed` are the terms that do not change while it waits. `keep_alive` is
    called once per second.

    `on_crash_hold` gets the reason once per batch, when runs of it that failed at once hold the rest."""

    folder: RunFolder
    state: QueueState
    fixed: QueueTerms
    recorder: Recorder
    keep_alive: Callable[[], None]
    followed: list[Predecessor] = field(default_factory=list)
    on_crash_hold: Callable[[str], None] = lambda _: None
    _entered_at: float = field(default_factory=time.monotonic, init=False)
    _recorded_at: float = field(default=-math.inf, init=False)
    _read_batch_at: float = field(default=-math.inf, init=False)
    _reason: str = field(default="", init=False)
    _block: Blocked = field(default="", init=False)
    _recorded: tuple[str, int | None] | None = field(default=None, init=False)
    """Reason and place in the journal."""

    @property
    def has_waited(self) -> bool:
        """Whether the journal says so."""
        return self._recorded is not None

    def save(self, **changes: object) -> None:
        """Change and store the place."""
        self.state = replace(self.state, **changes)
        write_queue_state(self.folder, self.state)

    def poll_terms(self) -> tuple[QueueTerms, str]:
        """Return the terms on which the run waits now, and why it is blocked, "" if it is not.

        Raises CancelledError, DependencyError and OwnershipLostError."""
        self.keep_alive()
        for request in consume_requests(self.folder.control):
            self._apply(request)
        blocked, reason = self._blocked()
        if blocked != self._block:
            # A hold or its end is recorded at once.
            self._block, self._recorded_at = blocked, -math.inf
        terms = replace(
            self.fixed,
            priority=self.state.priority,
            position=self.state.position,
            blocked=blocked,
            begin=self.state.begin,
            folder=str(self.folder.path),
        )
        return terms, reason

    def _blocked(self) -> tuple[Blocked, str]:
        """Return why the run may not take GPUs yet, and the reason as text; both are empty if it may."""
        # Also while the run is held: a failed dependency ends it.
        reasons = [reason for run in self.followed if (reason := run.waits_because())]
        name = self.folder.name
        self._poll_crash_guard()
        if self.state.crash_hold:
            return "held", f"held: {self.state.crash_hold}; `gputrain queue release {name}` starts the rest"
        if self.state.held:
            return "held", f"held; `gputrain queue release {name}` lets it start"
        if any(run.is_stopped for run in self.followed):
            return "held", "; ".join([*reasons, f"`gputrain queue release {name}` starts this run without it"])
        blocked: Blocked = "dependency" if reasons else ""
        if time.time() < self.state.begin:
            reasons.append(f"begins at {format_date(self.state.begin)}")
        return blocked or ("begin" if reasons else ""), "; ".join(reasons)

    def _poll_crash_guard(self) -> None:
        """Hold this run because of its batch, or no longer, because the user has released a run of it."""
        if time.monotonic() < self._read_batch_at:
            return
        started_at = time.thread_time()
        batch = read_batch(self.folder, self.state)
        # Hundreds of jobs are read less often than once per second.
        interval_s = (time.thread_time() - started_at) / MAX_BATCH_SHARE
        self._read_batch_at = time.monotonic() + interval_s if interval_s > 1.0 else -math.inf
        if self.state.crash_hold and batch.released_at >= self.state.crash_held_at:
            self.save(crash_hold="")
        elif batch.held_because and not self.state.crash_hold:
            self.save(crash_hold=batch.held_because, crash_held_at=batch.failed_at)
            if batch.is_first:
                self.on_crash_hold(batch.held_because)

    def _release(self) -> str:
        """Let the run wait for its turn, no longer for runs that were stopped, and its batch too. Return the
        outcome."""
        stopped = [run for run in self.followed if run.is_stopped]
        if not self.state.held and not self.state.crash_hold and not stopped:
            return "not held"
        for run in stopped:
            self.followed.remove(run)
        after = tuple(run.dependency for run in self.followed)
        self.save(held=False, crash_hold="", released_at=time.time(), after=after)
        return "the run waits for its turn"

    def _apply(self, request: ControlRequest) -> None:
        """Carry out a request and record it. Raises CancelledError."""
        outcome = self._outcome(request)
        self.recorder.record(ControlEvent(request=request.request, by=request.by, outcome=outcome))
        if request.request == "stop":
            raise CancelledError(f"cancelled by {request.by} while it waited")

    def _outcome(self, request: ControlRequest) -> str:
        match request.request:
            case "stop":
                return "the run leaves the queue"
            case "hold":
                if self.state.held:
                    return "already held"
                self.save(held=True)
                return "the run does not start until it is released"
            case "release":
                return self._release()
            case "order":
                priority, position = request.priority, request.position
                if priority is UNSET or position is UNSET or abs(priority) > MAX_PRIORITY or abs(position) > MAX_TIME:
                    return "refused: the request has no valid priority and position"
                self.save(priority=priority, position=position)
                return f"priority {priority}"
            case "begin":
                if request.begin is UNSET or not 0 <= request.begin <= MAX_TIME:
                    return "refused: the request has no valid time"
                self.save(begin=request.begin)
                return f"begin {format_date(request.begin)}" if request.begin else "no begin time"
        ignored = f"ignored: a waiting run accepts {', '.join(QUEUE_REQUEST_NAMES)} and stop"
        return REFUSAL_OUTCOMES.get(request.request, ignored)

    def report(self, reason: str) -> None:
        """Record why the run waits and at which place, and show the reason if it has changed."""
        changed, self._reason = reason != self._reason, reason
        event, now = WaitingForGpus(message=reason), time.monotonic()
        if now - self._recorded_at >= RECORD_INTERVAL_SECONDS:
            # It reads the entries of all runs that wait.
            self._recorded_at = now
            row = find_row(self.folder)
            place = None if row is None else row.place
            if (reason, place) != self._recorded:
                self._recorded = reason, place
                self.recorder.record(event if place is None else replace(event, place=place), notify=changed)
                return
        if changed:
            self.recorder.show(event)

    def leave(self, devices: Sequence[str]) -> None:
        """Record that the run has its devices."""
        self.save(stage=QueueStage.GRANTED, granted_at=time.time())
        if self.has_waited:
            waited_s = time.monotonic() - self._entered_at
            self.recorder.record(GpusGranted(devices=list(devices), seconds=round(waited_s, 3)))


def initial_state(
    folder: RunFolder, config: Config, pid: int, program: str = "", cwd: str = "", code: str = ""
) -> QueueState:
    """Return the place of a run that joins the queue: the one it had, if its wait was interrupted.

    `program`, `cwd` and `code` say to which batch it belongs, see `JobBatch`."""
    previous, now = read_queue_state(folder), time.time()
    if previous is not None and previous.stage in PENDING_STAGES:
        return replace(previous, pid=pid, stage=QueueStage.WAITING)
    return QueueState(
        submitted_at=now,
        position=now,
        priority=config.queue.priority,
        held=False,
        after=(),
        stage=QueueStage.WAITING,
        pid=pid,
        begin=begin_time(config.queue.begin or "", now) or 0.0,
        program=program,
        cwd=cwd,
        code=code,
    )


def fixed_terms(config: Config) -> QueueTerms:
    """Return the terms that a config sets, which are all of a run without a `QueuePlace`: it does not wait, or torchrun
    or srun started it."""
    queue = config.queue
    return QueueTerms(priority=queue.priority, share=queue.share, min_free=queue.min_free_bytes)
