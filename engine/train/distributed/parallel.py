"""Wrap a model for data-parallel training: DistributedDataParallel, or DataParallel in one process."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from engine.base.errors import UsageError
from engine.config.run_sections import DeviceConfig
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.optim.lazy_dynamo import dynamo_stub


def wrap_model(
    model: nn.Module, config: DeviceConfig, device: torch.device, devices_per_rank: int, world_size: int
) -> nn.Module:
    """Return the module to call in a training step: DDP, DataParallel, or the model itself for a single rank.

    DDP does not broadcast buffers in every forward pass; `broadcast_buffers` does before evaluation and checkpoints.
    """
    if config.parallel == "dp":
        return DataParallel(model, device_ids=list(range(devices_per_rank)))
    if world_size == 1:
        return model
    # In dimensions of size 1, strides may differ: the elements are in the same order, so nothing is slower or changes.
    # AccumulateGrad gives every gradient the other strides of its parameter (grad_layout_contract.h).
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    parameters = inspect.signature(DistributedDataParallel).parameters
    sync_option = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    options: dict[str, Any] = {sync_option: False}
    with dynamo_stub():
        parallel_model = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.bucket_view,
            static_graph=config.static_graph,
            **options,
        )
        if config.compress == "bf16":
            if torch.version.cuda is None and torch.version.hip is None:
                reason = f"torch {torch.__version__} is built without CUDA, and its DDP cannot send bf16 gradients"
                raise UsageError.one("device.compress", reason, "use off", code="not-supported")
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            parallel_model.register_comm_hook(None, bf16_compress_hook)
        return parallel_model


def batch_device(config: DeviceConfig, device: torch.device) -> torch.device:
    """Return the device of the batches of a rank: its own, or the CPU for DataParallel.

    DataParallel scatters a batch, so no GPU needs the memory for all of it.
    """
    return torch.device("cpu") if config.parallel == "dp" else device


def evaluation_model(model: nn.Module, parallel_model: nn.Module) -> nn.Module:
    """Return the module to evaluate a model with: its replicas on all GPUs of DataParallel, else the model itself."""
    if isinstance(parallel_model, DataParallel):
        return DataParallel(model, device_ids=parallel_model.device_ids)
    return model


def warmup_batch_size(sampler: DistributedBatchSampler) -> int:
    """Return the batch size that shows whether a model can train on the smallest batch of a rank.

    Two images are enough. DataParallel needs the smallest batch itself, because it splits a batch unevenly.
    """
    return sampler.min_batch_size if sampler.devices_per_rank > 1 else min(sampler.min_batch_size, 2)
