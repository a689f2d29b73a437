"""From a config to a run: checked, claimed, supervised, and summed up in an exit code."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.catalogue import check_model_name
from engine.config import Config
from engine.data import check_source, open_early, shares_of
from engine.data.source import Source
from engine.events import RunFinished, Warned
from engine.failure import failure_in_words
from engine.job import Job
from engine.machine import Plan, plan, prepare_environment
from engine.problems import UsageError
from engine.process import StopWish
from engine.recorder import Listener, Recorder
from engine.runs import Claim, RunFolder, State, claim
from engine.seat import find_launcher

if TYPE_CHECKING:
    from engine.supervisor import Ending

FINISHED, FAILED, REFUSED, STOPPED = 0, 1, 2, 3


@dataclass(frozen=True)
class Order:
    """A run that was asked for. `stem` names it where `run.name` does not; a dry run leaves no folder."""

    config: Config
    root: Path
    stem: str
    dry_run: bool = False


def launch(order: Order, listener: Listener) -> int:
    """Run to the end and return the exit code. `listener` hears every event. Raises UsageError, with nothing left
    behind."""
    launcher = find_launcher(order.config.device.launcher, os.environ)
    if launcher != "spawn":
        from engine.joined import join

        return join(order, launcher, listener)

    run_plan = plan(order.config)
    source = open_early(order.config)
    if source is not None:
        check_source(order.config, source, shares_of(order.config, source, len(run_plan.devices)))
    check_model_name(order.config.model.name)
    if order.dry_run:
        return _supervise(order.config, run_plan, source, None, listener)

    claimed = take_folder(order)
    if claimed is None:
        listener(nothing_left(order))
        return FINISHED
    try:
        return _supervise(named(order.config, claimed.folder), run_plan, source, claimed, listener)
    except UsageError:
        claimed.discard()
        raise
    finally:
        claimed.ownership.release()


def take_folder(order: Order) -> Claim | None:
    """The folder of the run, owned by this process; None where the run is to go on and has nothing left to do. Raises
    UsageError."""
    run = order.config.run
    claimed = claim(order.root, run.name, order.stem, resume=run.resume)
    if not claimed.fresh:
        history = claimed.folder.history()
        done = history.finished is not None and history.finished.state == State.FINISHED
        if done and len(history.epochs) >= run.epochs:
            claimed.ownership.release()
            return None
    return claimed


def nothing_left(order: Order) -> Warned:
    run = order.config.run
    return Warned(message=f"{run.name} has finished already, all {run.epochs} epochs; to go on, raise run.epochs")


def named(config: Config, folder: RunFolder) -> Config:
    """The config as its folder keeps it: with the name that it got, fit to start such a run again."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name, "resume": False})})


def _supervise(config: Config, run_plan: Plan, source: Source | None, claimed: Claim | None, listener: Listener) -> int:
    wish = StopWish()
    wish.install()
    prepare_environment(run_plan, os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    # torch is imported from here on, once everything that could be refused without it has been looked at.
    from engine.supervisor import Supervisor

    if claimed is None:
        ending = Supervisor(Job(config, run_plan, None, False, source), wish, listener, None).run()
        if ending.failure is not None:
            listener(RunFinished(state="failed", message=failure_in_words(ending.failure)))
        return FINISHED if ending.state == "finished" else FAILED

    recorder = open_recorder(claimed.folder, config, listener)
    try:
        job = Job(config, run_plan, claimed.folder, not claimed.fresh, source)
        ending = Supervisor(job, wish, recorder.record, claimed.ownership).run()
        return close_run(ending, recorder)
    finally:
        recorder.close()


def open_recorder(folder: RunFolder, config: Config, listener: Listener) -> Recorder:
    """Raises UsageError where the folder cannot be written to."""
    try:
        return Recorder(folder, config, listener)
    except OSError as error:
        raise UsageError.one(
            "runs folder", f"{folder.path} cannot be written to: {error.strerror}; give another with --runs-dir"
        ) from error


def close_run(ending: Ending, recorder: Recorder) -> int:
    """Record how the run ended; the exit code of that."""
    name = recorder.folder.name
    resumable = recorder.folder.last_checkpoint.exists()
    hint = f"continue with `gputrain resume {name}`" if resumable else "there is no checkpoint to continue from"
    if ending.failure is not None:
        recorder.record(ending.failure)
        recorder.record(RunFinished(state="failed", message=f"{failure_in_words(ending.failure)}; {hint}"))
        return FAILED
    if ending.state == "finished":
        recorder.record(RunFinished(state="finished"))
        return FINISHED
    why = "killed by a second SIGINT; " if ending.state == "killed" else ""
    recorder.record(RunFinished(state="stopped", message=why + hint))
    return STOPPED if resumable else FAILED
