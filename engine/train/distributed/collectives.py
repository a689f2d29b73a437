"""Collectives over all ranks on tensors of the device. A single rank needs none, and its process group has no NCCL.

`engine.train.loop` calls them; tensors in host memory go through the Gloo group of `training.train`. Objects are
gathered as bytes: torch's collectives of objects unpickle, and so may run, what comes over the network.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, async_op: bool = False
) -> dist.Work | None:
    """Reduce a tensor in place over all ranks; return a handle to wait for if `async_op`, unless there is one rank."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return None if is_alone else dist.all_reduce(tensor, op, async_op=async_op)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, in the order of the ranks."""
    if dist.get_world_size() == 1:
        return [tensor]
    tensors = [tensor.new_zeros(tensor.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of rank 0 to all ranks, in place. All tensors of a type are sent in one collective."""
    if dist.get_world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.broadcast(flat, 0)
        with torch.no_grad():
            parts = flat.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)])


def gather(tensor: Tensor, cpu_group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks on rank 0, in the order of the ranks, nothing on other ranks. A collective."""
    is_rank_0 = dist.get_rank(cpu_group) == 0
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(cpu_group))] if is_rank_0 else None
    dist.gather(tensor, tensors, group=cpu_group)
    return tensors or []


def gather_bytes(data: bytes, cpu_group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of all ranks on rank 0, in the order of the ranks, nothing on other ranks. A collective."""
    gathered_sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(cpu_group))]
    dist.all_gather(gathered_sizes, torch.tensor([len(data)]), group=cpu_group)
    sizes = [int(size) for size in gathered_sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    return [tensor.numpy().tobytes()[:size] for tensor, size in zip(gather(padded, cpu_group), sizes, strict=False)]
