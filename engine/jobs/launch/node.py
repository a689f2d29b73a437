"""What the external ranks of a run exchange while it starts, runs and fails, through the store of their rendezvous.

`external` calls it. The first rank of a host allocates the GPUs of its ranks.

Rank 0 writes the journal, so the ranks share their failures with it. The watchdog of a rank ends its process, so that
the launcher can restart the run. Each process sees only its own heartbeat. Before they end, the ranks compare theirs. A
rank that publishes none holds up the others: its process is stopped, blocked or gone. Otherwise the one that lags holds
them up. A rank that fails otherwise publishes its failure, because rank 0 sees only that the connection is lost."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.base.codec import Count, Record
from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.exit_codes import ExitCode
from engine.base.process import SignalHandler, boot_id
from engine.config.precision import Capability
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.selection import CudaDevice
from engine.jobs.launch.gpu_usage import waiting_emitter
from engine.jobs.launch.handshake import wait_for_message
from engine.jobs.launch.ranks import record_result
from engine.jobs.launch.request import RunRequest
from engine.jobs.queue.place import fixed_terms
from engine.runs.events import RankFailed
from engine.runs.journal import from_line, to_line
from engine.runs.recorder import Listener, Recorder
from engine.train.distributed.failures import describe_failure, root_cause
from engine.train.distributed.messages import HostProblems, decode_message, send
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import (
    Heartbeat,
    Watchdog,
    describe_progress,
    describe_stall,
    lagging_ranks,
)
from engine.train.loop.job import RunResult

if TYPE_CHECKING:
    from torch.distributed import Store


class NodeGpus(Record, frozen=True, kw_only=True):
    """The GPUs that the first rank of a host allocated for all of its ranks, or why it could not.

    If the launcher shows each rank only one GPU, `devices` is that of the first rank alone.
    """

    devices: tuple[CudaDevice, ...] = ()
    one_gpu_per_rank: bool = False
    problems: tuple[Problem, ...] = ()


class HostPreflight(HostProblems, frozen=True, kw_only=True):
    """The preflight of a rank. `capability` is the lowest compute capability of its GPUs; None on the CPU."""

    capability: tuple[Count, Count] | None = None


def allocate_node_gpus(
    request: RunRequest, rank_info: RankInfo, store: Store, stop_flag: SignalHandler, listener: Listener
) -> GpuAllocation:
    """Allocate the GPUs of this host's ranks, in the order of their local ranks.

    The first rank of the host reserves them for all. If the launcher shows each rank only one GPU, every rank uses the
    one that it is shown. `listener` receives why it waits for runs that are about to reserve theirs. Raises UsageError
    on every rank of the host."""
    config, emit_wait = request.config, waiting_emitter(listener)
    # Containers on several hosts may share a host name.
    key = f"gpus/{socket.gethostname()}/{boot_id()}"

    def on_wait(reason: str) -> None:
        if stop_flag.is_set:
            raise KeyboardInterrupt
        emit_wait(reason)

    def allocate(ranks: int) -> GpuAllocation:
        return allocate_devices(
            config.device.gpus,
            config.run.name or request.default_name,
            wait=False,
            on_wait=on_wait,
            ranks=ranks,
            poll_terms=lambda: (fixed_terms(config), ""),
        )

    if rank_info.local_rank > 0:
        node_gpus = wait_for_message(store, key, NodeGpus, stop_flag)
        raise_if_any(node_gpus.problems)
        # A GPU that only this rank is shown may be the one that the first rank has reserved for all of them.
        return allocate(1) if node_gpus.one_gpu_per_rank else GpuAllocation(list(node_gpus.devices))
    try:
        allocation = allocate(rank_info.local_world_size)
    except UsageError as error:
        send(store, key, NodeGpus(problems=tuple(error.problems)))
        raise
    one_gpu_per_rank = len(allocation.devices) == 1 < rank_info.local_world_size
    send(store, key, NodeGpus(one_gpu_per_rank=one_gpu_per_rank, devices=tuple(allocation.devices)))
    return allocation


def share_preflight(
    rank_info: RankInfo, store: Store, problems: Sequence[Problem], capability: Capability | None = None
) -> None:
    """Send the result of this rank's preflight to rank 0."""
    result = HostPreflight(host=socket.gethostname(), problems=tuple(problems), capability=capability)
    # Rank 0 hosts the store: if the store is gone, rank 0 has exited.
    with suppress(RuntimeError):
        send(store, f"preflight/{rank_info.rank}", result)


def collect_preflights(rank_info: RankInfo, store: Store, stop_flag: SignalHandler) -> list[HostPreflight]:
    """Return the preflights of all ranks but rank 0, which calls this. Raises as `wait_for_message` does."""
    return [
        wait_for_message(store, f"preflight/{rank}", HostPreflight, stop_flag, rank)
        for rank in range(1, rank_info.world_size)
    ]


POLL_SECONDS = 0.5
STORE_POLL_SECONDS = 0.05
# One failure ends all ranks, but not at the same moment: their last heartbeats differ by the time of a step.
COMPARE_SECONDS = 5.0
RECORD_TIMEOUT_SECONDS = 5.0


def watchdog_thread(
    watchdog: Watchdog, rank_info: RankInfo, device: str, store: Store, recorder: Recorder | None
) -> threading.Thread:
    """Return a thread that ends this process if it enters no new phase for too long. Rank 0 has the `recorder`."""

    def watch() -> None:
        while (heartbeats := watchdog.expired()) is None:
            time.sleep(POLL_SECONDS)
        # What hangs may be stderr or the disk of the journal.
        limit_s = COMPARE_SECONDS + RECORD_TIMEOUT_SECONDS
        threading.Timer(limit_s, os._exit, [ExitCode.FAILED]).start()
        faulthandler.dump_traceback()
        failure = stall_failure(share_stall(device, heartbeats[0], rank_info, store), rank_info, watchdog.timeout_s)
        print(describe_failure(failure), file=sys.stderr)
        if recorder is not None:
            record_result(RunResult("failed", failure), recorder)
        os._exit(ExitCode.FAILED)

    with suppress(RuntimeError):
        # The others need it if this process cannot respond when the run stalls.
        store.set(f"device/{rank_info.rank}", device)
    return threading.Thread(target=watch, name="watchdog", daemon=True)


@dataclass
class Stall:
    """The ranks of a run without progress: UUID of the GPU or "cpu" of each, and the last heartbeats of those whose
    watchdogs have sent them."""

    devices: dict[int, str]
    heartbeats: dict[int, Heartbeat]


def share_stall(device: str, heartbeat: Heartbeat, rank_info: RankInfo, store: Store) -> Stall:
    """Publish the last heartbeat of this rank, and return what all ranks have published within `COMPARE_SECONDS`.

    Returns only this rank if the store does not respond."""
    stall = Stall({rank_info.rank: device}, {rank_info.rank: heartbeat})

    def exchange() -> None:
        # A RuntimeError means that the host of the store has exited.
        with suppress(RuntimeError):
            send(store, f"stalled/{rank_info.rank}", heartbeat)
            stall.devices |= {rank: store.get(f"device/{rank}").decode() for rank in range(rank_info.world_size)}
            while missing := stall.devices.keys() - stall.heartbeats.keys():
                for rank in missing:
                    if store.check([key := f"stalled/{rank}"]):
                        stall.heartbeats[rank] = decode_message(store.get(key), key, Heartbeat)
                time.sleep(STORE_POLL_SECONDS)

    # The host of the store may be the process that hangs, and a call of the store can block for `device.timeout`.
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(COMPARE_SECONDS)
    return stall


def stall_failure(stall: Stall, rank_info: RankInfo, timeout_s: float) -> RankFailed:
    """Return the failure of a rank that holds up the others; prefer this rank if it is one of several.

    Ranks that have published no heartbeat hold up the others; if all have published one, the ranks that lag do."""
    heartbeats = dict(stall.heartbeats)
    late = sorted(stall.devices.keys() - heartbeats.keys() or lagging_ranks(heartbeats))
    rank = rank_info.rank if rank_info.rank in late else late[0]
    details = ["this rank did not respond"]
    if rank in heartbeats:
        details = [describe_progress(heartbeats[rank]), "its traceback is on stderr"]
    cause = describe_stall(f"no progress for {timeout_s:g} s (run.watchdog)", late, len(stall.devices), *details)
    return RankFailed(rank=rank, device=stall.devices[rank], cause=cause, code="rank-hung")


def publish_failure(failure: RankFailed, store: Store) -> None:
    """Send the failure of a rank to rank 0."""
    with suppress(RuntimeError):
        store.set(f"failed/{failure.rank}", to_line(failure))


def find_root_cause(failure: RankFailed, world_size: int, store: Store) -> RankFailed:
    """Return the failure that caused the one of rank 0. Waits up to `COMPARE_SECONDS` if another rank caused it."""
    failures = {failure.rank: failure}
    deadline = time.monotonic() + COMPARE_SECONDS
    with suppress(RuntimeError):
        while root_cause(list(failures.values())).lost_peer and time.monotonic() < deadline:
            for rank in range(world_size):
                if rank not in failures and store.check([key := f"failed/{rank}"]):
                    event = from_line(store.get(key))
                    assert isinstance(event, RankFailed)  # noqa: S101 - `publish_failure` sends nothing else
                    failures[rank] = event
            time.sleep(STORE_POLL_SECONDS)
    return root_cause(list(failures.values()))
