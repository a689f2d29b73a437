"""The job of a run in a batch system, `RUN/job.json`, and what that makes of the state of the run.

`engine.jobs.launch.submission` writes it. A run whose process lives has its own state; otherwise its job says whether
the run waits or starts, or why it did not begin or go on.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.base.codec import FileRecord, Meta, UnixTime, find_record, replace, write_record
from engine.base.errors import UsageError
from engine.base.files import find_file_stamp, is_file
from engine.runs.batch.engine import BatchError, JobPhase, JobState
from engine.runs.batch.states import UnknownJobError, find_engine, forget, job_state
from engine.runs.folder import RunFolder, RunState
from engine.runs.run_record import read_run_record

_Text = Annotated[str, Meta(max_length=1000)]
MAX_JOB_BYTES = 1 << 14


class SubmittedJob(FileRecord, frozen=True, kw_only=True):
    """Content of `job.json`. `phase` and `words` are how the job ended, once somebody has seen that."""

    engine: Annotated[str, Meta(max_length=300)]
    """The batch system: slurm, or ray:ADDRESS."""
    id: Annotated[str, Meta(min_length=1, max_length=100, pattern="^[A-Za-z0-9][A-Za-z0-9_.:-]*$")]
    """ID of the job there."""
    submitted_at: UnixTime
    """When it was submitted, in Unix seconds."""
    phase: JobPhase | None = None
    """How the job ended: completed, cancelled, failed, or killed by the batch system; null before."""
    words: _Text = ""
    """Why it ended, in the words of the batch system, such as out of memory."""


@dataclass(frozen=True)
class JobView:
    """What its job says of a run without an owner: the state of the run and why. `is_open`: the job may start again."""

    state: RunState
    message: str
    is_open: bool


def read_job(folder: RunFolder) -> SubmittedJob | None:
    """Return the job of a run; None if it has none."""
    return find_record(folder.job, SubmittedJob, MAX_JOB_BYTES)


def view_job(folder: RunFolder, recorded: RunState) -> JobView | None:
    """Return what the job of a run without an owner says, whose record has this state; None if nothing beyond that."""
    if recorded is RunState.FINISHED or not folder.is_own or (job := read_job(folder)) is None:
        return None
    name, has_ended = f"{job.engine} job {job.id}", not recorded.live
    if job.phase is not None:
        state = JobState(job.phase, job.words)
    else:
        try:
            state = job_state(job.engine, job.id, job.submitted_at)
        except UnknownJobError as error:
            state = JobState(JobPhase.FAILED, error.problems[0].reason)
        except BatchError as error:
            unknown = f"{name}, state unknown: {error.problems[0].reason}"
            return JobView(recorded, unknown if recorded is RunState.WAITING else "", is_open=True)
        if state.phase.is_over:
            with suppress(OSError):
                write_record(folder.job, replace(job, phase=state.phase, words=state.words))
    if state.phase is JobPhase.PENDING:
        before = "" if recorded is RunState.WAITING else "requeued, "
        return JobView(RunState.WAITING, f"{before}{state.words}", is_open=True)
    journal = find_file_stamp(folder.journal)
    is_new = recorded is RunState.WAITING or journal is None or state.started_at > journal[2] / 1e9
    if state.phase is JobPhase.RUNNING and is_new:
        return JobView(RunState.STARTING, state.words, is_open=True)
    has_begun = recorded is not RunState.WAITING
    advice = f"`gputrain resume {folder.name}` continues it" if has_begun else f"see `gputrain logs {folder.name}`"
    why = f"{name}: {state.words}; {advice}"
    if has_ended or state.phase is JobPhase.RUNNING:
        # It says itself how it ended, but not why it got the signal.
        own, is_killed = recorded if has_ended else RunState.CRASHED, state.phase is JobPhase.KILLED
        told = why if is_killed and recorded is RunState.STOPPED else ""
        return JobView(own, told, is_open=not state.phase.is_over)
    if state.phase is JobPhase.CANCELLED:
        return JobView(RunState.STOPPED, f"{name} was cancelled", is_open=False)
    return JobView(RunState.FAILED, why, is_open=False)


def pending_job(folder: RunFolder) -> str | None:
    """Return what the job of a run waits for, as a sentence; None if none waits."""
    job, record = read_job(folder), read_run_record(folder)
    if job is None or record is None or folder.is_owned() or (view := view_job(folder, record.state)) is None:
        return None
    is_waiting = view.state is RunState.WAITING and view.is_open
    return f"{view.message}; {job.engine} job {job.id}" if is_waiting else None


def log_of(folder: RunFolder) -> Path:
    """Return the log of a run, or the output of its job as long as that has not begun the run."""
    if not is_file(str(folder.job_log)) or (
        (record := read_run_record(folder)) and record.state is not RunState.WAITING
    ):
        return folder.log
    return folder.job_log


def require_no_open_job(folder: RunFolder, recorded: RunState) -> None:
    """Raise UsageError if the job of a run with this recorded state may still start it, unless this is in that job."""
    if (job := read_job(folder)) is None:
        return
    with suppress(BatchError):
        if os.environ.get(find_engine(job.engine).job_variable) == job.id:
            return
    view = view_job(folder, recorded)
    if view is not None and view.is_open:
        reason = f"has a job already: {view.message or view.state}"
        raise UsageError.one(folder.name, reason, f"`gputrain stop {folder.name}` cancels it", code="already-running")


def cancel_job(folder: RunFolder, *, is_owned: bool = False) -> str | None:
    """Cancel the job of a run that no process owns yet; with `is_owned`, also if one does. Return what became of it, as
    the end of a sentence; None without such a job. Raises UsageError."""
    job = read_job(folder)
    if job is None or job.phase is not None or (folder.is_owned() and not is_owned):
        return None
    try:
        find_engine(job.engine).cancel(job.id)
    except BatchError as error:
        problem, advice = error.problems[0], f"if the cluster is gone, delete {folder.job}"
        raise UsageError.one(folder.name, problem.reason, advice, code=problem.code) from error
    forget(job.engine)
    write_record(folder.job, replace(job, phase=JobPhase.CANCELLED, words="cancelled"))
    return f"is stopped: {job.engine} job {job.id} is cancelled"


def write_job(folder: RunFolder, engine: str, job: str) -> None:
    """Store the job of a run that was submitted now. Raises OSError."""
    write_record(folder.job, SubmittedJob(engine=engine, id=job, submitted_at=round(time.time(), 3)))
    forget(engine)
