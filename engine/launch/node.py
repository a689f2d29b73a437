"""What the external ranks of one node do together: the first of them allocates the GPUs and samples their usage.

`external` calls it. All of it is exchanged through the store of the rendezvous."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.distributed.messages import HostProblems, PeerFailedError, merge_problems, receive, send
from engine.distributed.node_plan import NodePlan, lowest_capability
from engine.distributed.rank_env import RankInfo
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.selection import CudaDevice, NotFreeError
from engine.launch.gpu_usage import GpuUsagePoller
from engine.launch.handshake import wait_for_key, wait_for_message
from engine.launch.request import RunRequest
from engine.queue.place import fixed_terms
from engine.runs.events import GpuEvent, RunStarted
from engine.runs.journal import from_line, to_line
from engine.utils.codec import Count, Record
from engine.utils.errors import Problem, UsageError
from engine.utils.process import SignalHandler, boot_id

if TYPE_CHECKING:
    from torch.distributed import Store


class NodeGpus(Record, frozen=True, kw_only=True):
    """The GPUs that the first rank of a host allocated for all of its ranks, or why it could not.

    `not_free` means that waiting may help. If the launcher shows each rank only one GPU, `devices` is that of the first
    rank alone.
    """

    devices: tuple[CudaDevice, ...] = ()
    one_gpu_per_rank: bool = False
    problems: tuple[Problem, ...] = ()
    not_free: bool = False


class GpuCapability(Record, frozen=True, kw_only=True):
    """The lowest compute capability of the GPUs of a rank; None on the CPU, and for GPUs of AMD."""

    capability: tuple[Count, Count] | None


class HostPreflight(HostProblems, frozen=True, kw_only=True):
    """The preflight of a rank. `stopped` if it received a stop request, `failure` is the cause of an exception."""

    stopped: bool
    failure: str


def allocate_node_gpus(
    request: RunRequest,
    rank_info: RankInfo,
    store: Store,
    stop_flag: SignalHandler,
    on_wait: Callable[[str], None],
    *,
    wait: bool,
) -> GpuAllocation:
    """Allocate the GPUs of this host's ranks, in the order of their local ranks.

    The first rank of the host reserves them for all. If the launcher shows each rank only one GPU, every rank uses the
    one that it is shown. Raises UsageError on every rank of the host."""
    gpus, run = request.config.device.gpus, request.config.run.name or request.default_name
    # Containers on several hosts may share a host name.
    key = f"gpus/{socket.gethostname()}/{boot_id()}"

    def check_stop(reason: str) -> None:
        if stop_flag.is_set:
            raise KeyboardInterrupt
        on_wait(reason)

    def poll_terms() -> tuple[QueueTerms, str]:
        return fixed_terms(request.config), ""

    if rank_info.local_rank > 0:
        node_gpus = wait_for_message(store, key, NodeGpus, stop_flag)
        if node_gpus.problems:
            raise (NotFreeError if node_gpus.not_free else UsageError)(node_gpus.problems)
        if not node_gpus.one_gpu_per_rank:
            return GpuAllocation(list(node_gpus.devices))
        # Without waiting: this GPU may be the one that the first rank has reserved for all of them.
        return allocate_devices(gpus, run, wait=False, on_wait=check_stop, ranks=1, poll_terms=poll_terms)
    if rank_info.rank == 0:
        store.set("wait", "yes" if wait else "no")
    elif wait:
        # A run that rank 0 refuses does not wait for the GPUs of other hosts.
        wait = wait_for_key(store, "wait", stop_flag) == "yes"
    try:
        allocation = allocate_devices(
            gpus,
            run,
            wait=wait,
            on_wait=check_stop,
            ranks=rank_info.local_world_size,
            poll_terms=poll_terms,
        )
    except UsageError as error:
        send(store, key, NodeGpus(problems=tuple(error.problems), not_free=isinstance(error, NotFreeError)))
        raise
    one_gpu_per_rank = len(allocation.devices) == 1 < rank_info.local_world_size
    send(store, key, NodeGpus(one_gpu_per_rank=one_gpu_per_rank, devices=tuple(allocation.devices)))
    return allocation


def share_capability(plan: NodePlan | None, rank_info: RankInfo, store: Store) -> None:
    """Publish the compute capability of this rank's GPUs for `with_lowest_capability`."""
    send(store, f"capability/{rank_info.rank}", GpuCapability(capability=plan.capability if plan else None))


def with_lowest_capability(plan: NodePlan, rank_info: RankInfo, store: Store) -> NodePlan:
    """Return the plan with the lowest compute capability of all ranks, once all have published theirs.

    Precision and memory format follow from it, and DDP needs the same on all ranks."""
    ranks = range(rank_info.world_size)
    received = [receive(store, rank, f"capability/{rank}", GpuCapability) for rank in ranks]
    return replace(plan, capability=lowest_capability([message.capability for message in received]))


def share_problems(
    problems: Sequence[Problem], rank_info: RankInfo, store: Store, *, stopped: bool, failure: str = ""
) -> None:
    """Send the problems of this rank's preflight to rank 0; `stopped` if it received a stop request.

    `failure` is the cause if the preflight raised an exception."""
    host = socket.gethostname()
    result = HostPreflight(host=host, problems=tuple(problems), stopped=stopped, failure=failure)
    send(store, f"preflight/{rank_info.rank}", result)


def collect_rank_problems(
    own_problems: Sequence[Problem], rank_info: RankInfo, store: Store, stop_flag: SignalHandler
) -> list[Problem]:
    """Return the distinct problems of all ranks. A problem found only on another host names that host.

    Raises KeyboardInterrupt if one of the ranks received a stop request, and PeerFailedError if one failed."""
    results: list[HostPreflight] = []
    for rank in range(1, rank_info.world_size):
        result = wait_for_message(store, f"preflight/{rank}", HostPreflight, stop_flag, rank)
        if result.stopped:
            raise KeyboardInterrupt
        if result.failure:
            raise PeerFailedError(
                f"rank {rank} failed in the preflight: {result.failure} (on {result.host})", code="rank-failed"
            )
        results.append(result)
    return merge_problems(own_problems, results)


class MultiNodeGpuUsage:
    """The GPU usage of all nodes of a run, for rank 0, which records it."""

    def __init__(self, usage: GpuUsagePoller, store: Store) -> None:
        self._usage, self._store = usage, store
        self._last_lines: dict[str, str] = {}

    def start(self, started: RunStarted) -> None:
        """Start to read the usage of the other nodes, which the first rank of each publishes."""
        first_ranks: dict[str, int] = {}
        for rank in started.ranks:
            first_ranks.setdefault(rank.host, rank.rank)
        self._last_lines = {f"usage/{rank}": "" for rank in first_ranks.values() if rank != 0}
        if self._last_lines:
            # `poll` runs in its own thread. One client sends one request at a time: a blocking `get` of the training
            # would delay this thread.
            self._store = self._store.clone()

    def poll(self) -> list[GpuEvent]:
        """Return the events that have arrived since the last call."""
        events = [event] if (event := self._usage.poll()) is not None else []
        with suppress(RuntimeError):
            for key, last_line in self._last_lines.items():
                if self._store.check([key]) and (line := self._store.get(key).decode()) != last_line:
                    self._last_lines[key] = line
                    remote_event = from_line(line)
                    events += [remote_event] if isinstance(remote_event, GpuEvent) else []
        return events


def publish_gpu_usage(usage: GpuUsagePoller, store: Store, rank_info: RankInfo) -> None:
    """Publish the GPU usage of this node for rank 0, if a sample is due."""
    if (event := usage.poll()) is not None:
        with suppress(RuntimeError):
            store.set(f"usage/{rank_info.rank}", to_line(event))
