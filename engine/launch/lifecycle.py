"""The lifecycle of a run in the process that owns it: claim, record, restart, end.

Two drivers call the same steps in the same order: `launcher`, whose supervisor forks the ranks, and `external`, a rank
that torchrun or srun started. Each holds only how its ranks train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.command.spec import has_command
from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.config.user_code import user_code_names
from engine.config.user_errors import code_root
from engine.distributed.failures import describe_failure
from engine.launch.batch_size import with_previous_batch_size
from engine.launch.owned_run import AlreadyFinishedError, OwnedRun, with_run_name
from engine.launch.preflight import Preflight, check_resumed_config
from engine.launch.slurm import requeue_job, slurm_job_id
from engine.queue.state import QueueStage
from engine.runs.early_stop import has_stopped_early
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.metrics import METRICS, format_known
from engine.runs.recorder import Recorder
from engine.runs.run_record import read_run_record
from engine.training.job import Job, RunResult
from engine.utils.errors import Problem, UsageError
from engine.utils.exit_codes import ExitCode
from engine.utils.text import pluralize
from engine.utils.units import UNKNOWN


@dataclass
class TrainingRun(OwnedRun):
    """A training in the process that owns it: the steps that both drivers share."""

    def prepare(self, preflight: Preflight) -> Job:
        """Claim the run folder and open the journal; return the job of the ranks.

        Raises UsageError if a step fails, and AlreadyFinishedError if the run has nothing left to do."""
        job = self._claim(preflight)
        for warning in preflight.warnings:
            self.show_early_warning(WarningEvent.of(warning))
        if job.folder is not None:
            self.announce(job.folder, self._stored_config(job.config))
            self.check_code()
        return job

    @property
    def code_folder(self) -> Path | None:
        """The folder whose code the run uses; None without user code: its code is gputrain then."""
        config = self.request.config
        return code_root(config.run.code) if user_code_names(config) else None

    def with_code_copy(self, config: Config) -> Config:
        """Return a config whose user code is that in the copy of the run, if it has one."""
        place = None if self.claimed is None else self.code.copied_folder(self.claimed.folder)
        return config if place is None else config.with_values(run={"code": str(place)})

    def _stored_config(self, config: Config) -> Config:
        """Return a config with the original folder of its user code: a run that repeats it makes a copy of its own."""
        record = self.code.record
        if record is None or not record.snapshot:
            return config
        return config.with_values(run={"code": str(Path(record.root, record.folder))})

    def _claim(self, preflight: Preflight) -> Job:
        """Claim the run folder; a dry run has a job without one."""
        assert preflight.plan is not None  # noqa: S101 - a preflight without problems has one
        request = self.request
        config = preflight.resolved(request.config)
        job = Job(config, preflight.plan, None, False, preflight.source, lr_range=request.lr_range)
        job = replace(job, input_source=request.input_source, amp_reason=preflight.amp.reason)
        if self.request.dry_run:
            return job
        claimed = self.claim(config)
        config = self.with_code_copy(with_run_name(config, claimed.folder))
        resumed = not claimed.is_new and has_begun(claimed.folder)
        return with_previous_batch_size(replace(job, config=config, folder=claimed.folder, resumed=resumed))

    def check_resumed(self, folder: RunFolder) -> None:
        config = self.request.config
        if has_command(folder):
            reason = "is the run of a command, which cannot go on as a training; use a new name with --name"
            raise UsageError.one(folder.name, reason, code="name-in-use")
        # The preflight checked this before the lock was held; the run may have changed since.
        check_resumed_config(config, folder)
        record = read_run_record(folder)
        # Reading all of a long journal takes seconds, so do so only if the run may have finished.
        may_be_done = record is None or record.state not in (RunState.STOPPED, RunState.FAILED)
        history = folder.history() if may_be_done else None
        if history is not None and history.state is RunState.FINISHED and is_complete(config.run, history):
            self.listener(WarningEvent.of(_nothing_left(config.run, folder.name, len(history.epochs))))
            raise AlreadyFinishedError

    def end(self, result: RunResult, *, should_requeue: bool = False) -> ExitCode:
        """Requeue the Slurm job of the run if `should_requeue`, record how the run ended, and return the exit code."""
        if self.recorder is None:
            if result.failure is not None:
                self.emit(RunFinished(state="failed", message=describe_failure(result.failure)))
            return ExitCode.FINISHED if result.state == "finished" else ExitCode.FAILED
        if result.failure is not None and self.place is not None and not self._started:
            # Else it would count as interrupted, and runs that wait for it would wait forever.
            self.place.save(stage=QueueStage.ENDED)
        requeues = should_requeue and slurm_job_id() is not None and result.state in ("stopped", "killed")
        return record_result(result, self.recorder, f"; {requeue_job()}" if requeues else "")


def _nothing_left(run: RunConfig, name: str, epochs: int) -> Problem:
    """Return why a finished run does not resume."""
    if epochs >= run.epochs:
        reason = f"{name} has already finished {pluralize(epochs, 'epoch')}"
        return Problem("", reason, f"set run.epochs to more than {epochs} to resume", code="already-finished")
    advice = f"set run.early_stop=0 or more than {run.early_stop} to resume"
    return Problem("", f"{name} has already stopped early after {epochs} epochs", advice, code="already-finished")


def has_begun(folder: RunFolder) -> bool:
    """Whether a training has begun in a run folder: it may have waited until now."""
    return any(folder.checkpoints.glob("*.pt")) or folder.history().started is not None


def is_complete(run: RunConfig, history: History) -> bool:
    """Whether a finished run has nothing left to train with this config."""
    return len(history.epochs) >= run.epochs or has_stopped_early(run, history.epochs)


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
    name, resumable = recorder.folder.name, recorder.folder.resumable
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
