"""The whole state of a training: gathered from all ranks, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from engine.config.schema import as_dict
from engine.models.memory_format import plain
from engine.models.precision import full_state
from engine.optim.optimizers import restore_optimizer
from engine.training.rank_state import Trainer
from engine.training.rng import rng_state, set_rng_state


def gather_state(t: Trainer, classes: Sequence[str], hosts: dist.ProcessGroup) -> dict[str, Any] | None:
    """What a checkpoint holds, but for what is known of the evaluations; on rank 0, None elsewhere. A collective."""
    mine = {
        "rng": rng_state(t.device),
        "loss": t.totals.loss.cpu(),
        "counts": t.totals.counts.cpu(),
        "untold": t.log.untold(),
    }
    first = dist.get_rank() == 0
    ranks: list[Any] | None = [None] * t.shares.world_size if first else None
    dist.gather_object(mine, ranks, group=hosts)
    if not first:
        return None
    if t.ema is not None:
        t.ema.take_buffers(t.model)
    return {
        "config": as_dict(t.config),
        "classes": list(classes),
        "image_format": asdict(t.image_format),
        "model": plain(full_state(t.model, t.master)),
        "ema": plain(t.ema.model.state_dict()) if t.ema is not None else None,
        "optimizer": t.optimizer.state_dict(),
        "scaler": t.scaler.state_dict(),
        "plateau": t.plateau.state_dict(),
        "epoch": t.position.epoch,
        "batch": t.position.batch,
        "step": t.position.step,
        "skipped": t.log.skipped.total,
        "skipped_in_row": t.log.skipped.in_row,
        "global_batch": t.shares.global_batch,
        "images": [t.shares.train_images, t.shares.val_images],
        "ranks": ranks,
    }


def restore_state(t: Trainer, saved: dict[str, Any], rank: int) -> list[str]:
    """Go on from a checkpoint; the model and the position have been taken from it. With another number of ranks the
    sums are kept, by rank 0, and random numbers are drawn anew. Says what can no longer be equal."""
    ranks, warnings = saved["ranks"], []
    restore_optimizer(t.optimizer, saved["optimizer"])
    if saved["scaler"] and t.scaler.is_enabled():
        t.scaler.load_state_dict(saved["scaler"])
    t.plateau.load_state_dict(saved["plateau"])
    if saved["ema"] is not None and t.ema is not None:
        t.ema.model.load_state_dict(saved["ema"])
    same_ranks = len(ranks) == t.shares.world_size
    if same_ranks:
        mine = ranks[rank]
        t.totals.loss += mine["loss"].to(t.device)
        t.totals.counts += mine["counts"].to(t.device)
        t.log.take_back(mine["untold"])
        set_rng_state(mine["rng"], t.device)
    elif rank == 0:
        t.totals.loss += sum(one["loss"] for one in ranks).to(t.device)
        t.totals.counts += sum(one["counts"] for one in ranks).to(t.device)
    if (saved["ema"] is None) != (t.ema is None):
        began = "begin anew from" if t.ema is not None else "are left, and the best epoch so far was chosen by them for"
        warnings.append(f"model.ema has changed: the averaged weights {began} the weights as they are")
    if t.config.device.parallel == "dp" and t.device.type == "cuda":
        warnings.append("of a run with device.parallel=dp only the random numbers of its first GPU go on")
    before, now = (len(ranks), saved["global_batch"]), (t.shares.world_size, t.shares.global_batch)
    images = [t.shares.train_images, t.shares.val_images]
    if images != saved["images"]:
        warnings.append(
            "the data has changed: it had {} images for training and {} for validation, and has {} and {} now".format(
                *saved["images"], *images
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
