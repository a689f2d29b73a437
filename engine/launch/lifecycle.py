"""When a training goes on and how it ends: what is left to do, whether its ranks restart, what is recorded.

`phases` asks before it resumes a run, `ranks` and `external` when the ranks have ended.
"""

from __future__ import annotations

from engine.command.spec import has_command
from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.distributed.failures import describe_failure
from engine.launch.phases import Recording, Unrecorded
from engine.launch.preflight import check_resumed_config
from engine.queue.state import PENDING_STAGES, QueueStage
from engine.runs.early_stop import has_stopped_early
from engine.runs.events import RankFailed, RunFinished
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.metrics import METRICS, format_known
from engine.runs.recorder import Recorder
from engine.runs.run_record import read_run_record
from engine.training.job import RunResult
from engine.utils.errors import Problem, UsageError
from engine.utils.exit_codes import ExitCode
from engine.utils.text import pluralize
from engine.utils.units import UNKNOWN


def check_resumed_training(folder: RunFolder, config: Config) -> Problem | None:
    """Return that a run has nothing left to do. Raises UsageError if it cannot go on with this config."""
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
        return _nothing_left(config.run, folder.name, len(history.epochs))
    return None


def _nothing_left(run: RunConfig, name: str, epochs: int) -> Problem:
    """Return why a finished run does not resume."""
    if epochs >= run.epochs:
        reason = f"{name} has already finished {pluralize(epochs, 'epoch')}"
        return Problem("", reason, f"set run.epochs to more than {epochs} to resume", code="already-finished")
    advice = f"set run.early_stop=0 or more than {run.early_stop} to resume"
    return Problem("", f"{name} has already stopped early after {epochs} epochs", advice, code="already-finished")


def is_complete(run: RunConfig, history: History) -> bool:
    """Whether a finished run has nothing left to train with this config."""
    return len(history.epochs) >= run.epochs or has_stopped_early(run, history.epochs)


def describe_early_stop(history: History) -> str:
    """Return that a finished run ended before its last epoch (`run.early_stop`), as a clause; "" if it did not."""
    if history.started is None or not history.epochs or history.epochs[-1].epoch >= history.started.epochs:
        return ""
    return f"stopped early after {history.epochs[-1].epoch} of {history.started.epochs} epochs (run.early_stop)"


def restart_after(result: RunResult, history: History) -> RankFailed | None:
    """Return the failure after which the ranks restart; None if it would recur, or if a stop was requested."""
    return None if result.failure is None or result.failure.repeats or history.stopping else result.failure


def end_training(run: Unrecorded, result: RunResult, suffix: str = "") -> ExitCode:
    """Record how the run ended, or show the failure of a dry run, and return the exit code."""
    failure = result.failure
    if not isinstance(run, Recording):
        if failure is not None:
            run.emit(RunFinished(state="failed", message=describe_failure(failure)))
        return ExitCode.FINISHED if result.state == "finished" else ExitCode.FAILED
    if failure is not None and run.place is not None and run.place.state.stage in PENDING_STAGES:
        # Else it would count as interrupted, and runs that wait for it would wait forever.
        run.place.save(stage=QueueStage.ENDED)
    return record_result(result, run.recorder, suffix)


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
