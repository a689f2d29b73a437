"""The learning rate as a pure function of the step number, so that no skipped step and no resume can shift it."""

from __future__ import annotations

import math
from bisect import bisect_right

from engine.config.training_sections import OptimConfig, ScheduleConfig, by_epoch, warmup_steps
from engine.utils.errors import Problem


def scaled_lr(optim: OptimConfig, world_size: int) -> float:
    """The highest learning rate of a run: `optim.lr` times the number of ranks or its root, as `optim.lr_scaling` says
    (linear: Goyal et al., Accurate, Large Minibatch SGD, 2017)."""
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[optim.lr_scaling]
    return optim.lr * factor


def lr_factor(schedule: ScheduleConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What the highest learning rate is multiplied by at `step`, which counts from 1.

    The warm-up grows linearly, at every step, and reaches 1 with its last. After it step and multistep count from the
    start of the run, the others from the end of the warm-up, or of the epoch that it ends in, up to the end of the
    run. For plateau it is the warm-up alone, to be multiplied by `engine.optim.plateau.PlateauFactor.factor`.
    """
    warmup = warmup_steps(schedule, steps_per_epoch)
    if step <= warmup:
        return step / warmup
    done, start, end = step - 1, warmup, steps_per_epoch * epochs
    if by_epoch(schedule):
        done, start, end = done // steps_per_epoch, -(-warmup // steps_per_epoch), epochs
    if schedule.name == "step":
        return schedule.gamma ** (done // schedule.step_size)
    if schedule.name == "multistep":
        return schedule.gamma ** bisect_right(schedule.milestones, done)
    passed, length = max(done - start, 0), max(end - start, 1)
    if schedule.name == "exponential":
        return schedule.gamma**passed
    if schedule.name == "restarts":
        passed, length = _cycle_position(passed, schedule.restart_every, schedule.restart_factor)
    return _anneal(schedule, min(passed, length), length)


def _cycle_position(elapsed: int, cycle_length: int, cycle_factor: int) -> tuple[int, int]:
    """How much of its cycle has passed, and how long that is."""
    if cycle_factor == 1:
        return elapsed % cycle_length, cycle_length
    while elapsed >= cycle_length:
        elapsed, cycle_length = elapsed - cycle_length, cycle_length * cycle_factor
    return elapsed, cycle_length


def _anneal(schedule: ScheduleConfig, elapsed: int, length: int) -> float:
    """From 1 towards r, the final ratio, with t = passed / length from 0 to nearly 1: cosine is
    `((1 + cos(pi t)) / 2) (1 - r) + r` (Loshchilov and Hutter, SGDR, 2017), polynomial `(1 - t)^power (1 - r) + r`, and
    linear that with the power 1."""
    if schedule.name == "onecycle":
        return _one_cycle_factor(schedule, elapsed, length)
    if schedule.name in ("cosine", "restarts"):
        left = (1 + math.cos(math.pi * elapsed / length)) / 2
    elif schedule.name == "polynomial":
        left = (1 - elapsed / length) ** schedule.power
    elif schedule.name == "linear":
        left = 1 - elapsed / length
    else:
        return 1.0
    return left * (1 - schedule.final_lr_ratio) + schedule.final_lr_ratio


def _one_cycle_factor(schedule: ScheduleConfig, elapsed: int, length: int) -> float:
    """Up along half a cosine, and down along another, as torch's OneCycleLR in two phases (Smith and Topin,
    Super-Convergence, 2019)."""
    first = 1 / schedule.start_factor
    last = first / schedule.end_factor
    peak, end = schedule.peak_at * length - 1, length - 1
    if elapsed < peak:
        return _cosine_anneal(first, 1.0, elapsed / peak)
    return _cosine_anneal(1.0, last, min((elapsed - peak) / (end - peak), 1.0))


def _cosine_anneal(start: float, end: float, fraction: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))


def schedule_length_problems(schedule: ScheduleConfig, steps_per_epoch: int, epochs: int) -> list[Problem]:
    """What of a schedule lies behind the end of the run, where that takes the number of steps to know."""
    steps = steps_per_epoch * epochs
    problems = []
    if schedule.warmup_steps > steps:
        problems.append(
            Problem(
                "schedule.warmup_steps", f"must be at most the {steps} steps of this run, not {schedule.warmup_steps}"
            )
        )
    if schedule.name == "multistep" and not by_epoch(schedule) and min(schedule.milestones, default=0) >= steps:
        problems.append(
            Problem("schedule.milestones", f"none of them is reached: this run has {steps} steps; give smaller ones")
        )
    return problems
