"""What the external ranks of one node do together: the first of them allocates the GPUs and samples their usage.

`external` calls it. All of it is exchanged through the store of the rendezvous."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.config.precision import Capability
from engine.distributed.messages import HostProblems, PeerFailedError, send
from engine.distributed.rank_env import RankInfo
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.selection import CudaDevice
from engine.launch.gpu_usage import GpuUsagePoller, waiting_emitter
from engine.launch.handshake import wait_for_message
from engine.launch.request import RunRequest
from engine.queue.place import fixed_terms
from engine.runs.events import GpuEvent, RunStarted
from engine.runs.journal import from_line, to_line
from engine.runs.recorder import Listener
from engine.utils.codec import Count, Record
from engine.utils.errors import Problem, UsageError, raise_if_any
from engine.utils.process import SignalHandler, boot_id

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
    """The preflight of a rank: `stopped` if it received a stop request, `failure` is the cause of an exception.

    `capability` is the lowest compute capability of its GPUs; None on the CPU."""

    stopped: bool = False
    failure: str = ""
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
    rank_info: RankInfo,
    store: Store,
    problems: Sequence[Problem] = (),
    *,
    capability: Capability | None = None,
    stopped: bool = False,
    failure: str = "",
) -> None:
    """Send the result of this rank's preflight to rank 0."""
    host = socket.gethostname()
    result = HostPreflight(host=host, problems=tuple(problems), stopped=stopped, failure=failure, capability=capability)
    send(store, f"preflight/{rank_info.rank}", result)


def collect_preflights(rank_info: RankInfo, store: Store, stop_flag: SignalHandler) -> list[HostPreflight]:
    """Return the preflights of all ranks but rank 0, which calls this.

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
    return results


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
