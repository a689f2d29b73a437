"""How a model is spread over GPUs: a process for each (DistributedDataParallel), or threads of one (DataParallel)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from engine.config.run_sections import DeviceConfig
from engine.data.sampler import DistributedBatchSampler
from engine.optim.lazy_dynamo import dynamo_stub


def wrap_model(
    model: nn.Module, config: DeviceConfig, device: torch.device, devices_per_rank: int, world_size: int
) -> nn.Module:
    """The module that a step is trained through: for one rank the model itself, whose gradients nobody waits for. DDP
    goes without the buffers' round in every forward: they are shared where they are needed, see `broadcast_buffers`."""
    if config.parallel == "dp":
        return DataParallel(model, device_ids=list(range(devices_per_rank)))
    if world_size == 1:
        return model
    known = inspect.signature(DistributedDataParallel).parameters
    off = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {off: False}
    with dynamo_stub():
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=config.bucket_view,
            static_graph=config.static_graph,
            **options,
        )


def warmup_batch_size(sampler: DistributedBatchSampler) -> int:
    """Images by which to see whether a model can train on the smallest batch of a rank: no more than two a device say
    it, but for DataParallel, which deals a batch out unevenly."""
    return sampler.min_batch_size if sampler.devices_per_rank > 1 else min(sampler.min_batch_size, 2)
