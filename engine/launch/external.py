"""The driver of one rank that torchrun or srun started: the steps of `launcher` without a supervisor.

Rank 0 owns the run: it claims the folder, writes the journal and reports refusals for all ranks. The ranks exchange
what they decide through the store of their rendezvous (`handshake`, `node`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.distributed.channel import Channel
from engine.distributed.failures import describe_failure, find_cause, rank_failure
from engine.distributed.messages import PeerFailedError, merge_problems, send
from engine.distributed.node_plan import lowest_capability, prepare_environment
from engine.distributed.rank_env import TORCHRUN_RUN_ID, RankInfo, rank_info_from_env
from engine.distributed.rendezvous import open_store
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter, Watchdog
from engine.gpus.selection import CudaDevice
from engine.launch.external_failures import find_root_cause, publish_failure, watchdog_thread
from engine.launch.gpu_usage import GpuUsagePoller
from engine.launch.handshake import (
    PreparedJob,
    RankZeroEndedError,
    check_versions,
    continue_run_of_agents,
    exit_code_of_rank_0,
    handshake,
    heartbeat,
    share_exit_code,
    wait_for_message,
)
from engine.launch.input_keys import with_input_keys
from engine.launch.lifecycle import TrainingRun
from engine.launch.node import (
    MultiNodeGpuUsage,
    allocate_node_gpus,
    collect_preflights,
    publish_gpu_usage,
    share_preflight,
)
from engine.launch.owned_run import AlreadyFinishedError, with_run_name
from engine.launch.preflight import Preflight, find_problems, run_preflight, source_opener
from engine.launch.progress import ProgressReporter, stderr_listener
from engine.launch.request import RunRequest, watch_other_claim
from engine.runs.control import consume_requests
from engine.runs.events import ControlEvent, Event, RunStarted, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.ownership import OwnershipLostError
from engine.runs.recorder import Listener, Recorder
from engine.runs.sinks import Sink
from engine.training.job import Job, RunResult, StartMethod
from engine.utils.errors import CodedError, Problem, UsageError, raise_if_any
from engine.utils.exit_codes import ExitCode
from engine.utils.process import SignalHandler, die_with_parent, exit_now

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.5
REPORT_TIMEOUT_SECONDS = 10  # for the first rank of a host to start and to report an invalid config


@dataclass
class _ExternalRank:
    """A rank that torchrun or srun started. `_connect` opens the store that connects it to the other ranks."""

    rank_info: RankInfo
    start_method: StartMethod
    stop_flag: SignalHandler
    opened: Store | None = None
    store_is_exclusive: bool = False
    """Whether the store holds only keys of this attempt: torchrun keeps one store over all restarts."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Closed after the recorder: `recorder.closed` ends the thread that uses these resources."""

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def store(self) -> Store:
        assert self.opened is not None  # noqa: S101 - set by `_connect`, the first step
        return self.opened

    def check_stop(self) -> None:
        """Raise KeyboardInterrupt if this process has received a stop signal."""
        if self.stop_flag.is_set:
            raise KeyboardInterrupt

    def share_exit_code(self, code: ExitCode) -> None:
        """Send the exit code of rank 0 to the other ranks, which acknowledge it."""
        if self.store_is_exclusive and self.rank == 0:
            share_exit_code(self.store, code, self.rank_info.world_size)
        elif self.store_is_exclusive:
            exit_code_of_rank_0(self.store)


class _RendezvousError(CodedError):
    """The rank could not connect to the other ranks; the message says why."""


def run_external_rank(request: RunRequest, launcher: Literal["env", "slurm"], listener: Listener) -> int:
    """Train as one rank that torchrun or srun started, and return the exit code.

    Raises UsageError on every rank if the launcher's variables are wrong; otherwise on rank 0 alone, which reports for
    all ranks."""
    start_method: StartMethod = "srun" if launcher == "slurm" else "torchrun" if _under_torchrun() else "env"
    if _under_torchrun():
        # If this rank's agent dies, the other agents restart their ranks without it.
        die_with_parent(os.getppid())
    rank_info, variables = rank_info_from_env(launcher, os.environ)
    os.environ.update(variables)
    this_rank = _ExternalRank(rank_info, start_method, SignalHandler())
    this_rank.stop_flag.install()
    run = TrainingRun(request, listener if this_rank.rank == 0 else stderr_listener(this_rank.rank))
    try:
        code = _run(run, this_rank)
    except RankZeroEndedError as error:
        code = error.exit_code
    except AlreadyFinishedError:
        code = ExitCode.FINISHED
        this_rank.share_exit_code(code)
    except _RendezvousError as error:
        reason = f"rank {this_rank.rank} could not connect to the other ranks: {error}"
        print(Problem("", reason, code=error.code), file=sys.stderr)
        code = ExitCode.FAILED
    except PeerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        code = ExitCode.FAILED
        this_rank.share_exit_code(code)
    except OwnershipLostError as error:
        print(f"error: {error}", file=sys.stderr)
        code = ExitCode.FAILED
    except KeyboardInterrupt:
        run.discard()
        print(Problem("", f"rank {this_rank.rank} was stopped before the run began", code="stopped"), file=sys.stderr)
        code = ExitCode.STOPPED
        this_rank.share_exit_code(code)
    except UsageError as error:
        run.discard()
        if this_rank.rank == 0:
            this_rank.share_exit_code(ExitCode.USAGE_ERROR)
            raise
        code = _exit_code_of_refused_rank(this_rank, error)
    except BaseException:
        this_rank.share_exit_code(ExitCode.FAILED)
        raise
    finally:
        run.release()
        this_rank.cleanup.close()
    # torchrun restarts the ranks if one ends with anything but 0.
    return ExitCode.FINISHED if code == ExitCode.STOPPED and launcher == "env" else code


def _run(run: TrainingRun, this_rank: _ExternalRank) -> ExitCode:
    """The steps of the driver: a rendezvous of the ranks, then those of `launcher._run`."""
    _connect(run, this_rank)
    # Ends before the training, whose DataLoader workers are forked and must not inherit the thread.
    with heartbeat(this_rank.store, this_rank.rank):
        if this_rank.rank == 0:
            watch_other_claim(run.request, run.listener, this_rank.check_stop)
        run.request = with_input_keys(run.request)
        preflight = _run_preflight_on_all_ranks(run, this_rank)
        job = (
            _prepare_and_broadcast(run, this_rank, preflight)
            if this_rank.rank == 0
            else _receive_job(run, this_rank, preflight)
        )
    prepare_environment(job.plan, os.environ)
    result = _train(run, this_rank, job)
    if this_rank.rank > 0:
        return {"finished": ExitCode.FINISHED, "stopped": ExitCode.STOPPED}.get(result.state, ExitCode.FAILED)
    requeues = job.config.run.requeue and this_rank.stop_flag.time_limit_near
    return run.end(result, should_requeue=requeues)


def _under_torchrun() -> bool:
    return TORCHRUN_RUN_ID in os.environ


def _connect(run: TrainingRun, this_rank: _ExternalRank) -> None:
    """Open the store of the ranks, restricted to this attempt. Raises UsageError and _RendezvousError."""
    config, rank_info = run.request.config, this_rank.rank_info
    if problems := run.request.problems:
        # Before the rendezvous, which imports torch. Rank 0 adds what else its own host refuses.
        raise UsageError(problems if rank_info.rank > 0 else find_problems(run.request, rank_info))
    try:
        this_rank.opened = open_store(config, rank_info)
    except (RuntimeError, ValueError) as error:
        cause = find_cause(error)
        raise _RendezvousError(cause.reason, code=cause.code) from error
    import torch.distributed as dist

    name, announcements = handshake(this_rank.store, rank_info, this_rank.stop_flag)
    this_rank.opened, this_rank.store_is_exclusive = dist.PrefixStore(name, this_rank.store), True
    if rank_info.rank > 0:
        return
    check_versions(announcements)
    if _under_torchrun():
        request = replace(run.request, agents=tuple(rank.agent for rank in announcements))
        run.request = continue_run_of_agents(request, run.listener, this_rank.check_stop)


def _run_preflight_on_all_ranks(run: TrainingRun, this_rank: _ExternalRank) -> Preflight:
    """Check the request on every host. Raises UsageError on rank 0, with the problems of all hosts."""
    rank_info, store, stop_flag = this_rank.rank_info, this_rank.store, this_rank.stop_flag

    def allocate(_wait: bool) -> Sequence[CudaDevice]:
        run.allocation = allocate_node_gpus(run.request, rank_info, store, stop_flag, run.listener)
        if rank_info.local_rank == 0:
            run.show_gpu_warnings()
        return run.allocation.devices

    try:
        if stop_flag.is_set:
            raise KeyboardInterrupt
        preflight = run_preflight(run.request, allocate, rank_info, source_opener(run.listener))
    except RankZeroEndedError:
        # A write would create the file of a FileStore again, which rank 0 has removed.
        raise
    except BaseException as error:
        if this_rank.rank > 0:
            stopped = isinstance(error, KeyboardInterrupt)
            # Rank 0 hosts the store: if the store is gone, rank 0 has exited.
            with suppress(RuntimeError):
                share_preflight(rank_info, store, stopped=stopped, failure=find_cause(error).reason)
        raise
    plan = preflight.plan
    capability = None if plan is None else plan.capability
    if this_rank.rank > 0:
        with suppress(RuntimeError):
            share_preflight(rank_info, store, preflight.problems, capability=capability)
        return preflight
    others = collect_preflights(rank_info, store, stop_flag)
    raise_if_any(merge_problems(preflight.problems, others))
    if plan is not None:
        lowest = lowest_capability([capability, *(other.capability for other in others)])
        preflight.use_plan(replace(plan, capability=lowest), run.request.config)
    return preflight


def _prepare_and_broadcast(run: TrainingRun, this_rank: _ExternalRank, preflight: Preflight) -> Job:
    """Prepare the run on rank 0, and send its folder and what was auto to the other ranks. Raises UsageError."""
    job = run.prepare(preflight)
    folder = None if job.folder is None else str(job.folder.path)
    batch_size, amp = job.config.data.batch_size, job.config.precision.amp
    capability = job.plan.capability
    message = PreparedJob(folder=folder, resumed=job.resumed, batch_size=batch_size, amp=amp, capability=capability)
    send(this_rank.store, "job", message)
    return job


def _receive_job(run: TrainingRun, this_rank: _ExternalRank, preflight: Preflight) -> Job:
    """Wait for the job of rank 0. Raises RankZeroEndedError if there is none."""
    message = wait_for_message(this_rank.store, "job", PreparedJob, this_rank.stop_flag)
    assert preflight.plan is not None  # noqa: S101 - else rank 0 would have refused the run
    config, folder = run.request.config, None
    config = config.with_values(data={"batch_size": message.batch_size}, precision={"amp": message.amp})
    if message.folder is not None:
        folder = RunFolder(Path(message.folder))
        with suppress(OSError):
            # This host may not share the file system of rank 0.
            folder = folder.identified()
        config = with_run_name(config, folder)
        run.allocation.reservation.set_run_name(folder.name)
    plan = replace(preflight.plan, capability=message.capability)
    job = Job(config, plan, folder, message.resumed, preflight.source, lr_range=run.request.lr_range)
    return replace(job, input_source=run.request.input_source)


def _exit_code_of_refused_rank(this_rank: _ExternalRank, error: UsageError) -> ExitCode:
    """Return the exit code of rank 0, whose error is the same or the cause of this one; else report this one."""
    shared = exit_code_of_rank_0(this_rank.store) if this_rank.store_is_exclusive else None
    # Without a rendezvous, the first rank of each host reports for its host.
    if shared is None and (this_rank.store_is_exclusive or this_rank.rank_info.local_rank == 0):
        for problem in error.problems:
            print(f"error: rank {this_rank.rank}: {problem}", file=sys.stderr)
    if not this_rank.store_is_exclusive and _under_torchrun():
        # torchrun ends all ranks once one has exited: let the first rank of this host print its report.
        deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
        while this_rank.rank_info.local_rank > 0 and not this_rank.stop_flag.is_set and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    return ExitCode.USAGE_ERROR if shared is None else shared


def _train(run: TrainingRun, this_rank: _ExternalRank, job: Job) -> RunResult:
    """Train to the end; rank 0 records the events and serves the control requests. Raises UsageError."""
    from engine.training.train import train

    rank_info, stop_flag, recorder = this_rank.rank_info, this_rank.stop_flag, run.recorder
    device = job.plan.devices[job.plan.device_index(rank_info.local_rank)]
    heartbeats = Heartbeats(1)
    watches_gpus = rank_info.local_rank == 0 and job.folder is not None
    usage = GpuUsagePoller([gpu.uuid for gpu in run.allocation.devices] if watches_gpus else [])
    this_rank.cleanup.callback(usage.close)
    watchdog = watchdog_thread(
        Watchdog(heartbeats, job.config.run.watchdog), rank_info, device, this_rank.store, recorder
    )
    emit: Listener = run.emit
    if recorder is not None:
        emit = _monitoring_listener(run, recorder, MultiNodeGpuUsage(usage, this_rank.store), heartbeats)

    def on_poll() -> None:
        # DataLoader workers are forked before the first poll, and must not inherit the thread.
        if not watchdog.is_alive():
            watchdog.start()
        if recorder is None:
            publish_gpu_usage(usage, this_rank.store, rank_info)

    channel = Channel(emit, stop_flag, run.requests, HeartbeatWriter(heartbeats, 0), on_poll)
    try:
        outcome = train(replace(job, start_method=this_rank.start_method), rank_info, this_rank.store, channel)
        if recorder is not None and outcome == "stopped" and not recorder.history.stopping:
            # Stopped by a signal, to this rank or to another one.
            recorder.record(ControlEvent(request="stop", by=stop_flag.signal_name or "a signal", outcome="done"))
        return RunResult(outcome)
    except (UsageError, OwnershipLostError):
        raise
    except Exception as error:
        failure = rank_failure(this_rank.rank, device, error, job.config)
        if this_rank.rank == 0:
            failure = find_root_cause(failure, rank_info.world_size, this_rank.store)
        else:
            publish_failure(failure, this_rank.store)
            print(f"{describe_failure(failure)}\n{failure.traceback}", file=sys.stderr)
        return RunResult("failed", failure)


def _monitoring_listener(
    run: TrainingRun, recorder: Recorder, nodes: MultiNodeGpuUsage, heartbeats: Heartbeats
) -> Listener:
    """Return a listener whose first event starts a thread for heartbeats, progress, GPU readings and control requests.

    Not earlier, because DataLoader workers are forked before and must not inherit the thread."""
    control, progress = recorder.folder.control, ProgressReporter(run.listener)
    readings = Sink("the reading of the GPUs", lambda problem: run.emit(WarningEvent.of(problem)))

    def read_gpus() -> None:
        for event in nodes.poll():
            run.emit(event)

    def watch() -> None:
        while not recorder.closed.wait(POLL_SECONDS):
            try:
                run.keep_alive()
            except OwnershipLostError as error:
                print(f"error: {error}", file=sys.stderr)
                # No stop: it would save a checkpoint, but another process owns the folder now.
                exit_now(ExitCode.FAILED)
            progress.poll(heartbeats)
            readings.attempt(read_gpus)
            for request in consume_requests(control):
                outcome = run.requests.apply(request.request, request.steps)
                recorder.record(ControlEvent(request=request.request, by=request.by, outcome=outcome))

    thread = threading.Thread(target=watch, name="control", daemon=True)

    def emit(event: Event) -> None:
        if isinstance(event, RunStarted):
            nodes.start(event)
        if not thread.is_alive():
            thread.start()
        run.emit(event)

    return emit
