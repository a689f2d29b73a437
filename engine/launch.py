"""From a config to a run: checked, claimed, supervised, and summed up in an exit code."""

from __future__ import annotations

import os

from engine.catalogue import check_model_name
from engine.data import check_source, open_early, shares_of
from engine.events import RunFinished, Starting
from engine.failure import failure_in_words
from engine.job import Ending, ExitCode, Job
from engine.machine import plan, prepare_environment
from engine.order import Order, close_run, named, nothing_left, open_recorder, take_folder
from engine.problems import UsageError
from engine.process import Signals, outlive_terminal
from engine.recorder import Listener
from engine.runs import Ownership
from engine.seat import find_launcher


def launch(order: Order, listener: Listener) -> int:
    """Run to the end and return the exit code. `listener` hears every event. Raises UsageError, with nothing left
    behind."""
    outlive_terminal()
    launcher = find_launcher(order.config.device.launcher, os.environ)
    if launcher != "spawn":
        from engine.joined import join

        return join(order, launcher, listener)

    run_plan = plan(order.config)
    source = open_early(order.config)
    if source is not None:
        check_source(order.config, source, shares_of(order.config, source, len(run_plan.devices)))
    check_model_name(order.config.model.name)
    # Until here nothing is made, and a signal simply ends the process; from here on it asks the run to stop.
    signals = Signals()
    signals.install()
    if order.dry_run:
        return _try(Job(order.config, run_plan, None, False, source), signals, listener)

    claimed = take_folder(order)
    if claimed is None:
        listener(nothing_left(order))
        return ExitCode.FINISHED
    try:
        job = Job(named(order.config, claimed.folder), run_plan, claimed.folder, not claimed.fresh, source)
        return _supervise(job, claimed.ownership, signals, listener)
    except UsageError:
        claimed.discard()
        raise
    finally:
        claimed.ownership.release()


def _supervise(job: Job, ownership: Ownership, signals: Signals, listener: Listener) -> int:
    recorder = open_recorder(ownership.folder, job.config, listener)
    listener(Starting(name=ownership.folder.name, folder=str(ownership.folder.path)))
    try:
        return close_run(_run_ranks(job, signals, recorder.record, ownership), recorder)
    finally:
        recorder.close()


def _try(job: Job, signals: Signals, listener: Listener) -> int:
    """A dry run."""
    ending = _run_ranks(job, signals, listener, None)
    if ending.failure is not None:
        listener(RunFinished(state="failed", message=failure_in_words(ending.failure)))
    return ExitCode.FINISHED if ending.state == "finished" else ExitCode.FAILED


def _run_ranks(job: Job, signals: Signals, tell: Listener, ownership: Ownership | None) -> Ending:
    prepare_environment(job.plan, os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torch is imported from here on, once everything that could be refused without it has been looked at.
    from engine.supervisor import Supervisor

    return Supervisor(job, signals, tell, ownership).run()
