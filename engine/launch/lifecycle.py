"""A run that was asked for: its folder taken, its end recorded, whoever starts its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config.loader import changed_keys, resolve
from engine.config.schema import Config, as_dict
from engine.distributed.failures import failure_in_words
from engine.launch.slurm import requeue, slurm_job
from engine.runs.events import RunFinished, Warned
from engine.runs.folder import RunFolder, State
from engine.runs.history import History
from engine.runs.ownership import Claim, claim
from engine.runs.recorder import Listener, Recorder
from engine.runs.watcher import RunWatch
from engine.training.job import Ending, ExitCode
from engine.utils.errors import Problem, UsageError

# What the weights, the optimizer's state and the order of the data hang on.
FIXED_KEYS = {
    *("run.seed", "model.name", "model.source", "model.options", "optim.name", "data.dataset", "data.val_split"),
    *("data.image_size", "data.channels", "data.fake_train", "data.fake_val"),
}


@dataclass(frozen=True)
class Order:
    """A run that was asked for. `stem` names it where `run.name` does not; a dry run leaves no folder; `agents` are
    those of torchrun that start its ranks, see `engine.launch.handshake.agent`."""

    config: Config
    root: Path
    stem: str
    dry_run: bool = False
    agents: tuple[str, ...] = ()


def take_folder(order: Order) -> Claim | None:
    """The folder of the run, owned by this process; None where the run is to go on and has nothing left to do. Raises
    UsageError."""
    run = order.config.run
    claimed = claim(order.root, run.name, order.stem, resume=run.resume or run.requeue, agents=order.agents)
    if claimed.fresh:
        return claimed
    try:
        refuse_changes(order.config, claimed.folder)
    except UsageError:
        claimed.ownership.release()
        raise
    finished = RunWatch(claimed.folder).look().finished
    done = finished is not None and finished.state == State.FINISHED
    # All of a long journal is read only where its end leaves the question open.
    if done and len(claimed.folder.history().epochs) >= run.epochs:
        claimed.ownership.release()
        return None
    return claimed


def refuse_changes(config: Config, folder: RunFolder) -> None:
    """Raises UsageError where a run would go on with another model, optimizer or division of the data than it began
    with."""
    if not folder.config.exists():
        return
    before = resolve(str(folder.config)).config
    changed = [key for key in changed_keys(before, config) if key in FIXED_KEYS]
    if changed:
        old, new = as_dict(before), as_dict(config)
        what = "what a run began with cannot be changed on the way: it was {}, not {}; give a new run a new --name"
        pairs = [(key, *key.split(".")) for key in changed]
        raise UsageError(
            [Problem(key, what.format(old[section][name], new[section][name])) for key, section, name in pairs]
        )


def nothing_left(order: Order) -> Warned:
    run = order.config.run
    return Warned(
        message=f"{run.name or 'the run'} has finished {run.epochs} epochs already; to go on, raise run.epochs"
    )


def named(config: Config, folder: RunFolder) -> Config:
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


def worth_another_try(ending: Ending, history: History) -> bool:
    """Whether to start the ranks again: one failed, of something that need not come again, and nobody asked to stop."""
    return ending.failure is not None and not ending.failure.repeats and not history.stopping


def restarting(ending: Ending, recorder: Recorder, restart: int, most: int) -> Warned:
    """Records the failure; what is said of the next try."""
    assert ending.failure is not None  # noqa: S101 - see `worth_another_try`
    recorder.record(ending.failure)
    where = "its last checkpoint" if recorder.folder.resumable else "the beginning"
    told = f"{failure_in_words(ending.failure)}; starting again from {where} (restart {restart} of {most})"
    return Warned(message=told)


def end_run(ending: Ending, recorder: Recorder, listener: Listener, *, requeues: bool) -> int:
    """Record how the run ended, and put its job back into the queue where it `requeues`; the exit code."""
    job = slurm_job() if requeues and ending.state in ("stopped", "killed") else None
    code = close_run(ending, recorder, f"; job {job} goes back into the queue" if job else "")
    if job is not None and (problem := requeue(job)) is not None:
        listener(Warned(message=problem))
    return code


def close_run(ending: Ending, recorder: Recorder, also: str = "") -> int:
    """Record how the run ended; the exit code of that."""
    name, resumable = recorder.folder.name, recorder.folder.resumable
    hint = f"continue with `gputrain resume {name}`" if resumable else "there is no checkpoint to continue from"
    if ending.failure is not None:
        recorder.record(ending.failure)
        recorder.record(RunFinished(state="failed", message=f"{failure_in_words(ending.failure)}; {hint}"))
        return ExitCode.FAILED
    if ending.state == "finished":
        best = recorder.history.best
        told = f"best accuracy {best.kept_accuracy:.4f} in epoch {best.epoch}" if best else ""
        busy = [mean for use in recorder.history.gpus.values() if (mean := use.mean("busy")) is not None]
        told += f"; GPUs busy {sum(busy) / len(busy):.0f}% of the time" if busy else ""
        recorder.record(RunFinished(state="finished", message=told))
        return ExitCode.FINISHED
    why = f"{ending.why}; " if ending.why else ""
    recorder.record(RunFinished(state="stopped", message=why + hint + also))
    return ExitCode.STOPPED if resumable else ExitCode.FAILED
