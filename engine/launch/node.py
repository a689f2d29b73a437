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
from engine.distributed.rank_env import Seat
from engine.gpus.allocation import Choice, choose
from engine.gpus.reservation import Reservation
from engine.gpus.selection import Device
from engine.launch.gpu_usage import UsageWatch, ranks_here
from engine.launch.handshake import await_key
from engine.launch.lifecycle import Order
from engine.runs.events import Gpus, RunStarted
from engine.runs.journal import from_line, to_line
from engine.utils.errors import Problem, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store


def choose_on_host(order: Order, seat: Seat, store: Store, flag: StopFlag, waiting: Callable[[str], None]) -> Choice:
    """The GPUs of this host's ranks, in the order of their local ranks; the first of them holds the reservation. Where
    a launcher shows each rank one GPU of its own, every rank takes that. Raises UsageError, on every rank alike."""
    device, run = order.config.device, order.config.run.name or order.stem
    key = f"gpus/{host_name()}"

    def wait(reason: str) -> None:
        if flag.raised:
            raise KeyboardInterrupt
        waiting(reason)

    if seat.local_rank > 0:
        news = json.loads(await_key(store, key, flag))
        if news.get("problems"):
            raise UsageError([Problem(where, what) for where, what in news["problems"]])
        if not news["each"]:
            return Choice([Device.from_dict(one) for one in news["devices"]])
        # The GPU that this rank is shown may be that of the first rank, which holds it for all: no waiting for it.
        return choose(device.gpus, run, wait=False, waiting=wait, ranks=1)
    try:
        choice = choose(device.gpus, run, wait=device.wait, waiting=wait, ranks=seat.local_world_size)
    except UsageError as error:
        store.set(key, json.dumps({"problems": [[one.where, one.what] for one in error.problems]}))
        raise
    each = len(choice.devices) == 1 < seat.local_world_size
    store.set(key, json.dumps({"each": each, "devices": [asdict(one) for one in choice.devices]}))
    return choice


def host_name() -> str:
    """One for each host of a cluster: containers on several hosts may have one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


class NodesUsage:
    """What the GPUs of all nodes of a run do, for the rank that records it."""

    def __init__(self, usage: UsageWatch, store: Store, reservation: Reservation) -> None:
        self._usage, self._store, self._reservation = usage, store, reservation
        self._others: dict[str, str] = {}

    def begin(self, started: RunStarted) -> None:
        """Learn which ranks speak for the other nodes: the first of each."""
        self._reservation.show_ranks(ranks_here(started))
        first: dict[str, int] = {}
        for one in started.ranks:
            first.setdefault(one.host, one.rank)
        self._others = {f"usage/{rank}": "" for rank in first.values() if rank != 0}
        if self._others:
            # Another thread than the one that trains will ask.
            self._store = self._store.clone()

    def look(self) -> list[Gpus]:
        self._reservation.touch()
        found = [event] if (event := self._usage.look()) is not None else []
        with suppress(RuntimeError):
            for key, before in self._others.items():
                if self._store.check([key]) and (line := self._store.get(key).decode()) != before:
                    self._others[key] = line
                    event_there = from_line(line)
                    found += [event_there] if isinstance(event_there, Gpus) else []
        return found


def tell_usage(usage: UsageWatch, store: Store, seat: Seat) -> None:
    """Tell rank 0 what the GPUs of this node do, where something is due."""
    if (event := usage.look()) is not None:
        with suppress(RuntimeError):
            store.set(f"usage/{seat.rank}", to_line(event))
