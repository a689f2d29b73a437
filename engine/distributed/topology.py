"""Where the ranks of a run are, and that no two of them have one GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch.distributed as dist

from engine.distributed.node_plan import Plan
from engine.distributed.rank_env import Seat
from engine.runs.records import RankDevice
from engine.utils.errors import UsageError


def gather_places(plan: Plan, seat: Seat, hosts: dist.ProcessGroup) -> list[RankDevice]:
    """Where all ranks are, once for each device of each. A collective."""
    host, pid = socket.gethostname(), os.getpid()
    devices = [plan.devices[place] for place in plan.places(seat.local_rank)]
    mine = [RankDevice(rank=seat.rank, host=host, pid=pid, device=device) for device in devices]
    ranks = [mine] * seat.world_size
    dist.all_gather_object(ranks, mine, group=hosts)
    return [place for places in ranks for place in places]


def refuse_shared_devices(ranks: Sequence[RankDevice]) -> None:
    """Raises UsageError where two ranks have one GPU, which NCCL does not serve."""
    first: dict[tuple[str, str], int] = {}
    for one in ranks:
        if one.device != "cpu" and first.setdefault((one.host, one.device), one.rank) != one.rank:
            raise UsageError.one(
                "device.gpus",
                f"ranks {first[one.host, one.device]} and {one.rank} on {one.host} both have {one.device}; start no "
                "more ranks there than there are GPUs",
            )
