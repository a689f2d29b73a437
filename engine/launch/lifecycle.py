"""A run that was asked for: its folder taken, its end recorded, whoever starts its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config.loader import changed_keys, resolve_config
from engine.config.schema import Config, as_dict
from engine.distributed.failures import describe_failure
from engine.launch.slurm import requeue, slurm_job_id
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.ownership import ClaimedRun, claim_run
from engine.runs.recorder import Listener, Recorder
from engine.runs.watcher import RunWatcher
from engine.training.job import ExitCode, RunResult
from engine.utils.errors import Problem, UsageError

# What the weights, the optimizer's state and the order of the data hang on.
IMMUTABLE_KEYS = {
    *("run.seed", "model.name", "model.source", "model.options", "optim.name", "data.dataset", "data.val_split"),
    *("data.image_size", "data.channels", "data.fake_train", "data.fake_val"),
}


@dataclass(frozen=True)
class RunRequest:
    """A run that was asked for. `default_name` names it where `run.name` does not; a dry run leaves no folder; `agents`
    are those of torchrun that start its ranks, see `engine.launch.handshake.agent_id`."""

    config: Config
    runs_dir: Path
    default_name: str
    dry_run: bool = False
    agents: tuple[str, ...] = ()


def claim_if_unfinished(run_request: RunRequest) -> ClaimedRun | None:
    """The folder of the run, owned by this process; None where the run is to go on and has nothing left to do. Raises
    UsageError."""
    run = run_request.config.run
    claimed = claim_run(
        run_request.runs_dir,
        run.name,
        run_request.default_name,
        resume=run.resume or run.requeue,
        agents=run_request.agents,
    )
    if claimed.is_new:
        return claimed
    try:
        check_resumed_config(run_request.config, claimed.folder)
    except UsageError:
        claimed.ownership.release()
        raise
    finished = RunWatcher(claimed.folder).poll().finished
    done = finished is not None and finished.state == RunState.FINISHED
    # All of a long journal is read only where its end leaves the question open.
    if done and len(claimed.folder.history().epochs) >= run.epochs:
        claimed.ownership.release()
        return None
    return claimed


def check_resumed_config(config: Config, folder: RunFolder) -> None:
    """Raises UsageError where a run would go on with another model, optimizer or division of the data than it began
    with."""
    if not folder.config.exists():
        return
    before = resolve_config(str(folder.config)).config
    changed = [key for key in changed_keys(before, config) if key in IMMUTABLE_KEYS]
    if changed:
        old, new = as_dict(before), as_dict(config)
        what = "what a run began with cannot be changed on the way: it was {}, not {}; give a new run a new --name"
        pairs = [(key, *key.split(".")) for key in changed]
        raise UsageError(
            [Problem(key, what.format(old[section][name], new[section][name])) for key, section, name in pairs]
        )


def already_finished_warning(run_request: RunRequest) -> WarningEvent:
    run = run_request.config.run
    return WarningEvent(
        message=f"{run.name or 'the run'} has finished {run.epochs} epochs already; to go on, raise run.epochs"
    )


def with_run_name(config: Config, folder: RunFolder) -> Config:
    """The config as its folder keeps it: with the name that it got, fit to start such a run again."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name, "resume": False})})


def open_recorder(folder: RunFolder, config: Config, listener: Listener) -> Recorder:
    """Raises UsageError where the folder cannot be written to."""
    try:
        return Recorder(folder, config, listener)
    except OSError as error:
        raise UsageError.one(
            "runs folder", f"{folder.path} cannot be written to: {error.strerror}; give another with --runs-dir"
        ) from error


def should_restart(result: RunResult, history: History) -> bool:
    """Whether to start the ranks again: one failed, of something that need not come again, and nobody asked to stop."""
    return result.failure is not None and not result.failure.repeats and not history.stopping


def record_restart(result: RunResult, recorder: Recorder, restart: int, max_restarts: int) -> WarningEvent:
    """Record the failure; return the warning that announces the restart."""
    assert result.failure is not None  # noqa: S101 - see `should_restart`
    recorder.record(result.failure)
    where = "its last checkpoint" if recorder.folder.resumable else "the beginning"
    told = f"{describe_failure(result.failure)}; starting again from {where} (restart {restart} of {max_restarts})"
    return WarningEvent(message=told)


def end_run(result: RunResult, recorder: Recorder, listener: Listener, *, should_requeue: bool) -> int:
    """Record how the run ended, requeue its Slurm job if `should_requeue`, and return the exit code."""
    job = slurm_job_id() if should_requeue and result.state in ("stopped", "killed") else None
    code = record_result(result, recorder, f"; job {job} goes back into the queue" if job else "")
    if job is not None and (problem := requeue(job)) is not None:
        listener(WarningEvent(message=problem))
    return code


def record_result(result: RunResult, recorder: Recorder, suffix: str = "") -> int:
    """Record how the run ended; the exit code of that."""
    name, resumable = recorder.folder.name, recorder.folder.resumable
    hint = f"continue with `gputrain resume {name}`" if resumable else "there is no checkpoint to continue from"
    if result.failure is not None:
        recorder.record(result.failure)
        recorder.record(RunFinished(state="failed", message=f"{describe_failure(result.failure)}; {hint}"))
        return ExitCode.FAILED
    if result.state == "finished":
        best = recorder.history.best
        told = f"best accuracy {best.selection_accuracy:.4f} in epoch {best.epoch}" if best else ""
        busy = [mean for use in recorder.history.gpus.values() if (mean := use.mean("busy")) is not None]
        told += f"; GPUs busy {sum(busy) / len(busy):.0f}% of the time" if busy else ""
        recorder.record(RunFinished(state="finished", message=told))
        return ExitCode.FINISHED
    why = f"{result.reason}; " if result.reason else ""
    recorder.record(RunFinished(state="stopped", message=why + hint + suffix))
    return ExitCode.STOPPED if resumable else ExitCode.FAILED
