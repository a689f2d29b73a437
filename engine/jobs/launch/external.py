"""One rank that torchrun, srun or a worker of Ray started: the steps of `training` without a supervisor.

Rank 0 owns the run: it claims the folder, writes the journal and reports refusals for all ranks. The ranks exchange
what they decide through the store of their rendezvous (`handshake`, `node`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.exit_codes import ExitCode
from engine.base.process import SignalHandler, die_with_parent, exit_now
from engine.gpus.allocation import GpuAllocation
from engine.gpus.selection import CudaDevice
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.handshake import (
    Announcement,
    PreparedJob,
    RankZeroEndedError,
    continue_run_of_agents,
    exit_code_of_rank_0,
    handshake,
    share_exit_code,
    wait_for_message,
)
from engine.jobs.launch.node import (
    allocate_node_gpus,
    collect_preflights,
    find_root_cause,
    publish_failure,
    share_preflight,
    watchdog_thread,
)
from engine.jobs.launch.phases import (
    AlreadyFinishedError,
    Granted,
    Held,
    Recording,
    Requested,
    RunListener,
    Unrecorded,
    grant_allocated,
)
from engine.jobs.launch.preflight import Preflight, find_problems, run_preflight, source_opener, with_input_keys
from engine.jobs.launch.ranks import ProgressReporter, end_training, stderr_listener
from engine.jobs.launch.request import RunRequest, SettledConfig, settle_config, watch_other_claim
from engine.jobs.launch.supervise import requeue_clause
from engine.jobs.launch.training import begin_training, make_job
from engine.runs.batch.ray import Ray
from engine.runs.control import RequestCounters
from engine.runs.events import ControlEvent, Event
from engine.runs.folder import RunFolder
from engine.runs.ownership import OwnershipLostError
from engine.runs.recorder import Listener
from engine.train.distributed.channel import Channel
from engine.train.distributed.failures import describe_failure, find_cause, rank_failure
from engine.train.distributed.messages import PeerFailedError, merge_problems, send
from engine.train.distributed.node_plan import lowest_capability, prepare_environment
from engine.train.distributed.rank_env import TORCHRUN_RUN_ID, RankInfo, rank_info_from_env
from engine.train.distributed.rendezvous import open_store
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter, Watchdog
from engine.train.loop.job import Job, RunResult, StartMethod

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.5
REPORT_TIMEOUT_SECONDS = 10  # for the first rank of a host to start and to report an invalid config


@dataclass(frozen=True)
class _ExternalRank:
    """A rank that torchrun or srun started, which no other rank knows yet."""

    rank_info: RankInfo
    start_method: StartMethod
    stop_flag: SignalHandler

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    def check_stop(self) -> None:
        """Raise KeyboardInterrupt if this process has received a stop signal."""
        if self.stop_flag.is_set:
            raise KeyboardInterrupt

    def share_exit_code(self, code: ExitCode) -> None:
        """Send the exit code of rank 0 to the other ranks, which acknowledge it."""


@dataclass(frozen=True)
class _ConnectedRank(_ExternalRank):
    """A rank that has met the others. Its store holds only keys of this attempt: torchrun keeps one over all
    restarts."""

    store: Store
    announcements: Sequence[Announcement]
    """Those of all ranks, on rank 0."""

    def share_exit_code(self, code: ExitCode) -> None:
        if self.rank == 0:
            share_exit_code(self.store, code, self.rank_info.world_size)
        else:
            exit_code_of_rank_0(self.store)


def run_external_rank(request: RunRequest, launcher: Literal["env", "slurm"], listener: Listener) -> int:
    """Train as one rank that torchrun or srun started, and return the exit code.

    Raises UsageError on every rank if the launcher's variables are wrong; otherwise on rank 0 alone, which reports for
    all ranks."""
    start_method: StartMethod = "srun" if launcher == "slurm" else "env"
    if _under_torchrun():
        start_method = "ray" if Ray.job_variable in os.environ else "torchrun"
        # If this rank's agent, or worker of Ray, dies, the others are restarted without it.
        die_with_parent(os.getppid())
    rank_info, variables = rank_info_from_env(launcher, os.environ)
    os.environ.update(variables)
    this_rank = _ExternalRank(rank_info, start_method, SignalHandler())
    this_rank.stop_flag.install()
    shown = RunListener(listener if this_rank.rank == 0 else stderr_listener(this_rank.rank))
    try:
        with Held() as held:
            this_rank = connected = _connect(this_rank, request)
            code = _run(connected, Requested(request, shown, held))
    except RankZeroEndedError as error:
        code = error.exit_code
    except AlreadyFinishedError:
        code = ExitCode.FINISHED
        this_rank.share_exit_code(code)
    except (PeerFailedError, OwnershipLostError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = ExitCode.FAILED
        this_rank.share_exit_code(code)
    except KeyboardInterrupt:
        print(Problem("", f"rank {this_rank.rank} was stopped before the run began", code="stopped"), file=sys.stderr)
        code = ExitCode.STOPPED
        this_rank.share_exit_code(code)
    except UsageError as error:
        if this_rank.rank == 0:
            this_rank.share_exit_code(ExitCode.USAGE_ERROR)
            raise
        code = _exit_code_of_refused_rank(this_rank, error)
    except BaseException:
        this_rank.share_exit_code(ExitCode.FAILED)
        raise
    # torchrun restarts the ranks if one ends with anything but 0.
    return ExitCode.FINISHED if code == ExitCode.STOPPED and launcher == "env" else code


def _run(this_rank: _ConnectedRank, requested: Requested) -> ExitCode:
    """The steps of `training.run_training`, on all ranks together."""
    requested = replace(requested, request=with_input_keys(_agree_on_request(this_rank, requested)))
    granted, preflight = _run_preflight_on_all_ranks(this_rank, requested)
    if this_rank.rank == 0:
        run = begin_training(granted, preflight)
        job = make_job(run, preflight)
        send(this_rank.store, "job", PreparedJob.of(job))
    else:
        run, job = _receive_job(this_rank, granted, preflight)
    prepare_environment(job.plan, os.environ)
    result = _train(this_rank, run, replace(job, start_method=this_rank.start_method))
    if this_rank.rank > 0:
        return {"finished": ExitCode.FINISHED, "stopped": ExitCode.STOPPED}.get(result.state, ExitCode.FAILED)
    is_requeued = job.config.run.requeue and this_rank.stop_flag.time_limit_near and result.state == "stopped"
    return end_training(run, result, requeue_clause() if is_requeued else "")


def _under_torchrun() -> bool:
    return TORCHRUN_RUN_ID in os.environ


def _connect(this_rank: _ExternalRank, request: RunRequest) -> _ConnectedRank:
    """Open the store of the ranks, restricted to this attempt. Raises UsageError and PeerFailedError."""
    rank_info, stop_flag = this_rank.rank_info, this_rank.stop_flag
    if problems := request.problems:
        # Before the rendezvous, which imports torch. Rank 0 adds what else its own host refuses.
        raise UsageError(problems if rank_info.rank > 0 else find_problems(request, rank_info))
    try:
        store = open_store(request.config, rank_info)
    except (RuntimeError, ValueError) as error:
        cause = find_cause(error)
        reason = f"rank {rank_info.rank} could not connect to the other ranks: {cause.reason}"
        raise PeerFailedError(reason, code=cause.code) from error
    import torch.distributed as dist

    name, announcements = handshake(store, rank_info, stop_flag)
    store = dist.PrefixStore(name, store)
    return _ConnectedRank(rank_info, this_rank.start_method, stop_flag, store, announcements)


def _agree_on_request(this_rank: _ConnectedRank, requested: Requested) -> RunRequest:
    """Return the request of this rank; on rank 0, that to go on if torchrun has restarted the ranks. Raises
    UsageError."""
    request = requested.request
    if this_rank.rank > 0:
        return request
    if _under_torchrun():
        request = replace(request, agents=tuple(rank.agent for rank in this_rank.announcements))
        request = continue_run_of_agents(request)
    watch_other_claim(request, requested.listener, this_rank.check_stop)
    return request


def _run_preflight_on_all_ranks(this_rank: _ConnectedRank, requested: Requested) -> tuple[Granted, Preflight]:
    """Check the request on every host. Raises UsageError on rank 0, with the problems of all hosts."""
    rank_info, store, stop_flag, request = this_rank.rank_info, this_rank.store, this_rank.stop_flag, requested.request
    # A rank whose GPUs are refused does not begin: rank 0 tells it so.
    grants = [Granted(requested, GpuAllocation(), None, ())]

    def allocate(_wait: bool) -> Sequence[CudaDevice]:
        allocation = allocate_node_gpus(request, rank_info, store, stop_flag, requested.listener)
        grants.append(grant_allocated(requested, allocation, shows_warnings=rank_info.local_rank == 0))
        return allocation.devices

    try:
        this_rank.check_stop()
        preflight = run_preflight(request, allocate, rank_info, source_opener(requested.listener))
    except RankZeroEndedError:
        # A write would create the file of a FileStore again, which rank 0 has removed.
        raise
    except BaseException as error:
        if this_rank.rank > 0:
            is_stopped = isinstance(error, KeyboardInterrupt)
            cause = "it was stopped" if is_stopped else find_cause(error).reason
            reason = f"rank {this_rank.rank} failed in the preflight: {cause}"
            share_preflight(rank_info, store, [Problem("", reason, code="stopped" if is_stopped else "rank-failed")])
        raise
    plan = preflight.plan
    capability = None if plan is None else plan.capability
    if this_rank.rank > 0:
        share_preflight(rank_info, store, preflight.problems, capability)
        return grants[-1], preflight
    others = collect_preflights(rank_info, store, stop_flag)
    this_rank.check_stop()
    if any(problem.code == "stopped" for other in others for problem in other.problems):
        raise KeyboardInterrupt
    raise_if_any(merge_problems(preflight.problems, others))
    if plan is not None:
        lowest = lowest_capability([capability, *(other.capability for other in others)])
        preflight.use_plan(replace(plan, capability=lowest), request.config)
    return grants[-1], preflight


def _receive_job(this_rank: _ConnectedRank, granted: Granted, preflight: Preflight) -> tuple[Unrecorded, Job]:
    """Wait for the job of rank 0. Raises RankZeroEndedError if there is none."""
    message = wait_for_message(this_rank.store, "job", PreparedJob, this_rank.stop_flag)
    config = granted.requested.request.config
    config = config.with_values(data={"batch_size": message.batch_size}, precision={"amp": message.amp})
    settled, folder = SettledConfig(config, config), None
    if message.folder is not None:
        folder = RunFolder(Path(message.folder))
        with suppress(OSError):
            # This host may not share the file system of rank 0.
            folder = folder.identified()
        settled = settle_config(config, folder, None, is_resumed=False)
        granted.allocation.reservation.set_run_name(folder.name)
    run = Unrecorded(granted, settled)
    plan = replace(preflight.accepted_plan, capability=message.capability)
    return run, replace(make_job(run, preflight), plan=plan, folder=folder, resumed=message.resumed, amp_reason="")


def _exit_code_of_refused_rank(this_rank: _ExternalRank, error: UsageError) -> ExitCode:
    """Return the exit code of rank 0, whose error is the same or the cause of this one; else report this one."""
    store = this_rank.store if isinstance(this_rank, _ConnectedRank) else None
    shared = None if store is None else exit_code_of_rank_0(store)
    # Without a rendezvous, the first rank of each host reports for its host.
    if shared is None and (store is not None or this_rank.rank_info.local_rank == 0):
        for problem in error.problems:
            print(f"error: rank {this_rank.rank}: {problem}", file=sys.stderr)
    if store is None and _under_torchrun():
        # torchrun ends all ranks once one has exited: let the first rank of this host print its report.
        deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
        while this_rank.rank_info.local_rank > 0 and not this_rank.stop_flag.is_set and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    return ExitCode.USAGE_ERROR if shared is None else shared


def _train(this_rank: _ConnectedRank, run: Unrecorded, job: Job) -> RunResult:
    """Train to the end; rank 0 records the events and serves the control requests. Raises UsageError."""
    from engine.train.loop.train import train

    rank_info, stop_flag, store = this_rank.rank_info, this_rank.stop_flag, this_rank.store
    recorder = run.recorder if isinstance(run, Recording) else None
    device = job.plan.devices[job.plan.device_index(rank_info.local_rank)]
    heartbeats, requests = Heartbeats(1), RequestCounters()
    usage = GpuUsagePoller([] if recorder is None else run.gpus)
    # Once the record is closed, which ends the thread that uses it.
    run.granted.requested.held.processes.callback(usage.close)
    watchdog = watchdog_thread(Watchdog(heartbeats, job.config.run.watchdog), rank_info, device, store, recorder)
    emit: Listener = run.emit
    if isinstance(run, Recording):
        emit = _monitoring_listener(run, requests, usage, heartbeats)

    def on_poll() -> None:
        # DataLoader workers are forked before the first poll, and must not inherit the thread.
        if not watchdog.is_alive():
            watchdog.start()

    channel = Channel(emit, stop_flag, requests, HeartbeatWriter(heartbeats, 0), on_poll)
    try:
        outcome = train(job, rank_info, store, channel)
        if recorder is not None and outcome == "stopped" and not recorder.history.stopping:
            # Stopped by a signal, to this rank or to another one.
            recorder.record(ControlEvent(request="stop", by=stop_flag.signal_name or "a signal", outcome="done"))
        return RunResult(outcome)
    except (UsageError, OwnershipLostError):
        raise
    except Exception as error:
        failure = rank_failure(this_rank.rank, device, error, job.config)
        if this_rank.rank == 0:
            failure = find_root_cause(failure, rank_info.world_size, store)
        else:
            publish_failure(failure, store)
            print(f"{describe_failure(failure)}\n{failure.traceback}", file=sys.stderr)
        return RunResult("failed", failure)


def _monitoring_listener(
    run: Recording, requests: RequestCounters, usage: GpuUsagePoller, heartbeats: Heartbeats
) -> Listener:
    """Return a listener whose first event starts a thread for heartbeats, progress, GPU readings and control requests.

    Not earlier, because DataLoader workers are forked before and must not inherit the thread."""
    progress = ProgressReporter(run.granted.requested.listener)

    def watch() -> None:
        while not run.recorder.closed.wait(POLL_SECONDS):
            try:
                run.keep_alive()
                if (reading := usage.poll()) is not None:
                    run.emit(reading)
            except OwnershipLostError as error:
                print(f"error: {error}", file=sys.stderr)
                # No stop: it would save a checkpoint, but another process owns the folder now.
                exit_now(ExitCode.FAILED)
            progress.poll(heartbeats)
            for request in run.requests():
                outcome = requests.apply(request.request, request.steps)
                run.recorder.record(ControlEvent(request=request.request, by=request.by, outcome=outcome))

    thread = threading.Thread(target=watch, name="control", daemon=True)

    def emit(event: Event) -> None:
        if not thread.is_alive():
            thread.start()
        run.emit(event)

    return emit
