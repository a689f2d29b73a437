"""Where the ranks of a run are, and that no two of them have one GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch.distributed as dist

from engine.distributed.node_plan import NodePlan
from engine.distributed.rank_env import RankInfo
from engine.runs.records import RankDevice
from engine.utils.errors import UsageError


def gather_rank_devices(plan: NodePlan, rank_info: RankInfo, cpu_group: dist.ProcessGroup) -> list[RankDevice]:
    """Where all ranks are, once for each device of each. A collective."""
    host, pid = socket.gethostname(), os.getpid()
    devices = [plan.devices[place] for place in plan.device_indices(rank_info.local_rank)]
    mine = [RankDevice(rank=rank_info.rank, host=host, pid=pid, device=device) for device in devices]
    ranks = [mine] * rank_info.world_size
    dist.all_gather_object(ranks, mine, group=cpu_group)
    return [place for places in ranks for place in places]


def check_devices_unique(rank_devices: Sequence[RankDevice]) -> None:
    """Raises UsageError where two ranks have one GPU, which NCCL does not serve."""
    first: dict[tuple[str, str], int] = {}
    for one in rank_devices:
        if one.device != "cpu" and first.setdefault((one.host, one.device), one.rank) != one.rank:
            raise UsageError.one(
                "device.gpus",
                f"ranks {first[one.host, one.device]} and {one.rank} on {one.host} both have {one.device}; start no "
                "more ranks there than there are GPUs",
            )
