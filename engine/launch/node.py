"""What the ranks that a launcher started on one host share: the first of them chooses the GPUs for all, and tells what
those do."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from engine.distributed.channel import StopFlag
from engine.distributed.rank_env import RankInfo
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.reservation import Reservation
from engine.gpus.selection import CudaDevice
from engine.launch.gpu_usage import GpuUsagePoller, local_gpu_ranks
from engine.launch.handshake import wait_for_key
from engine.launch.lifecycle import RunRequest
from engine.runs.events import GpuEvent, RunStarted
from engine.runs.journal import from_line, to_line
from engine.utils.errors import Problem, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store


def allocate_node_gpus(
    run_request: RunRequest, rank_info: RankInfo, store: Store, stop_flag: StopFlag, on_wait: Callable[[str], None]
) -> GpuAllocation:
    """The GPUs of this host's ranks, in the order of their local ranks; the first of them holds the reservation. Where
    a launcher shows each rank one GPU of its own, every rank takes that. Raises UsageError, on every rank alike."""
    device, run = run_request.config.device, run_request.config.run.name or run_request.default_name
    key = f"gpus/{node_id()}"

    def wait(reason: str) -> None:
        if stop_flag.is_set:
            raise KeyboardInterrupt
        on_wait(reason)

    if rank_info.local_rank > 0:
        message = json.loads(wait_for_key(store, key, stop_flag))
        if message.get("problems"):
            raise UsageError([Problem(where, what) for where, what in message["problems"]])
        if not message["each"]:
            return GpuAllocation([CudaDevice.from_dict(one) for one in message["devices"]])
        # The GPU that this rank is shown may be that of the first rank, which holds it for all: no waiting for it.
        return allocate_devices(device.gpus, run, wait=False, on_wait=wait, ranks=1)
    try:
        allocation = allocate_devices(
            device.gpus, run, wait=device.wait, on_wait=wait, ranks=rank_info.local_world_size
        )
    except UsageError as error:
        store.set(key, json.dumps({"problems": [[one.location, one.message] for one in error.problems]}))
        raise
    each = len(allocation.devices) == 1 < rank_info.local_world_size
    store.set(key, json.dumps({"each": each, "devices": [asdict(one) for one in allocation.devices]}))
    return allocation


def node_id() -> str:
    """One for each host of a cluster: containers on several hosts may have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


class MultiNodeGpuUsage:
    """What the GPUs of all nodes of a run do, for the rank that records it."""

    def __init__(self, usage: GpuUsagePoller, store: Store, reservation: Reservation) -> None:
        self._usage, self._store, self._reservation = usage, store, reservation
        self._last_lines: dict[str, str] = {}

    def start(self, started: RunStarted) -> None:
        """Learn which ranks speak for the other nodes: the first of each."""
        self._reservation.publish_ranks(local_gpu_ranks(started))
        first: dict[str, int] = {}
        for one in started.ranks:
            first.setdefault(one.host, one.rank)
        self._last_lines = {f"usage/{rank}": "" for rank in first.values() if rank != 0}
        if self._last_lines:
            # Another thread than the one that trains will ask.
            self._store = self._store.clone()

    def poll(self) -> list[GpuEvent]:
        self._reservation.touch()
        found = [event] if (event := self._usage.poll()) is not None else []
        with suppress(RuntimeError):
            for key, before in self._last_lines.items():
                if self._store.check([key]) and (line := self._store.get(key).decode()) != before:
                    self._last_lines[key] = line
                    event_there = from_line(line)
                    found += [event_there] if isinstance(event_there, GpuEvent) else []
        return found


def publish_gpu_usage(usage: GpuUsagePoller, store: Store, rank_info: RankInfo) -> None:
    """Tell rank 0 what the GPUs of this node do, where something is due."""
    if (event := usage.poll()) is not None:
        with suppress(RuntimeError):
            store.set(f"usage/{rank_info.rank}", to_line(event))
