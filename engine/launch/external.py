"""One rank of a world that torchrun or srun started. There is no supervisor: rank 0 owns the run and records it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.config.schema import Config
from engine.data.sources.open import open_source_for_preflight
from engine.distributed.channel import DirectChannel, StopFlag
from engine.distributed.failures import describe_cause, describe_failure, rank_failure
from engine.distributed.node_plan import NodePlan, plan_node, prepare_environment
from engine.distributed.rank_env import RankInfo, rank_info_from_env
from engine.distributed.rendezvous import check_external_rendezvous, open_store, remove_rendezvous_file
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter, Watchdog, describe_progress
from engine.gpus.allocation import GpuAllocation
from engine.launch.batch_size import find_batch_size, previous_batch_size, with_batch_size
from engine.launch.gpu_usage import GpuUsagePoller, waiting_emitter
from engine.launch.handshake import exit_code_of_rank_0, find_run_of_agents, handshake, share_exit_code, wait_for_key
from engine.launch.lifecycle import (
    RunRequest,
    already_finished_warning,
    claim_if_unfinished,
    end_run,
    open_recorder,
    record_result,
    with_run_name,
)
from engine.launch.node import MultiNodeGpuUsage, allocate_node_gpus, publish_gpu_usage
from engine.runs.control import RequestCounters, consume_requests
from engine.runs.event_lines import event_line
from engine.runs.events import BatchSizeFound, ControlEvent, Event, RankFailed, RunStarted, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.ownership import ClaimedRun
from engine.runs.recorder import Listener, Recorder
from engine.training.job import ExitCode, Job, RunResult
from engine.utils.errors import UsageError
from engine.utils.process import STOP_SIGNALS, die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_SECONDS = 0.5
RECORD_TIMEOUT_SECONDS = 5
ACK_TIMEOUT_SECONDS = 60


@dataclass
class _World:
    """This rank's connection to the other ranks; rank 0 also knows the torchrun agents that started them."""

    rank_info: RankInfo
    stop_flag: StopFlag
    store: Store
    agents: tuple[str, ...] = ()
    agreed: bool = False
    """Whether `store` is that of this start alone. torchrun keeps the store before it over restarts."""

    @property
    def rank(self) -> int:
        return self.rank_info.rank


@dataclass
class _Resources:
    """What this rank must give back when it ends; only rank 0 claims the run."""

    world: _World | None = None
    allocation: GpuAllocation = field(default_factory=GpuAllocation)
    claimed: ClaimedRun | None = None

    def discard_claim(self) -> None:
        if self.claimed is not None:
            self.claimed.discard()

    def broadcast_exit_code(self, code: ExitCode) -> None:
        if self.world is not None and self.world.rank == 0 and self.world.agreed:
            share_exit_code(self.world.store, code)

    def release(self, config: Config) -> None:
        self.allocation.reservation.release()
        if self.claimed is not None:
            self.claimed.ownership.release()
        # Before the rendezvous the file, if there is one, is another run's.
        if self.world is not None and self.world.rank == 0:
            remove_rendezvous_file(config.device.init_method)


class _RendezvousError(Exception):
    """The other ranks were not found; the text says why."""


def run_external_rank(run_request: RunRequest, launcher: Literal["env", "slurm"], listener: Listener) -> int:
    """Train as one rank that torchrun or srun started, and return the exit code. Raises UsageError on every rank where
    the launcher's variables are wrong; otherwise on rank 0 only, which reports the error for all."""
    stop_flag = _install_stop_flag()
    rank_info = _read_environment(launcher)
    rank, resources = rank_info.rank, _Resources()
    try:
        code = _run(run_request, rank_info, stop_flag, resources, listener)
    except _RendezvousError as error:
        print(f"rank {rank} did not find the others: {error}", file=sys.stderr)
        code = ExitCode.FAILED
    except KeyboardInterrupt:
        resources.discard_claim()
        print(f"rank {rank} was asked to stop before the run began", file=sys.stderr)
        code = ExitCode.STOPPED
        resources.broadcast_exit_code(code)
    except UsageError as error:
        resources.discard_claim()
        if rank == 0:
            resources.broadcast_exit_code(ExitCode.USAGE_ERROR)
            raise
        # Rank 0 speaks for all: its error is the cause of this one, or as good a reason to end.
        shared = exit_code_of_rank_0(resources.world.store) if resources.world and resources.world.agreed else None
        if shared is None:
            for problem in error.problems:
                print(f"error: rank {rank}: {problem}", file=sys.stderr)
        code = ExitCode.USAGE_ERROR if shared is None else shared
    finally:
        resources.release(run_request.config)
    # torchrun restarts the ranks when one ends with anything but 0.
    return ExitCode.FINISHED if code == ExitCode.STOPPED and launcher == "env" else code


def _run(
    run_request: RunRequest, rank_info: RankInfo, stop_flag: StopFlag, resources: _Resources, listener: Listener
) -> int:
    """The steps of a rank, in order."""
    world = resources.world = _rendezvous(run_request.config, rank_info, stop_flag)
    _agree_on_world(world)
    allocation = resources.allocation = _allocate_gpus(run_request, world, listener)
    run_plan = plan_node(run_request.config, allocation.devices, rank_info.local_world_size)
    prepare_environment(run_plan, os.environ)
    job = _obtain_job(run_request, run_plan, world, resources, listener)
    if job is None:
        return ExitCode.FINISHED
    allocation.reservation.set_run_name(job.config.run.name or run_request.default_name)
    job = replace(job, config=_resolve_batch_size(job, world, allocation, listener))
    return _train(job, world, resources, listener)


def _install_stop_flag() -> StopFlag:
    stop_flag = StopFlag()
    for signum in STOP_SIGNALS:
        signal.signal(signum, stop_flag.handle_signal)
    return stop_flag


def _read_environment(launcher: Literal["env", "slurm"]) -> RankInfo:
    """Read this rank's place from the launcher's variables, and add those that torch needs. Raises UsageError."""
    if _under_torchrun():
        # When this rank's agent is gone, the other agents restart the ranks without it.
        die_with_parent(os.getppid())
    rank_info, variables = rank_info_from_env(launcher, os.environ)
    os.environ.update(variables)
    return rank_info


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _rendezvous(config: Config, rank_info: RankInfo, stop_flag: StopFlag) -> _World:
    """Open the store of the ranks. Raises UsageError and _RendezvousError."""
    check_external_rendezvous(config.device.init_method, os.environ, rank_info.rank)
    try:
        return _World(rank_info, stop_flag, open_store(config, rank_info))
    except (RuntimeError, ValueError) as error:
        raise _RendezvousError(describe_cause(error)) from error


def _agree_on_world(world: _World) -> None:
    """Restrict the store to the ranks of this start: an earlier one may have left keys in it."""
    import torch.distributed as dist

    name, agents = handshake(world.store, world.rank_info, world.stop_flag)
    world.store, world.agreed = dist.PrefixStore(name, world.store), True
    if _under_torchrun():
        world.agents = tuple(agents)


def _allocate_gpus(run_request: RunRequest, world: _World, listener: Listener) -> GpuAllocation:
    """The GPUs of this host's ranks. Raises UsageError."""
    allocation = allocate_node_gpus(
        run_request, world.rank_info, world.store, world.stop_flag, waiting_emitter(listener)
    )
    if world.rank_info.local_rank == 0:
        for warning in allocation.warnings:
            listener(WarningEvent(message=warning))
    return allocation


def _obtain_job(
    run_request: RunRequest, run_plan: NodePlan, world: _World, resources: _Resources, listener: Listener
) -> Job | None:
    """What this rank is to train; None where the run has nothing left to do. Raises UsageError."""
    if run_request.dry_run:
        return Job(run_request.config, run_plan, None, False, None)
    if world.rank > 0:
        return _receive_job(run_request, run_plan, world)
    claimed = resources.claimed = _claim_and_broadcast(run_request, world)
    if claimed is None:
        listener(already_finished_warning(run_request))
        return None
    config = with_run_name(run_request.config, claimed.folder)
    return Job(config, run_plan, claimed.folder, not claimed.is_new, None)


def _claim_and_broadcast(run_request: RunRequest, world: _World) -> ClaimedRun | None:
    """Claim the run's folder, and tell the other ranks which it is or that it could not be had. Raises UsageError."""
    run, before = run_request.config.run, find_run_of_agents(run_request.runs_dir, list(world.agents))
    if before is not None and run.name in (None, before.name):
        # torchrun restarted the ranks: they must continue their run, not claim another one.
        run = run.model_copy(update={"resume": True, "name": before.name})
        run_request = replace(run_request, config=run_request.config.model_copy(update={"run": run}))
    message: dict[str, object] = {"refused": True}
    try:
        claimed = claim_if_unfinished(replace(run_request, agents=world.agents))
        message = {"folder": str(claimed.folder.path), "resumed": not claimed.is_new} if claimed else {}
        return claimed
    finally:
        world.store.set("claim", json.dumps(message))
        if "folder" not in message and world.rank_info.world_size > 1:
            # The store may be in this process, which is about to end.
            heard = [f"heard/{rank}" for rank in range(1, world.rank_info.world_size)]
            world.store.wait(heard, timedelta(seconds=ACK_TIMEOUT_SECONDS))


def _receive_job(run_request: RunRequest, run_plan: NodePlan, world: _World) -> Job | None:
    """The job in the folder that rank 0 claims; None where the run has nothing left to do. Raises UsageError."""
    message = json.loads(wait_for_key(world.store, "claim", world.stop_flag))
    world.store.set(f"heard/{world.rank}", "yes")
    if message.get("refused"):
        raise UsageError.one("", "rank 0 could not take the run's folder")
    if not message:
        return None
    folder = RunFolder(Path(message["folder"]))
    return Job(with_run_name(run_request.config, folder), run_plan, folder, bool(message["resumed"]), None)


def _resolve_batch_size(job: Job, world: _World, allocation: GpuAllocation, listener: Listener) -> Config:
    """The config with a number for `data.batch_size: auto`, which rank 0 finds on its own device for all ranks. Raises
    UsageError, on every rank alike."""
    if job.config.data.batch_size != "auto":
        return job.config
    if world.rank > 0:
        received = json.loads(wait_for_key(world.store, "batch", world.stop_flag))
        if "images" not in received:
            raise UsageError.one(*received["problem"])
        return with_batch_size(job.config, received["images"])

    def on_tick() -> None:
        allocation.reservation.touch()
        if world.stop_flag.is_set:
            raise KeyboardInterrupt

    message: dict[str, object] = {"problem": ["", "rank 0 found no batch size"]}
    try:
        images = previous_batch_size(job.folder) if job.folder and job.resumed else None
        if images is None:
            found = find_batch_size(
                job.config, job.plan, world.rank_info.world_size, open_source_for_preflight(job.config), on_tick
            )
            listener(BatchSizeFound(message=found.describe(job.config)))
            images = found.batch_size
        message = {"images": images}
        return with_batch_size(job.config, images)
    finally:
        world.store.set("batch", json.dumps(message))


def _train(job: Job, world: _World, resources: _Resources, listener: Listener) -> int:
    """Train to the end, with the records of the run on rank 0, and return the exit code. Raises UsageError."""
    from engine.training.train import train

    rank_info, stop_flag, claimed = world.rank_info, world.stop_flag, resources.claimed
    device = job.plan.devices[job.plan.device_index(rank_info.local_rank)]
    recorder = open_recorder(claimed.folder, job.config, listener) if claimed else None
    requests, heartbeats = RequestCounters(), Heartbeats(1)
    watches_gpus = rank_info.local_rank == 0 and job.folder is not None
    usage = GpuUsagePoller([gpu.uuid for gpu in resources.allocation.devices] if watches_gpus else [])
    watchdog = _watchdog_thread(Watchdog(heartbeats, job.config.run.watchdog), world.rank, device, recorder)
    if recorder is not None and claimed is not None:
        nodes = MultiNodeGpuUsage(usage, world.store, resources.allocation.reservation)
        record = _monitoring_listener(recorder, claimed, nodes, requests)
    else:
        record = listener if world.rank == 0 else _stderr_listener(world.rank)

    def on_poll() -> None:
        # Not earlier, because loader processes are forked before.
        if not watchdog.is_alive():
            watchdog.start()
        if recorder is None:
            publish_gpu_usage(usage, world.store, rank_info)

    channel = DirectChannel(record, stop_flag, requests, HeartbeatWriter(heartbeats, 0), on_poll)
    try:
        outcome = train(job, rank_info, world.store, channel)
        if recorder is None:
            return ExitCode.STOPPED if outcome == "stopped" else ExitCode.FINISHED
        if outcome == "stopped" and not recorder.history.stopping:
            # By a signal, to this rank or to another.
            recorder.record(ControlEvent(request="stop", by=stop_flag.signal_name or "a signal", outcome="done"))
        requeues = job.config.run.requeue and stop_flag.time_limit_near
        return end_run(RunResult(outcome), recorder, listener, should_requeue=requeues)
    except UsageError:
        raise
    except Exception as error:
        failure = rank_failure(world.rank, device, error, job.config)
        if recorder is not None:
            return record_result(RunResult("failed", failure), recorder)
        print(f"{describe_failure(failure)}\n{failure.traceback}", file=sys.stderr)
        return ExitCode.FAILED
    finally:
        if recorder is not None:
            recorder.close()
        usage.close()


def _stderr_listener(rank: int) -> Listener:
    """What a rank that records nothing has to say goes to the launcher's log."""

    def tell(event: Event) -> None:
        if (line := event_line(event)) is not None:
            print(f"rank {rank}: {line}", file=sys.stderr)

    return tell


def _watchdog_thread(watchdog: Watchdog, rank: int, device: str, recorder: Recorder | None) -> threading.Thread:
    """A thread that ends this process when it makes no step for too long: each rank says where it stands, and the
    launcher starts them anew."""

    def watch() -> None:
        while (heartbeats := watchdog.expired()) is None:
            time.sleep(POLL_SECONDS)
        cause = f"no step was made for {watchdog.timeout_s:g} s (run.watchdog): {describe_progress(heartbeats[0])}"
        failure = RankFailed(rank=rank, device=device, cause=cause)
        print(describe_failure(failure), file=sys.stderr)
        faulthandler.dump_traceback()
        if recorder is not None:
            # What stands still may be the disk that this goes to.
            threading.Timer(RECORD_TIMEOUT_SECONDS, os._exit, [ExitCode.FAILED]).start()
            record_result(RunResult("failed", failure), recorder)
        os._exit(ExitCode.FAILED)

    return threading.Thread(target=watch, name="watchdog", daemon=True)


def _monitoring_listener(
    recorder: Recorder, claimed: ClaimedRun, nodes: MultiNodeGpuUsage, requests: RequestCounters
) -> Listener:
    """A listener that starts, with its first event, a thread that renews the heartbeat, looks at the GPUs and takes
    requests: not earlier, because loader processes are forked before."""

    def watch() -> None:
        while not recorder.closed.wait(POLL_SECONDS):
            claimed.ownership.renew_heartbeat()
            for event in nodes.poll():
                recorder.record(event)
            for request in consume_requests(claimed.folder.control):
                outcome = requests.apply(request.request)
                recorder.record(ControlEvent(request=request.request, by=request.by, outcome=outcome))

    thread = threading.Thread(target=watch, name="control", daemon=True)

    def record_and_watch(event: Event) -> None:
        if isinstance(event, RunStarted):
            claimed.is_new = False
            nodes.start(event)
        if not thread.is_alive():
            thread.start()
        recorder.record(event)

    return record_and_watch
