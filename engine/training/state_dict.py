"""Gather the training state of all ranks for a checkpoint, and restore it.

`checkpoint_writer` saves what `gather_state` returns; `trainer` calls `restore_state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.schema import as_stored
from engine.distributed.collectives import gather_bytes
from engine.models.memory_format import contiguous_state_dict
from engine.models.precision import full_precision_state_dict
from engine.optim.optimizers import restore_optimizer
from engine.training.rank_state import RankState
from engine.training.rng import rng_state, set_rng_state


def gather_state(state: RankState, classes: Sequence[str], cpu_group: dist.ProcessGroup) -> dict[str, Any] | None:
    """Return the content of a checkpoint on rank 0, None on other ranks. A collective.

    `CheckpointWriter` adds the best evaluation and the fingerprints of the data.
    """
    local = {
        "rng": rng_state(state.device),
        "loss": state.train_metrics.loss_sum.cpu(),
        "counts": state.train_metrics.counts.cpu(),
        "untold": state.step_log.unreported(),
    }
    buffer = BytesIO()
    torch.save(local, buffer)
    rank_files = gather_bytes(buffer.getvalue(), cpu_group)
    if dist.get_rank() != 0:
        return None
    if state.ema is not None:
        state.ema.copy_buffers(state.model)
    return {
        "config": as_stored(state.config),
        "classes": list(classes),
        "image_format": asdict(state.image_format),
        "model": contiguous_state_dict(to_cpu(full_precision_state_dict(state.model, state.master))),
        "ema": contiguous_state_dict(to_cpu(state.ema.model.state_dict())) if state.ema is not None else None,
        "optimizer": to_cpu(state.optimizer.state_dict()),
        "scaler": state.scaler.state_dict(),
        "plateau": state.plateau.state_dict(),
        "early_stop": state.early_stop.state_dict(),
        "epoch": state.position.epoch,
        "batch": state.position.step_in_epoch,
        "step": state.position.step,
        "skipped": state.step_log.skipped.total,
        "skipped_in_row": state.step_log.skipped.consecutive,
        "global_batch": state.sampler.global_batch,
        "images": [state.sampler.train_images, state.sampler.val_images],
        "ranks": [torch.load(BytesIO(file), weights_only=True) for file in rank_files],
    }


def to_cpu(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state dict with its tensors on the CPU, so that `torch.load` reads it on a host without a GPU.

    Tensors that are the same memory, such as tied weights, are copied once and stay so.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            copies[key] = value.cpu()
        return copies[key]

    return {key: convert(value) for key, value in state.items()}


def restore_state(state: RankState, checkpoint: dict[str, Any], rank: int) -> list[str]:
    """Restore the training state from a checkpoint, except model and position, which are built from it.

    With another number of ranks, rank 0 takes the metrics of all ranks, and random number generators are seeded again.
    Returns warnings about what differs from an uninterrupted run.
    """
    ranks, warnings = checkpoint["ranks"], []
    restore_optimizer(state.optimizer, checkpoint["optimizer"], state.config.optim)
    if checkpoint["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(checkpoint["scaler"])
    state.plateau.load_state_dict(checkpoint["plateau"])
    state.early_stop.restore(checkpoint)
    if checkpoint["ema"] is not None and state.ema is not None:
        state.ema.model.load_state_dict(checkpoint["ema"])
    same_ranks = len(ranks) == state.sampler.world_size
    if same_ranks:
        local = ranks[rank]
        state.train_metrics.loss_sum += local["loss"].to(state.device)
        state.train_metrics.counts += local["counts"].to(state.device)
        state.step_log.restore_unreported(local["untold"])
        set_rng_state(local["rng"], state.device)
    elif rank == 0:
        state.train_metrics.loss_sum += sum(saved_rank["loss"] for saved_rank in ranks).to(state.device)
        state.train_metrics.counts += sum(saved_rank["counts"] for saved_rank in ranks).to(state.device)
    if (checkpoint["ema"] is None) != (state.ema is None):
        warnings.append(
            "the EMA weights start from the current weights"
            if state.ema is not None
            else "the EMA weights, which the best epoch so far was chosen by, are dropped"
        )
    if state.config.device.parallel == "dp" and state.device.type == "cuda":
        warnings.append("with device.parallel=dp only the random number generator of the first GPU is restored")
    saved, current = (len(ranks), checkpoint["global_batch"]), (state.sampler.world_size, state.sampler.global_batch)
    if saved == current:
        return warnings
    differences = [] if saved[1] == current[1] else ["the images of each batch"]
    differences += [] if same_ranks else ["the model's random numbers", "the step losses not reported yet"]
    warnings.append(
        f"the checkpoint has {saved[0]} ranks and a global batch size of {saved[1]}, this run has {current[0]} and "
        f"{current[1]}: {', '.join(differences)} and the order of summation now differ from an uninterrupted run"
    )
    return warnings
