"""Exchange the host, process and devices of all ranks, and check that no two ranks share a GPU.

`process_group` calls it before the ranks connect: NCCL fails on a shared GPU with a less helpful error of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.distributed.node_plan import NodePlan
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import get_from_rank
from engine.runs.records import RankDevice
from engine.utils.codec import decode, encode
from engine.utils.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import Store


def exchange_rank_devices(plan: NodePlan, rank_info: RankInfo, store: Store) -> list[RankDevice]:
    """Return one record for each device of each rank, ordered by rank. A collective on the store."""
    host, pid = socket.gethostname(), os.getpid()
    records = [
        RankDevice(rank_info.rank, host, pid, plan.devices[index], *(plan.gpus[index] if plan.gpus else ()))
        for index in plan.device_indices(rank_info.local_rank)
    ]
    store.set(f"devices/{rank_info.rank}", encode(records).decode())
    ranks = [
        decode(get_from_rank(store, rank, f"devices/{rank}"), list[RankDevice]) for rank in range(rank_info.world_size)
    ]
    return [record for records in ranks for record in records]


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
                code="gpu-in-use",
            )
