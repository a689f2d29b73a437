"""From a config to a run: checked, claimed, supervised, and summed up in an exit code."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

from engine.config.schema import Config
from engine.data.sources.base import Source
from engine.distributed.failures import failure_in_words
from engine.distributed.node_plan import Plan, plan, prepare_environment
from engine.distributed.rank_env import find_launcher
from engine.distributed.rendezvous import clear_meeting_point
from engine.gpus.allocation import Choice, choose
from engine.launch.batch_size import batch_before, find_batch, with_batch
from engine.launch.forkserver import Spawner
from engine.launch.gpu_usage import UsageWatch, ranks_here, waiting_told
from engine.launch.lifecycle import (
    Order,
    end_run,
    named,
    nothing_left,
    open_recorder,
    restarting,
    take_folder,
    worth_another_try,
)
from engine.launch.preflight import Early, look_at_shares, look_early
from engine.launch.slurm import slurm_job
from engine.launch.supervisor import Supervisor
from engine.runs.control import Asked
from engine.runs.events import BatchFound, Event, RunFinished, RunStarted, Starting, Warned
from engine.runs.ownership import Claim
from engine.runs.recorder import Listener
from engine.training.job import Ending, ExitCode, Job
from engine.utils.errors import UsageError, collecting
from engine.utils.host import raise_open_files
from engine.utils.process import Signals, outlive_terminal


def launch(order: Order, listener: Listener) -> int:
    """Run to the end and return the exit code. `listener` hears every event. Raises UsageError, with nothing left
    behind."""
    outlive_terminal()
    raise_open_files()
    launcher = find_launcher(order.config.device.launcher, os.environ)
    if launcher != "spawn":
        from engine.launch.external import run_external_rank

        return run_external_rank(order, launcher, listener)

    # Until the folder is taken a signal simply ends this process, through the clauses that let go of the GPUs.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    choice = Choice()
    spawner: Spawner | None = None
    try:
        # It imports torch while all else is looked at; but a run that waits for GPUs, perhaps for days, takes no
        # memory.
        if not order.config.device.wait:
            spawner = Spawner()
        early = look_early(order.config)
        # Who is refused anyway does not stand in line for GPUs.
        if early.problems and order.config.device.wait:
            raise UsageError(early.problems)
        with collecting(early.problems):
            choice = choose_gpus(order, listener)
        return _launch(order, early, choice, spawner, listener)
    except KeyboardInterrupt:
        listener(Warned(message="asked to stop before the run began; nothing was made"))
        return ExitCode.FAILED
    finally:
        if spawner is not None:
            spawner.kill()
        choice.reservation.release()


def choose_gpus(order: Order, listener: Listener) -> Choice:
    """The GPUs of a run, reserved for it and waited for where that is wanted. Raises UsageError."""
    device, run = order.config.device, order.config.run.name or order.stem
    choice = choose(device.gpus, run, wait=device.wait, waiting=waiting_told(listener))
    for warning in choice.warnings:
        listener(Warned(message=warning))
    return choice


def _launch(order: Order, early: Early, choice: Choice, spawner: Spawner | None, listener: Listener) -> int:
    try:
        run_plan = plan(order.config, choice.devices)
    except UsageError as error:
        # Where no GPU could be chosen, what the CPU makes impossible is beside the point.
        unchosen = any(problem.where == "device.gpus" for problem in early.problems)
        raise UsageError([*early.problems, *([] if unchosen else error.problems)]) from None
    look_at_shares(order.config, early, run_plan)
    source = early.source
    signals = Signals()
    if order.dry_run:
        config = _with_found_batch(order.config, run_plan, source, choice, listener)
        signals.install()
        return _try(Job(config, run_plan, None, False, source), spawner, signals, listener)

    claimed = take_folder(order)
    if claimed is None:
        listener(nothing_left(order))
        return ExitCode.FINISHED
    try:
        config = named(order.config, claimed.folder)
        config = _with_found_batch(config, run_plan, source, choice, listener, claimed)
        signals.install()
        job = Job(config, run_plan, claimed.folder, not claimed.fresh, source)
        return _supervise(job, spawner, claimed, choice, signals, listener)
    except (UsageError, KeyboardInterrupt):
        claimed.discard()
        raise
    finally:
        claimed.ownership.release()


def _with_found_batch(
    config: Config,
    run_plan: Plan,
    source: Source | None,
    choice: Choice,
    listener: Listener,
    claimed: Claim | None = None,
) -> Config:
    """The config with a number for `data.batch_size: auto`: that of the run where it goes on, else the most that fit.
    Raises UsageError."""
    if config.data.batch_size != "auto":
        return config
    if claimed is not None and (before := batch_before(claimed.folder)) is not None:
        return with_batch(config, before)

    def between() -> None:
        choice.reservation.touch()
        if claimed is not None:
            claimed.ownership.beat()

    found = find_batch(config, run_plan, run_plan.ranks, source, between)
    listener(BatchFound(message=found.in_words(config)))
    return with_batch(config, found.images)


def _supervise(
    job: Job, spawner: Spawner | None, claimed: Claim, choice: Choice, signals: Signals, listener: Listener
) -> int:
    folder, ownership = claimed.folder, claimed.ownership
    recorder = open_recorder(folder, job.config, listener)
    if job.config.run.requeue and slurm_job() is None:
        listener(Warned(message="run.requeue: this is no job of SLURM, so nothing will put it back into a queue"))
    listener(Starting(name=folder.name, folder=str(folder.path)))
    choice.reservation.name_run(folder.name)
    usage = UsageWatch([device.uuid for device in choice.devices])

    def record(event: Event) -> None:
        recorder.record(event)
        if isinstance(event, RunStarted):
            # From here on there is something to lose.
            claimed.fresh = False
            choice.reservation.show_ranks(ranks_here(event))

    def between() -> None:
        ownership.beat()
        choice.reservation.touch()
        if (event := usage.look()) is not None:
            recorder.record(event)

    asked, restart = Asked(), 0
    try:
        ending = _run_ranks(job, signals, record, between, asked, spawner)
        for restart in range(1, job.config.run.max_restarts + 1):
            if not worth_another_try(ending, recorder.history):
                break
            recorder.record(restarting(ending, recorder, restart, job.config.run.max_restarts))
            again = replace(job, resumed=recorder.history.started is not None)
            ending = _run_ranks(again, signals, record, between, asked)
        requeues = job.config.run.requeue and signals.warned and not signals.kill
        return end_run(ending, recorder, listener, requeues=requeues)
    except UsageError as error:
        if restart > 0:
            recorder.record(RunFinished(state="failed", message=str(error)))
        raise
    finally:
        usage.close()
        recorder.close()


def _try(job: Job, spawner: Spawner | None, signals: Signals, listener: Listener) -> int:
    """A dry run."""
    ending = _run_ranks(job, signals, listener, lambda: None, Asked(), spawner)
    if ending.failure is not None:
        listener(RunFinished(state="failed", message=failure_in_words(ending.failure)))
    return ExitCode.FINISHED if ending.state == "finished" else ExitCode.FAILED


def _run_ranks(
    job: Job,
    signals: Signals,
    tell: Listener,
    between: Callable[[], None],
    asked: Asked,
    spawner: Spawner | None = None,
) -> Ending:
    """Without a `spawner` one is started."""
    prepare_environment(job.plan, os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return Supervisor(job, spawner or Spawner(), signals, tell, between, asked).run()
    finally:
        clear_meeting_point(job.config.device.init_method)
