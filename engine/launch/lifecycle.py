"""The lifecycle of a run in the process that owns it: claim, batch size, record, restart, end.

Two drivers call the same steps in the same order: `launcher`, whose supervisor forks the ranks, and `external`, a rank
that torchrun or srun started. Each holds only how its ranks train.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.distributed.failures import describe_failure
from engine.gpus.allocation import GpuAllocation
from engine.launch.batch_size import find_batch_size, previous_batch_size
from engine.launch.gpu_usage import local_gpu_ranks
from engine.launch.preflight import Preflight, RunRequest, check_dependencies, check_resumed_config
from engine.launch.slurm import requeue, slurm_job_id
from engine.notify.start import RunNotifier, start_watcher
from engine.queue.dependencies import FollowedRun
from engine.queue.place import QueuePlace, initial_state
from engine.queue.state import Dependency, QueueStage
from engine.runs.claimed_run import ClaimedRun, claim_run
from engine.runs.control import RequestCounters
from engine.runs.early_stop import has_stopped_early
from engine.runs.event_lines import BatchSizeFound, RunStarting
from engine.runs.events import Event, GpuEvent, RunFinished, RunStarted, WarningEvent
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder, RunState
from engine.runs.history import History
from engine.runs.metrics import METRICS, format_known
from engine.runs.recorder import Listener, Recorder
from engine.runs.run_record import read_run_record
from engine.training.job import Job, RunResult
from engine.utils import codec
from engine.utils.errors import Problem, UsageError
from engine.utils.exit_codes import ExitCode
from engine.utils.files import shown_path
from engine.utils.process import redirect_output
from engine.utils.text import pluralize
from engine.utils.units import UNKNOWN


class AlreadyFinishedError(Exception):
    """The run to resume has nothing left to do."""


@dataclass
class OwnedRun:
    """What the owner of a run holds: GPUs, run folder and recorder. `release` releases all of it."""

    request: RunRequest
    listener: Listener
    allocation: GpuAllocation = field(default_factory=GpuAllocation)
    claimed: ClaimedRun | None = None
    recorder: Recorder | None = None
    requests: RequestCounters = field(default_factory=RequestCounters)
    place: QueuePlace | None = None
    """Its place in the queue, also after it has left it; None if it neither waited nor is detached."""
    _started: bool = field(default=False, init=False)
    _early_warnings: list[WarningEvent] = field(default_factory=list, init=False)
    _early_usage: GpuEvent | None = field(default=None, init=False)
    _notifier: RunNotifier = field(default_factory=RunNotifier, init=False)
    _waiting_since: float | None = field(default=None, init=False)

    def show_wait(self, event: Event) -> None:
        """Show why the run waits for GPUs, and remember since when."""
        self._waiting_since = time.monotonic() if self._waiting_since is None else self._waiting_since
        self.listener(event)

    def show_gpu_warnings(self) -> None:
        """Show the warnings of the allocation."""
        fallback = self.allocation.cpu_fallback
        for problem in self.allocation.warnings:
            self._show_early_warning(codec.replace(WarningEvent.of(problem), cpu_fallback=problem == fallback))

    def _show_early_warning(self, warning: WarningEvent) -> None:
        """Show a warning before there is a journal, which will contain it, too."""
        self._early_warnings.append(warning)
        self.listener(warning)

    def enter_queue(self) -> QueuePlace:
        """Claim the run folder and take a place in the queue, before the run has GPUs.

        Raises UsageError, and AlreadyFinishedError if the run has nothing left to do."""
        dependencies = check_dependencies(self.request)
        self.claimed = self._claim_folder()
        self.recorder = open_recorder(
            self.claimed.folder, with_run_name(self.request.config, self.claimed.folder), self.listener
        )
        return self._take_place(QueueStage.WAITING, self.recorder, dependencies)

    def _take_place(self, stage: QueueStage, recorder: Recorder, dependencies: Sequence[Dependency] = ()) -> QueuePlace:
        folder, config = recorder.folder, self.request.config
        state = codec.replace(initial_state(folder, config, os.getpid()), stage=stage)
        # A run whose wait was interrupted waits for the same runs, whose folders it knows.
        state = codec.replace(state, after=state.after or tuple(dependencies))
        followed = [FollowedRun.open(self.request.runs_dir, dependency) for dependency in state.after]
        self.place = QueuePlace(folder, state, config.queue.share, recorder, self.keep_alive, followed)
        if self.request.detached:
            # From here on, whoever started it may be gone.
            with suppress(OSError):
                redirect_output(folder.log)
            recorder.listener = lambda _: None
            self.listener = lambda _: None
        self.place.save()
        return self.place

    def prepare(
        self, preflight: Preflight, world_size: int | None = None, check_stop: Callable[[], None] = lambda: None
    ) -> Job:
        """Claim the run folder, resolve the batch size and open the journal; return the job of the ranks.

        `world_size` is needed only if it is not that of this host. `check_stop` is called repeatedly during the search
        for a batch size, and may raise. Raises UsageError if a step fails, and AlreadyFinishedError if the run has
        nothing left to do."""
        job = self._claim(preflight)
        for warning in preflight.warnings:
            self._show_early_warning(WarningEvent.of(warning))
        job = self._resolve_batch_size(job, world_size or job.plan.local_world_size, check_stop)
        self._record(job)
        return job

    def _claim(self, preflight: Preflight) -> Job:
        """Claim the run folder; a dry run has a job without one."""
        assert preflight.plan is not None  # noqa: S101 - a preflight without problems has one
        request = self.request
        config = preflight.resolved(request.config)
        job = Job(config, preflight.plan, None, False, preflight.source, lr_range=request.lr_range)
        job = replace(job, input_source=request.input_source, amp_reason=preflight.amp.reason)
        if self.request.dry_run:
            return job
        if self.claimed is None:
            self.claimed = self._claim_folder()
        folder = self.claimed.folder
        config = with_run_name(config, folder)
        if self.request.detached and self.place is None:
            self.recorder = open_recorder(folder, config, self.listener)
            self._take_place(QueueStage.GRANTED, self.recorder)
        return replace(job, config=config, folder=folder, resumed=not self.claimed.is_new)

    def _claim_folder(self) -> ClaimedRun:
        """Raises UsageError, and AlreadyFinishedError if the run has nothing left to do, which it also shows."""
        try:
            return claim_if_unfinished(self.request)
        except AlreadyFinishedError:
            self.listener(WarningEvent.of(_nothing_left(self.request)))
            raise

    def _resolve_batch_size(self, job: Job, world_size: int, check_stop: Callable[[], None]) -> Job:
        """Replace `data.batch_size: auto` by that of the resumed run, else by the largest that fits."""
        config = job.config
        if config.data.batch_size != "auto":
            return job
        batch_size = previous_batch_size(job.folder) if job.folder is not None and job.resumed else None
        if batch_size is None:

            def on_tick() -> None:
                self.keep_alive()
                check_stop()

            result = find_batch_size(config, job.plan, world_size, job.source, on_tick)
            self.listener(BatchSizeFound(message=result.describe(config)))
            batch_size = result.batch_size
        return replace(job, config=config.with_values(data={"batch_size": batch_size}))

    def _record(self, job: Job) -> None:
        """Open the journal and announce the run."""
        if job.folder is None:
            return
        if self.recorder is None:
            self.recorder = open_recorder(job.folder, job.config, self.listener)
        self.recorder.set_config(job.config)
        for warning in self._early_warnings:
            self.recorder.record(warning, notify=False)
        self.listener(RunStarting(name=job.folder.name, folder=str(job.folder.path)))
        self.allocation.reservation.set_run_name(job.folder.name)
        self._start_watcher(job.folder, job.config)

    def _start_watcher(self, folder: RunFolder, config: Config) -> None:
        """Start the process that sends messages about the run, if the user wants any and it does not run yet."""
        if self._notifier.process is not None:
            return
        waited_s = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        if self.place is not None:
            waited_s = self.place.waited_s
        gpus = [device.uuid for device in self.allocation.devices]
        self._notifier, warnings = start_watcher(folder, config, waited_s=waited_s, gpus=gpus)
        for warning in warnings:
            self.emit(WarningEvent.of(warning))

    def emit(self, event: Event) -> None:
        """Record an event of the ranks or of their GPUs; a dry run only shows it.

        A GPU sample that precedes `run_started` is recorded behind it, because it belongs to the session that starts.
        Raises RunTakenOverError.
        """
        if isinstance(event, GpuEvent) and not self._started:
            self._early_usage = event
            return
        if self.claimed is not None:
            self.claimed.ownership.check_late()
        (self.listener if self.recorder is None else self.recorder.record)(event)
        if not isinstance(event, RunStarted):
            return
        self._started = True
        if self.claimed is not None:
            # The folder now contains a started run, which `discard` must keep.
            self.claimed.is_new = False
            if self.place is not None:
                self.place.save(stage=QueueStage.STARTED)
            self.allocation.reservation.publish_ranks(local_gpu_ranks(event))
        if self._early_usage is not None:
            self.emit(codec.replace(self._early_usage, time=event.time))
            self._early_usage = None

    def keep_alive(self) -> None:
        """Renew the heartbeats of the run and of its GPU reservation. Raises OwnershipLostError."""
        self.allocation.reservation.touch()
        if self.claimed is not None and (warning := self.claimed.ownership.renew_heartbeat()) is not None:
            self.emit(WarningEvent.of(warning))
        if self.recorder is not None:
            self.recorder.catch_up()
            for warning in self._notifier.keep_alive(self.recorder.folder, self.request.config):
                self.emit(WarningEvent.of(warning))

    def end(self, result: RunResult, *, should_requeue: bool = False) -> ExitCode:
        """Record how the run ended, requeue its Slurm job if `should_requeue`, and return the exit code."""
        if self.recorder is None:
            if result.failure is not None:
                self.emit(RunFinished(state="failed", message=describe_failure(result.failure)))
            return ExitCode.FINISHED if result.state == "finished" else ExitCode.FAILED
        if result.failure is not None and self.place is not None and not self._started:
            # Else it would count as interrupted, and runs that wait for it would wait forever.
            self.place.save(stage=QueueStage.ENDED)
        job = slurm_job_id() if should_requeue and result.state in ("stopped", "killed") else None
        code = record_result(result, self.recorder, f"; job {job} is requeued" if job else "")
        if job is not None and (problem := requeue(job)) is not None:
            self.listener(WarningEvent.of(problem))
        return code

    @property
    def is_kept(self) -> bool:
        """Whether the folder of a run that ends before it starts stays, with the reason."""
        if self.place is None or self.claimed is None or self._started:
            return False
        return self.request.detached or (self.place.has_waited and not self.claimed.is_new)

    def end_before_start(self, state: Literal["stopped", "failed"], message: str) -> ExitCode:
        """Record why a run that had a place in the queue does not start."""
        assert self.place is not None and self.recorder is not None  # noqa: S101 - see `is_kept`
        if state == "failed":
            self._start_watcher(self.recorder.folder, self.request.config)
        self.recorder.record(RunFinished(state=state, message=message))
        self.place.save(stage=QueueStage.ENDED)
        resumable = state == "stopped" and self.recorder.folder.resumable
        return ExitCode.STOPPED if resumable else ExitCode.FAILED

    def interrupt(self) -> ExitCode:
        """Leave a detached run that has not started as it is: `gputrain queue resume` continues its wait.

        A host that shuts down first sends SIGTERM to all processes."""
        assert self.place is not None and self.recorder is not None  # noqa: S101 - see `is_kept`
        name = shown_path(self.recorder.folder.root).name
        message = f"interrupted by a signal before it started; `gputrain queue resume {name}` starts it"
        self.recorder.record(WarningEvent(message=message, code="interrupted"))
        return ExitCode.FAILED

    def discard(self) -> None:
        """Delete the folder of a run that has not started; a resumed one leaves the queue."""
        if self.claimed is not None:
            if self.place is not None and not self._started:
                self.place.save(stage=QueueStage.ENDED)
            self.claimed.discard()

    def release(self) -> None:
        """Close the journal, and release the folder and the GPUs."""
        if self.place is not None:
            self.place.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.claimed is not None:
            self.claimed.ownership.release()
        self.allocation.reservation.release()
        self._notifier.wait_for_last_message()


def _nothing_left(request: RunRequest) -> Problem:
    """Return why a finished run does not resume."""
    run = request.config.run
    name, epochs = run.name or "the run", len(RunFolder(request.runs_dir / str(run.name)).history().epochs)
    if epochs >= run.epochs:
        reason = f"{name} has already finished {pluralize(epochs, 'epoch')}"
        return Problem("", reason, f"set run.epochs to more than {epochs} to resume", code="already-finished")
    advice = f"set run.early_stop=0 or more than {run.early_stop} to resume"
    return Problem("", f"{name} has already stopped early after {epochs} epochs", advice, code="already-finished")


def claim_if_unfinished(request: RunRequest) -> ClaimedRun:
    """Claim the run folder. Raises UsageError, and AlreadyFinishedError if a run to resume has nothing left to do."""
    run = request.config.run
    resume = run.resume or run.requeue
    claimed = claim_run(
        request.runs_dir,
        run.name,
        request.default_name,
        resume=resume,
        agents=request.agents,
        trust_owner=request.trust_owner,
        take_over=request.take_over,
    )
    if claimed.is_new:
        return claimed
    try:
        # The preflight checked this before the lock was held; the run may have changed since.
        check_resumed_config(request.config, claimed.folder)
    except UsageError:
        claimed.ownership.release()
        raise
    record = read_run_record(claimed.folder)
    # Reading all of a long journal takes seconds, so do so only if the run may have finished.
    may_be_done = record is None or record.state not in (RunState.STOPPED, RunState.FAILED)
    history = claimed.folder.history() if may_be_done else None
    if history is not None and history.state is RunState.FINISHED and is_complete(run, history):
        claimed.ownership.release()
        raise AlreadyFinishedError
    return claimed


def is_complete(run: RunConfig, history: History) -> bool:
    """Whether a finished run has nothing left to train with this config."""
    return len(history.epochs) >= run.epochs or has_stopped_early(run, history.epochs)


def with_run_name(config: Config, folder: RunFolder) -> Config:
    """Return the config that the run folder stores: with the name of the run, and without `run.resume`."""
    return config.with_values(run={"name": folder.name, "resume": False})


def open_recorder(folder: RunFolder, config: Config, listener: Listener) -> Recorder:
    """Raises UsageError if the folder cannot be written to."""
    try:
        return Recorder(folder, config, listener)
    except OSError as error:
        raise UsageError.one(
            "runs folder",
            f"{folder.path} cannot be written to: {error.strerror}",
            OTHER_RUNS_FOLDER_ADVICE,
            code="not-writable",
        ) from error


def describe_early_stop(history: History) -> str:
    """Return that a finished run ended before its last epoch (`run.early_stop`), as a clause; "" if it did not."""
    if history.started is None or not history.epochs or history.epochs[-1].epoch >= history.started.epochs:
        return ""
    return f"stopped early after {history.epochs[-1].epoch} of {history.started.epochs} epochs (run.early_stop)"


def should_restart(result: RunResult, history: History) -> bool:
    """Whether to restart the ranks: one failed for a reason that may not recur, and no stop was requested."""
    return result.failure is not None and not result.failure.repeats and not history.stopping


def record_restart(result: RunResult, recorder: Recorder, restart: int, max_restarts: int) -> None:
    """Record a failure and the restart that follows it."""
    assert result.failure is not None  # noqa: S101 - see `should_restart`
    recorder.record(result.failure)
    where = "its last checkpoint" if recorder.folder.resumable else "the beginning"
    message = f"{describe_failure(result.failure)}; restarting from {where} (restart {restart} of {max_restarts})"
    recorder.record(WarningEvent(message=message, code="rank-failed"))


def record_result(result: RunResult, recorder: Recorder, suffix: str = "") -> ExitCode:
    """Record how the run ended, and return the exit code."""
    name, resumable = shown_path(recorder.folder.root).name, recorder.folder.resumable
    hint = f"resume with `gputrain resume {name}`" if resumable else "there is no checkpoint to resume from"
    if result.failure is not None:
        recorder.record(result.failure)
        recorder.record(RunFinished(state="failed", message=f"{describe_failure(result.failure)}; {hint}"))
        return ExitCode.FAILED
    if result.state == "finished":
        best = recorder.history.best
        message = ""
        if best is not None:
            accuracy = format_known("best_val_accuracy", best.selection_accuracy, UNKNOWN)
            message = f"{METRICS['best_val_accuracy'].label} {accuracy} in epoch {best.epoch}"
        if early_stop := describe_early_stop(recorder.history):
            message = f"{early_stop}; {message}"
        util = [mean for use in recorder.history.gpus.values() if (mean := use.mean("util")) is not None]
        message += f"; GPU utilization {sum(util) / len(util):.0f}%" if util else ""
        recorder.record(RunFinished(state="finished", message=message))
        return ExitCode.FINISHED
    reason = f"{result.reason}; " if result.reason else ""
    recorder.record(RunFinished(state="stopped", message=reason + hint + suffix))
    return ExitCode.STOPPED if resumable else ExitCode.FAILED
