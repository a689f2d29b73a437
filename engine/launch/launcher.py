"""The spawn driver: run preflight and lifecycle in this process, which supervises the ranks that it starts.

The command line calls `launch`; under torchrun or srun it hands over to `external`, the other driver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from engine.config.limits import read_limits
from engine.distributed.node_plan import prepare_environment
from engine.distributed.rank_env import detect_launcher
from engine.distributed.watchdog import Heartbeats
from engine.launch.batch_size import with_previous_batch_size
from engine.launch.gpu_usage import GpuUsagePoller
from engine.launch.input_keys import with_input_keys
from engine.launch.lifecycle import TrainingRun, record_restart, should_restart
from engine.launch.owned_run import run_owned, with_interrupted_wait
from engine.launch.preflight import find_problems, run_preflight, source_opener
from engine.launch.progress import ProgressReporter
from engine.launch.rank_starter import RankStarter
from engine.launch.request import RunRequest, watch_other_claim
from engine.launch.run_code import with_code_copy
from engine.launch.supervisor import Supervisor
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.recorder import Listener
from engine.runs.sinks import Sink
from engine.training.job import Job, RunResult
from engine.utils.errors import UsageError, raise_if_any
from engine.utils.exit_codes import ExitCode
from engine.utils.host import raise_open_files_limit
from engine.utils.process import SignalHandler, ignore_sighup


def launch(request: RunRequest, listener: Listener) -> int:
    """Run to the end and return the exit code; `listener` receives every event.

    Raises UsageError if the request is refused, with nothing left behind."""
    ignore_sighup()
    raise_open_files_limit()
    launcher = detect_launcher(request.config.device.launcher, os.environ)
    if launcher != "spawn":
        from engine.launch.external import run_external_rank

        return run_external_rank(request, launcher, listener)

    run, rank_starter = TrainingRun(request, listener), None

    def train() -> int:
        nonlocal rank_starter
        watch_other_claim(request, listener)
        run.request = with_code_copy(with_input_keys(with_interrupted_wait(request)))
        if not (run.request.config.waits or run.request.problems):
            # It imports torch during the preflight. A run that may wait for GPUs for days must not hold that memory.
            rank_starter = RankStarter()
        return _run(run, rank_starter)

    try:
        return run_owned(run, train)
    finally:
        if rank_starter is not None:
            rank_starter.kill()


def _run(run: TrainingRun, rank_starter: RankStarter | None) -> ExitCode:
    """The steps of the driver. `external._run` has those from the preflight on: torchrun starts no run detached."""
    if run.request.config.waits:
        # Whoever started it may be gone when it has its GPUs.
        raise_if_any(find_problems(run.request))
    preflight = run_preflight(
        run.request,
        lambda wait: run.allocate(wait=wait),
        open_source=source_opener(run.listener),
        after_wait=run.with_code_copy,
    )
    raise_if_any(preflight.problems)
    job = run.prepare(preflight)
    signals = SignalHandler()
    signals.install()
    result = _train(run, job, signals, rank_starter)
    requeues = job.config.run.requeue and signals.time_limit_near and not signals.kill_requested
    return run.end(result, should_requeue=requeues)


def _train(run: TrainingRun, job: Job, signals: SignalHandler, rank_starter: RankStarter | None) -> RunResult:
    """Run the ranks to their end, and restart them if one fails. Raises UsageError."""
    recorder, restart, max_restarts = run.recorder, 0, job.config.run.max_restarts
    (limit_min, limit), began = read_limits().minutes(job.config), time.monotonic()
    usage = GpuUsagePoller([device.uuid for device in run.allocation.devices] if recorder else [])
    readings = Sink("the reading of the GPUs", lambda problem: run.emit(WarningEvent.of(problem)))
    progress = ProgressReporter(run.listener)

    def read_gpus() -> None:
        if (event := usage.poll()) is not None:
            run.emit(event)

    def on_tick(heartbeats: Heartbeats) -> None:
        run.keep_alive()
        progress.poll(heartbeats)
        readings.attempt(read_gpus)
        if limit_min and time.monotonic() - began > 60 * limit_min:
            signals.request_stop(limit)

    try:
        result = _run_ranks(run, job, signals, on_tick, rank_starter)
        while recorder is not None and restart < max_restarts and should_restart(result, recorder.history):
            restart += 1
            record_restart(result, recorder, restart, max_restarts)
            job = with_previous_batch_size(replace(job, resumed=recorder.history.started is not None))
            result = _run_ranks(run, job, signals, on_tick)
        return result
    except UsageError as error:
        if restart > 0:
            run.emit(RunFinished(state="failed", message=str(error)))
        raise
    finally:
        usage.close()


def _run_ranks(
    run: TrainingRun,
    job: Job,
    signals: SignalHandler,
    on_tick: Callable[[Heartbeats], None],
    rank_starter: RankStarter | None = None,
) -> RunResult:
    """Run the ranks once, in a new rank starter if `rank_starter` is None."""
    prepare_environment(job.plan, os.environ)
    return Supervisor(job, rank_starter or RankStarter(), signals, run.emit, on_tick, run.requests).run()
