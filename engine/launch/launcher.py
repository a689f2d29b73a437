"""The spawn driver: run preflight and lifecycle in this process, which supervises the ranks that it starts.

The command line calls `launch`; under torchrun or srun it hands over to `external`, the other driver.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.distributed.node_plan import prepare_environment
from engine.distributed.rank_env import detect_launcher
from engine.distributed.rendezvous import remove_rendezvous_file
from engine.distributed.watchdog import Heartbeats
from engine.gpus.allocation import allocate_devices
from engine.gpus.selection import CudaDevice
from engine.launch.gpu_usage import GpuUsagePoller, waiting_emitter
from engine.launch.input_keys import with_input_keys
from engine.launch.lifecycle import AlreadyFinishedError, OwnedRun, record_restart, should_restart
from engine.launch.preflight import (
    RunRequest,
    find_problems_before_wait,
    run_preflight,
    source_opener,
    watch_other_claim,
)
from engine.launch.progress import ProgressReporter
from engine.launch.rank_starter import RankStarter
from engine.launch.supervisor import Supervisor
from engine.queue.dependencies import DependencyError
from engine.queue.place import CancelledError, backfill_of, fixed_terms
from engine.queue.state import is_interrupted
from engine.runs.events import RunFinished, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.ownership import OwnershipLostError
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

        return run_external_rank(with_interrupted_wait(request), launcher, listener)

    # Until the run starts, a signal ends this process through the clauses below, which release what it holds.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    run, rank_starter = OwnedRun(request, listener), None
    try:
        watch_other_claim(request, listener)
        run.request = with_input_keys(with_interrupted_wait(request))
        if not (run.request.config.waits or run.request.problems):
            # It imports torch during the preflight. A run that may wait for GPUs for days must not hold that memory.
            rank_starter = RankStarter()
        return _run(run, rank_starter)
    except (UsageError, DependencyError) as error:
        if run.is_kept:
            return run.end_before_start("failed", str(error))
        run.discard()
        if isinstance(error, DependencyError):
            raise UsageError.one("queue.after", str(error), code=error.code) from error
        raise
    except CancelledError as error:
        return run.end_before_start("stopped", str(error))
    except AlreadyFinishedError:
        return ExitCode.FINISHED
    except KeyboardInterrupt:
        if run.is_kept:
            return run.interrupt()
        run.discard()
        listener(WarningEvent(message="stopped before the run began; nothing was created", code="stopped"))
        return ExitCode.FAILED
    except OwnershipLostError as error:
        listener(RunFinished(state="failed", message=str(error)))
        return ExitCode.FAILED
    finally:
        if rank_starter is not None:
            rank_starter.kill()
        run.release()


def with_interrupted_wait(request: RunRequest) -> RunRequest:
    """Return the request to go on waiting, if it resumes a run whose wait was interrupted."""
    run = request.config.run
    if run.name is None or not run.resume or not is_interrupted(RunFolder(request.runs_dir / run.name)):
        return request
    return replace(request, config=request.config.with_values(device={"wait": True}))


def _run(run: OwnedRun, rank_starter: RankStarter | None) -> ExitCode:
    """The steps of the driver. `external._run` has those from the preflight on: torchrun starts no run detached."""
    if run.request.config.waits:
        # Whoever started it may be gone when it has its GPUs.
        raise_if_any(find_problems_before_wait(run.request))
    preflight = run_preflight(
        run.request, lambda wait: _allocate_gpus(run, wait=wait), open_source=source_opener(run.listener)
    )
    raise_if_any(preflight.problems)
    job = run.prepare(preflight)
    signals = SignalHandler()
    signals.install()
    result = _train(run, job, signals, rank_starter)
    requeues = job.config.run.requeue and signals.time_limit_near and not signals.kill_requested
    return run.end(result, should_requeue=requeues)


def _allocate_gpus(run: OwnedRun, *, wait: bool) -> Sequence[CudaDevice]:
    """Reserve the GPUs of the run, and the place in the queue while it waits for them.

    Raises UsageError, and as `QueuePlace.poll_terms` does."""
    config = run.request.config
    place = run.enter_queue() if wait and not run.request.dry_run else None
    run.allocation = allocate_devices(
        config.device.gpus,
        (config.run.name or run.request.default_name) if place is None else place.folder.name,
        wait=wait,
        on_wait=waiting_emitter(run.show_wait) if place is None else place.report,
        poll_terms=(lambda: (fixed_terms(config), "")) if place is None else place.poll_terms,
        backfill=backfill_of(config),
    )
    if place is not None:
        place.leave([device.uuid for device in run.allocation.devices])
    run.show_gpu_warnings()
    return run.allocation.devices


def _train(run: OwnedRun, job: Job, signals: SignalHandler, rank_starter: RankStarter | None) -> RunResult:
    """Run the ranks to their end, and restart them if one fails. Raises UsageError."""
    recorder, restart, max_restarts = run.recorder, 0, job.config.run.max_restarts
    limit_min, began = job.config.queue.time_limit, time.monotonic()
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
            signals.request_stop(f"queue.time_limit ({limit_min:g} min)")

    try:
        result = _run_ranks(run, job, signals, on_tick, rank_starter)
        while recorder is not None and restart < max_restarts and should_restart(result, recorder.history):
            restart += 1
            record_restart(result, recorder, restart, max_restarts)
            result = _run_ranks(run, replace(job, resumed=recorder.history.started is not None), signals, on_tick)
        return result
    except UsageError as error:
        if restart > 0:
            run.emit(RunFinished(state="failed", message=str(error)))
        raise
    finally:
        usage.close()


def _run_ranks(
    run: OwnedRun,
    job: Job,
    signals: SignalHandler,
    on_tick: Callable[[Heartbeats], None],
    rank_starter: RankStarter | None = None,
) -> RunResult:
    """Run the ranks once, in a new rank starter if `rank_starter` is None."""
    prepare_environment(job.plan, os.environ)
    try:
        return Supervisor(job, rank_starter or RankStarter(), signals, run.emit, on_tick, run.requests).run()
    finally:
        remove_rendezvous_file(job.config.device.init_method)
