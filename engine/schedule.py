"""The learning rate as a pure function of the step number, so that no skipped step and no resume can shift it."""

from __future__ import annotations

import math
from bisect import bisect_right

from engine.config import Optim, Schedule


def scaled_lr(optim: Optim, world_size: int) -> float:
    """The highest learning rate of a run: `optim.lr` times the number of ranks or its root, as `optim.lr_scaling` says
    (linear: Goyal et al., Accurate, Large Minibatch SGD, 2017)."""
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[optim.lr_scaling]
    return optim.lr * factor


def lr_factor(schedule: Schedule, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What the highest learning rate is multiplied by at `step`, which counts from 1.

    The warm-up grows linearly and reaches 1 with its last step. After it, cosine is
    `((1 + cos(pi t)) / 2) (1 - r) + r` with t from 0 at the first step to nearly 1 at the last, and r the final ratio.
    step and multistep fall at the ends of epochs, counted from the start of the run.
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    if step <= warmup:
        return step / warmup
    finished_epochs = (step - 1) // steps_per_epoch
    if schedule.name == "step":
        return float(schedule.gamma ** (finished_epochs // schedule.step_size))
    if schedule.name == "multistep":
        return float(schedule.gamma ** bisect_right(schedule.milestones, finished_epochs))
    if schedule.name == "cosine":
        after = max(steps_per_epoch * epochs - warmup, 1)
        passed = min((step - 1 - warmup) / after, 1.0)
        ratio = schedule.final_lr_ratio
        return (1 + math.cos(math.pi * passed)) / 2 * (1 - ratio) + ratio
    return 1.0
