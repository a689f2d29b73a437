"""Gather the training state of all ranks for a checkpoint, and restore it.

`checkpoint_writer` saves what `gather_state` returns; `trainer` calls `restore_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from engine.utils.errors import Problem

LIVE_KEYS = ("model", "ema", "optimizer")
# Identifies the memory of a tensor: tied weights are two tensors in one memory.
Memory = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...]]


def gather_state(state: RankState) -> dict[str, Any] | None:
    """Return the content of a checkpoint on rank 0, None on other ranks. A collective.

    The values of `LIVE_KEYS` are those of `live_state`. `CheckpointWriter` adds the best evaluation and the
    fingerprints of the data.
    """
    local = {
        "rng": rng_state(state.device),
        "loss_sum": state.train_metrics.loss_sum.cpu(),
        "counts": state.train_metrics.counts.cpu(),
        "unreported": state.step_log.unreported(),
    }
    buffer = BytesIO()
    torch.save(local, buffer)
    rank_files = gather_bytes(buffer.getvalue(), state.cpu_group)
    if dist.get_rank() != 0:
        return None
    if state.ema is not None:
        state.ema.copy_buffers(state.model)
    return {
        "config": as_stored(state.config),
        "classes": list(state.pipeline.source.classes),
        "image_format": asdict(state.image_format),
        "tf32": state.uses_tf32,
        **live_state(state),
        "scaler": state.scaler.state_dict(),
        "plateau": state.plateau.state_dict(),
        "early_stop": state.early_stop.state_dict(),
        "epoch": state.position.epoch,
        "step_in_epoch": state.position.step_in_epoch,
        "step": state.position.step,
        "skipped": state.step_log.skipped.total,
        "consecutive_skipped": state.step_log.skipped.consecutive,
        "global_batch": state.sampler.global_batch,
        "images": [state.sampler.train_images, state.sampler.val_images],
        "ranks": [torch.load(BytesIO(file), weights_only=True) for file in rank_files],
    }


def live_state(state: RankState) -> dict[str, Any]:
    """Return the state dicts of `LIVE_KEYS`, whose tensors the next step changes."""
    return {
        "model": full_precision_state_dict(state.model, state.master),
        "ema": state.ema.model.state_dict() if state.ema is not None else None,
        "optimizer": state.optimizer.state_dict(),
    }


def in_host_memory(live: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]:
    """Return the state dicts of `LIVE_KEYS` with all tensors on the CPU, so that `torch.load` reads them on any host.

    Without `copy`, only tensors of a GPU, and weights that are not contiguous, are copied. Tensors that are the same
    memory, such as tied weights, stay so.
    """
    copies: dict[Memory, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.to("cpu", copy=copy)
        return copies[key]

    on_cpu = map_tensors(dict(live), convert)
    weights = {key: on_cpu[key] and contiguous_state_dict(on_cpu[key]) for key in ("model", "ema")}
    return {**on_cpu, **weights}


def map_tensors(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    """Return nested containers as new dicts, lists and tuples, with each tensor converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, convert) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(item, convert) for item in value]
    return tuple(map_tensors(item, convert) for item in value) if type(value) is tuple else value


def restore_state(state: RankState, checkpoint: dict[str, Any], rank: int) -> list[Problem]:
    """Restore the training state from a checkpoint, except model and position, which are built from it.

    With another number of ranks, rank 0 takes the metrics of all ranks, and random number generators are seeded again.
    Returns warnings about what differs from an uninterrupted run.
    """
    ranks, warnings = checkpoint["ranks"], list[Problem]()
    # Copies, because optimizers keep the tensors that they are given, and these are pages of the checkpoint file.
    restore_optimizer(state.optimizer, map_tensors(checkpoint["optimizer"], Tensor.clone), state.config.optim)
    if checkpoint["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(checkpoint["scaler"])
    state.plateau.load_state_dict(checkpoint["plateau"])
    state.early_stop.load_state_dict(checkpoint["early_stop"])
    if checkpoint["ema"] is not None and state.ema is not None:
        state.ema.model.load_state_dict(checkpoint["ema"])
    same_ranks = len(ranks) == state.sampler.world_size
    if same_ranks:
        local = ranks[rank]
        state.train_metrics.loss_sum += local["loss_sum"].to(state.device)
        state.train_metrics.counts += local["counts"].to(state.device)
        state.step_log.restore_unreported(local["unreported"])
        set_rng_state(local["rng"], state.device)
    elif rank == 0:
        state.train_metrics.loss_sum += sum(saved_rank["loss_sum"] for saved_rank in ranks).to(state.device)
        state.train_metrics.counts += sum(saved_rank["counts"] for saved_rank in ranks).to(state.device)
    if (checkpoint["ema"] is None) != (state.ema is None):
        reason = (
            "the EMA weights start from the current weights"
            if state.ema is not None
            else "the EMA weights, which the best epoch so far was chosen by, are dropped"
        )
        warnings.append(Problem("", reason, code="resume-differs"))
    if state.config.device.parallel == "dp" and state.device.type == "cuda":
        reason = "with device.parallel=dp only the random number generator of the first GPU is restored"
        warnings.append(Problem("", reason, code="resume-differs"))
    if checkpoint["tf32"] != state.uses_tf32:
        reason = f"float32 math {'now uses TF32' if state.uses_tf32 else 'does not use TF32 any more'}"
        warnings.append(Problem("", reason, code="resume-differs"))
    saved, current = (len(ranks), checkpoint["global_batch"]), (state.sampler.world_size, state.sampler.global_batch)
    if saved == current:
        return warnings
    differences = [] if saved[1] == current[1] else ["the images of each batch"]
    differences += [] if same_ranks else ["the model's random numbers", "the step losses not reported yet"]
    reason = (
        f"the checkpoint has {saved[0]} ranks and a global batch size of {saved[1]}, this run has {current[0]} and "
        f"{current[1]}: {', '.join(differences)} and the order of summation now differ from an uninterrupted run"
    )
    return [*warnings, Problem("", reason, code="resume-differs")]
