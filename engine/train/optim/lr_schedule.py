"""Learning rate schedules as pure functions of the position in the data: skipped steps and resumes cannot shift them.

`plateau` depends on losses: `PlateauFactor` of `engine.train.loop.model`, whose `Model.lr_at` combines both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator

from engine.base.errors import Problem
from engine.config.training_sections import OptimConfig, ScheduleConfig, by_epoch, warmup_steps


def scaled_lr(optim: OptimConfig, world_size: int) -> float:
    """Return the peak learning rate: `optim.lr` scaled with the world size according to `optim.lr_scaling`."""
    return optim.lr * lr_scaling_factor(optim, world_size)


def lr_scaling_factor(optim: OptimConfig, world_size: int) -> float:
    """Return the factor on `optim.lr`: 1 (none), the world size (linear: Goyal et al., Accurate, Large Minibatch SGD,
    2017) or its square root (sqrt)."""
    return {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[optim.lr_scaling]


def lr_factor(
    schedule: ScheduleConfig,
    step: int,
    steps_per_epoch: int,
    epochs: int,
    user_factor: Callable[[int], float] | None = None,
) -> float:
    """Return the factor on the peak learning rate at `step`, which counts from 1.

    The warmup grows linearly with every step and reaches 1 at its last step. After that, step, multistep and the user's
    own schedule, which is `user_factor`, count from the start of the run. The other schedules span the rest of the run,
    from the end of the warmup or, if they change by epoch, from the end of the epoch in which the warmup ends. For
    plateau this is only the warmup; multiply it by `PlateauFactor.factor`.
    """
    warmup = warmup_steps(schedule, steps_per_epoch)
    if step <= warmup:
        return step / warmup
    done, start, end = step - 1, warmup, steps_per_epoch * epochs
    if by_epoch(schedule):
        done, start, end = done // steps_per_epoch, -(-warmup // steps_per_epoch), epochs
    if user_factor is not None:
        return user_factor(done)
    if schedule.name == "step":
        return schedule.gamma ** (done // schedule.step_size)
    if schedule.name == "multistep":
        return schedule.gamma ** bisect_right(schedule.milestones, done)
    elapsed, length = max(done - start, 0), max(end - start, 1)
    if schedule.name == "exponential":
        return schedule.gamma**elapsed
    if schedule.name == "restarts":
        elapsed, length = _cycle_position(elapsed, schedule.restart_every, schedule.restart_factor)
    return _anneal(schedule, min(elapsed, length), length)


def _cycle_position(elapsed: int, cycle_length: int, cycle_factor: int) -> tuple[int, int]:
    """Return the position within the current cycle, and the length of that cycle."""
    if cycle_factor == 1:
        return elapsed % cycle_length, cycle_length
    while elapsed >= cycle_length:
        elapsed, cycle_length = elapsed - cycle_length, cycle_length * cycle_factor
    return elapsed, cycle_length


def _anneal(schedule: ScheduleConfig, elapsed: int, length: int) -> float:
    """Return the factor of a schedule that anneals from 1 to the final ratio r, with t = elapsed / length.

    cosine and restarts: `((1 + cos(pi t)) / 2) (1 - r) + r` (Loshchilov and Hutter, SGDR, 2017). polynomial:
    `(1 - t)^power (1 - r) + r`. linear: polynomial with power 1. onecycle: see `_one_cycle_factor`. Others: 1.
    """
    if schedule.name == "onecycle":
        return _one_cycle_factor(schedule, elapsed, length)
    if schedule.name in ("cosine", "restarts"):
        remaining = (1 + math.cos(math.pi * elapsed / length)) / 2
    elif schedule.name == "polynomial":
        remaining = (1 - elapsed / length) ** schedule.power
    elif schedule.name == "linear":
        remaining = 1 - elapsed / length
    else:
        return 1.0
    return remaining * (1 - schedule.final_lr_ratio) + schedule.final_lr_ratio


def _one_cycle_factor(schedule: ScheduleConfig, elapsed: int, length: int) -> float:
    """Return the factor of torch's two-phase OneCycleLR: cosine warmup to the peak, then cosine annealing (Smith and
    Topin, Super-Convergence, 2019)."""
    initial = 1 / schedule.start_factor
    final = initial / schedule.end_factor
    peak, end = schedule.peak_at * length - 1, length - 1
    if elapsed < peak:
        return _cosine_anneal(initial, 1.0, elapsed / peak)
    return _cosine_anneal(1.0, final, min((elapsed - peak) / (end - peak), 1.0))


def _cosine_anneal(start: float, end: float, fraction: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))


def schedule_length_problems(schedule: ScheduleConfig, steps_per_epoch: int, epochs: int) -> Iterator[Problem]:
    """Yield the problems of a schedule that depend on the steps per epoch: warmup or milestones beyond the run."""
    steps = steps_per_epoch * epochs
    if schedule.warmup_steps > steps and schedule.name != "onecycle":
        reason = f"must be at most the {steps} steps of this run, not {schedule.warmup_steps}"
        yield Problem("schedule.warmup_steps", reason, code="out-of-range")
    if schedule.name == "multistep" and not by_epoch(schedule) and min(schedule.milestones, default=0) >= steps:
        reason = f"no milestone is reached: this run has {steps} steps; use smaller milestones"
        yield Problem("schedule.milestones", reason, code="conflict")
