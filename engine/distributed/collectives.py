"""Collectives over all ranks on tensors of the device. A single rank needs none, and its process group has no NCCL.

`engine.training` calls them; tensors in host memory go through the Gloo group of `training.train`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
) -> dist.Work | None:
    """Reduce a tensor in place over all ranks; return a handle to wait for if `async_op`, unless there is one rank."""
    return None if dist.get_world_size() == 1 else dist.all_reduce(tensor, op, async_op=async_op)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, in the order of the ranks."""
    if dist.get_world_size() == 1:
        return [tensor]
    tensors = [tensor.new_zeros(tensor.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def broadcast(tensor: Tensor) -> None:
    """Copy the tensor of rank 0 to all ranks, in place."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, 0)
