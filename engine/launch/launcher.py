"""From a config to a run: checked, claimed, supervised, and summed up in an exit code."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

from engine.config.schema import Config
from engine.data.sources.base import ImageSource
from engine.distributed.failures import describe_failure
from engine.distributed.node_plan import NodePlan, plan_node, prepare_environment
from engine.distributed.rank_env import detect_launcher
from engine.distributed.rendezvous import remove_rendezvous_file
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.launch.batch_size import find_batch_size, previous_batch_size, with_batch_size
from engine.launch.forkserver import ForkServer
from engine.launch.gpu_usage import GpuUsagePoller, local_gpu_ranks, waiting_emitter
from engine.launch.lifecycle import (
    RunRequest,
    already_finished_warning,
    claim_if_unfinished,
    end_run,
    open_recorder,
    record_restart,
    should_restart,
    with_run_name,
)
from engine.launch.preflight import Preflight, check_run_plan, run_preflight
from engine.launch.slurm import slurm_job_id
from engine.launch.supervisor import Supervisor
from engine.runs.control import RequestCounters
from engine.runs.events import BatchSizeFound, Event, RunFinished, RunStarted, RunStarting, WarningEvent
from engine.runs.ownership import ClaimedRun
from engine.runs.recorder import Listener
from engine.training.job import ExitCode, Job, RunResult
from engine.utils.errors import UsageError, collect_problems
from engine.utils.host import raise_open_files_limit
from engine.utils.process import SignalHandler, ignore_sighup


def launch(run_request: RunRequest, listener: Listener) -> int:
    """Run to the end and return the exit code. `listener` hears every event. Raises UsageError, with nothing left
    behind."""
    ignore_sighup()
    raise_open_files_limit()
    launcher = detect_launcher(run_request.config.device.launcher, os.environ)
    if launcher != "spawn":
        from engine.launch.external import run_external_rank

        return run_external_rank(run_request, launcher, listener)

    # Until the folder is taken a signal simply ends this process, through the clauses that let go of the GPUs.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    allocation = GpuAllocation()
    fork_server: ForkServer | None = None
    try:
        # It imports torch while all else is looked at; but a run that waits for GPUs, perhaps for days, takes no
        # memory.
        if not run_request.config.device.wait:
            fork_server = ForkServer()
        preflight = run_preflight(run_request.config)
        # Who is refused anyway does not stand in line for GPUs.
        if preflight.problems and run_request.config.device.wait:
            raise UsageError(preflight.problems)
        with collect_problems(preflight.problems):
            allocation = allocate_gpus(run_request, listener)
        return _launch(run_request, preflight, allocation, fork_server, listener)
    except KeyboardInterrupt:
        listener(WarningEvent(message="asked to stop before the run began; nothing was made"))
        return ExitCode.FAILED
    finally:
        if fork_server is not None:
            fork_server.kill()
        allocation.reservation.release()


def allocate_gpus(run_request: RunRequest, listener: Listener) -> GpuAllocation:
    """The GPUs of a run, reserved for it and waited for where that is wanted. Raises UsageError."""
    device, run = run_request.config.device, run_request.config.run.name or run_request.default_name
    allocation = allocate_devices(device.gpus, run, wait=device.wait, on_wait=waiting_emitter(listener))
    for warning in allocation.warnings:
        listener(WarningEvent(message=warning))
    return allocation


def _launch(
    run_request: RunRequest,
    preflight: Preflight,
    allocation: GpuAllocation,
    fork_server: ForkServer | None,
    listener: Listener,
) -> int:
    try:
        run_plan = plan_node(run_request.config, allocation.devices)
    except UsageError as error:
        # Where no GPU could be chosen, what the CPU makes impossible is beside the point.
        unchosen = any(problem.location == "device.gpus" for problem in preflight.problems)
        raise UsageError([*preflight.problems, *([] if unchosen else error.problems)]) from None
    check_run_plan(run_request.config, preflight, run_plan)
    source = preflight.source
    signals = SignalHandler()
    if run_request.dry_run:
        config = _resolve_batch_size(run_request.config, run_plan, source, allocation, listener)
        signals.install()
        return _dry_run(Job(config, run_plan, None, False, source), fork_server, signals, listener)

    claimed = claim_if_unfinished(run_request)
    if claimed is None:
        listener(already_finished_warning(run_request))
        return ExitCode.FINISHED
    try:
        config = with_run_name(run_request.config, claimed.folder)
        config = _resolve_batch_size(config, run_plan, source, allocation, listener, claimed)
        signals.install()
        job = Job(config, run_plan, claimed.folder, not claimed.is_new, source)
        return _supervise(job, fork_server, claimed, allocation, signals, listener)
    except (UsageError, KeyboardInterrupt):
        claimed.discard()
        raise
    finally:
        claimed.ownership.release()


def _resolve_batch_size(
    config: Config,
    run_plan: NodePlan,
    source: ImageSource | None,
    allocation: GpuAllocation,
    listener: Listener,
    claimed: ClaimedRun | None = None,
) -> Config:
    """The config with a number for `data.batch_size: auto`: that of the run where it goes on, else the most that fit.
    Raises UsageError."""
    if config.data.batch_size != "auto":
        return config
    if claimed is not None and (before := previous_batch_size(claimed.folder)) is not None:
        return with_batch_size(config, before)

    def between() -> None:
        allocation.reservation.touch()
        if claimed is not None:
            claimed.ownership.renew_heartbeat()

    found = find_batch_size(config, run_plan, run_plan.local_world_size, source, between)
    listener(BatchSizeFound(message=found.describe(config)))
    return with_batch_size(config, found.batch_size)


def _supervise(
    job: Job,
    fork_server: ForkServer | None,
    claimed: ClaimedRun,
    allocation: GpuAllocation,
    signals: SignalHandler,
    listener: Listener,
) -> int:
    folder, ownership = claimed.folder, claimed.ownership
    recorder = open_recorder(folder, job.config, listener)
    if job.config.run.requeue and slurm_job_id() is None:
        listener(WarningEvent(message="run.requeue: this is no job of SLURM, so nothing will put it back into a queue"))
    listener(RunStarting(name=folder.name, folder=str(folder.path)))
    allocation.reservation.set_run_name(folder.name)
    usage = GpuUsagePoller([device.uuid for device in allocation.devices])

    def record(event: Event) -> None:
        recorder.record(event)
        if isinstance(event, RunStarted):
            # From here on there is something to lose.
            claimed.is_new = False
            allocation.reservation.publish_ranks(local_gpu_ranks(event))

    def on_tick() -> None:
        ownership.renew_heartbeat()
        allocation.reservation.touch()
        if (event := usage.poll()) is not None:
            recorder.record(event)

    requests, restart = RequestCounters(), 0
    try:
        result = _run_ranks(job, signals, record, on_tick, requests, fork_server)
        for restart in range(1, job.config.run.max_restarts + 1):
            if not should_restart(result, recorder.history):
                break
            recorder.record(record_restart(result, recorder, restart, job.config.run.max_restarts))
            restarted_job = replace(job, resumed=recorder.history.started is not None)
            result = _run_ranks(restarted_job, signals, record, on_tick, requests)
        requeues = job.config.run.requeue and signals.time_limit_near and not signals.kill_requested
        return end_run(result, recorder, listener, should_requeue=requeues)
    except UsageError as error:
        if restart > 0:
            recorder.record(RunFinished(state="failed", message=str(error)))
        raise
    finally:
        usage.close()
        recorder.close()


def _dry_run(job: Job, fork_server: ForkServer | None, signals: SignalHandler, listener: Listener) -> int:
    """A dry run."""
    ending = _run_ranks(job, signals, listener, lambda: None, RequestCounters(), fork_server)
    if ending.failure is not None:
        listener(RunFinished(state="failed", message=describe_failure(ending.failure)))
    return ExitCode.FINISHED if ending.state == "finished" else ExitCode.FAILED


def _run_ranks(
    job: Job,
    signals: SignalHandler,
    emit: Listener,
    on_tick: Callable[[], None],
    requests: RequestCounters,
    fork_server: ForkServer | None = None,
) -> RunResult:
    """Without a `fork_server` one is started."""
    prepare_environment(job.plan, os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return Supervisor(job, fork_server or ForkServer(), signals, emit, on_tick, requests).run()
    finally:
        remove_rendezvous_file(job.config.device.init_method)
