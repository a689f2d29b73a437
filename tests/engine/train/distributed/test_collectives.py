"""Collectives over two ranks: the order of gathered values, broadcasts of many tensors, and none that unpickles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.train.distributed.collectives import broadcast_tensors, gather_bytes
from support.gputrain_command import ROOT
from support.runs.two_ranks import run_on_two_ranks

PICKLING_COLLECTIVES = r"\b\w*(gather_object|object_list)\b"


class BroadcastCounter(TorchDispatchMode):
    """Counts the broadcasts of this process."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator is torch.ops.c10d.broadcast_.default
        return operator(*args, **(kwargs or {}))


def gather(rank: int) -> Any:
    """Gather values of different sizes, and return what this rank receives."""
    assert dist.group.WORLD is not None
    return [data.hex() for data in gather_bytes(bytes([rank]) * (3 + 4 * rank), dist.group.WORLD)]


def broadcast_batch_norms(rank: int) -> Any:
    """Broadcast the buffers of two BatchNorm layers and a transposed matrix; return which are equal, and the count."""
    norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(5)])
    norms.register_buffer("table", torch.zeros(2, 3).t())
    values = [(torch.arange(buffer.numel()).view(buffer.shape) / 3).to(buffer.dtype) for buffer in norms.buffers()]
    for buffer, value in zip(norms.buffers(), values, strict=True):
        buffer.copy_(value + rank)
    with BroadcastCounter() as counter:
        broadcast_tensors(norms.buffers())
    equal = [torch.equal(buffer, value) for buffer, value in zip(norms.buffers(), values, strict=True)]
    return [equal, counter.count]


def test_gathers_return_values_of_all_ranks_in_order(tmp_path: Path) -> None:
    assert run_on_two_ranks(tmp_path, gather) == [["000000", "01010101010101"], []]


def test_broadcast_tensors_sends_one_message_per_type(tmp_path: Path) -> None:
    for equal, broadcasts in run_on_two_ranks(tmp_path, broadcast_batch_norms):
        assert equal == [True] * 7, "the values of rank 0, bit for bit"
        assert broadcasts == 2, "float32 and int64"


def test_engine_calls_no_collective_that_unpickles() -> None:
    files = sorted((ROOT / "engine").rglob("*.py"))
    assert [path.name for path in files if re.search(PICKLING_COLLECTIVES, path.read_text())] == []
