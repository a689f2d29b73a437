"""Gather the host, process and devices of all ranks, and check that no two ranks share a GPU.

`engine.training` calls it during the setup of the ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict

import torch.distributed as dist

from engine.distributed.collectives import all_gather_json
from engine.distributed.node_plan import NodePlan
from engine.distributed.rank_env import RankInfo
from engine.runs.records import RankDevice
from engine.utils.errors import UsageError


def gather_rank_devices(plan: NodePlan, rank_info: RankInfo, cpu_group: dist.ProcessGroup) -> list[RankDevice]:
    """Return one record for each device of each rank, ordered by rank. A collective on `cpu_group`."""
    host, pid = socket.gethostname(), os.getpid()
    records = [
        RankDevice(rank_info.rank, host, pid, plan.devices[index], *(plan.gpus[index] if plan.gpus else ()))
        for index in plan.device_indices(rank_info.local_rank)
    ]
    ranks = all_gather_json([asdict(record) for record in records], cpu_group)
    return [record for objects in ranks for record in RankDevice.from_objects(objects)]


def check_devices_unique(rank_devices: Sequence[RankDevice]) -> None:
    """Check that no two ranks use the same GPU, which NCCL does not support. Raises UsageError if they do."""
    first_rank: dict[tuple[str, str], int] = {}
    for record in rank_devices:
        first = first_rank.setdefault((record.host, record.device), record.rank)
        if record.device != "cpu" and first != record.rank:
            raise UsageError.one(
                "device.gpus",
                f"ranks {first} and {record.rank} on {record.host} both use {record.device}; "
                "start at most one rank per GPU",
            )
