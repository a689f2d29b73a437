"""The whole state of a training: gathered from all ranks, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from engine.config.schema import as_dict
from engine.models.memory_format import contiguous_state_dict
from engine.models.precision import full_precision_state_dict
from engine.optim.optimizers import restore_optimizer
from engine.training.rank_state import RankState
from engine.training.rng import rng_state, set_rng_state


def gather_state(state: RankState, classes: Sequence[str], cpu_group: dist.ProcessGroup) -> dict[str, Any] | None:
    """What a checkpoint holds, but for what is known of the evaluations; on rank 0, None elsewhere. A collective."""
    mine = {
        "rng": rng_state(state.device),
        "loss": state.train_metrics.loss_sum.cpu(),
        "counts": state.train_metrics.counts.cpu(),
        "untold": state.step_log.unreported(),
    }
    first = dist.get_rank() == 0
    ranks: list[Any] | None = [None] * state.sampler.world_size if first else None
    dist.gather_object(mine, ranks, group=cpu_group)
    if not first:
        return None
    if state.ema is not None:
        state.ema.copy_buffers(state.model)
    return {
        "config": as_dict(state.config),
        "classes": list(classes),
        "image_format": asdict(state.image_format),
        "model": contiguous_state_dict(full_precision_state_dict(state.model, state.master)),
        "ema": contiguous_state_dict(state.ema.model.state_dict()) if state.ema is not None else None,
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "plateau": state.plateau.state_dict(),
        "epoch": state.position.epoch,
        "batch": state.position.step_in_epoch,
        "step": state.position.step,
        "skipped": state.step_log.skipped.total,
        "skipped_in_row": state.step_log.skipped.consecutive,
        "global_batch": state.sampler.global_batch,
        "images": [state.sampler.train_images, state.sampler.val_images],
        "ranks": ranks,
    }


def restore_state(state: RankState, checkpoint: dict[str, Any], rank: int) -> list[str]:
    """Go on from a checkpoint; the model and the position have been taken from it. With another number of ranks the
    sums are kept, by rank 0, and random numbers are drawn anew. Says what can no longer be equal."""
    ranks, warnings = checkpoint["ranks"], []
    restore_optimizer(state.optimizer, checkpoint["optimizer"])
    if checkpoint["scaler"] and state.scaler.is_enabled():
        state.scaler.load_state_dict(checkpoint["scaler"])
    state.plateau.load_state_dict(checkpoint["plateau"])
    if checkpoint["ema"] is not None and state.ema is not None:
        state.ema.model.load_state_dict(checkpoint["ema"])
    same_ranks = len(ranks) == state.sampler.world_size
    if same_ranks:
        mine = ranks[rank]
        state.train_metrics.loss_sum += mine["loss"].to(state.device)
        state.train_metrics.counts += mine["counts"].to(state.device)
        state.step_log.restore_unreported(mine["untold"])
        set_rng_state(mine["rng"], state.device)
    elif rank == 0:
        state.train_metrics.loss_sum += sum(one["loss"] for one in ranks).to(state.device)
        state.train_metrics.counts += sum(one["counts"] for one in ranks).to(state.device)
    if (checkpoint["ema"] is None) != (state.ema is None):
        began = (
            "begin anew from" if state.ema is not None else "are left, and the best epoch so far was chosen by them for"
        )
        warnings.append(f"model.ema has changed: the averaged weights {began} the weights as they are")
    if state.config.device.parallel == "dp" and state.device.type == "cuda":
        warnings.append("of a run with device.parallel=dp only the random numbers of its first GPU go on")
    before, now = (len(ranks), checkpoint["global_batch"]), (state.sampler.world_size, state.sampler.global_batch)
    images = [state.sampler.train_images, state.sampler.val_images]
    if images != checkpoint["images"]:
        warnings.append(
            "the data has changed: it had {} images for training and {} for validation, and has {} and {} now".format(
                *checkpoint["images"], *images
            )
        )
    if before == now:
        return warnings
    lost = [] if before[1] == now[1] else ["which images make a batch"]
    lost += [] if same_ranks else ["the random numbers that the model draws", "the losses of steps not told yet"]
    warnings.append(
        f"the checkpoint is of {before[0]} ranks and a global batch of {before[1]}, and this run has {now[0]} and "
        f"{now[1]}: {', '.join(lost)} and the order of additions differ from here on from an uninterrupted run's"
    )
    return warnings
