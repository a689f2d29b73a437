"""The user's own learning rate schedule (`schedule.name=module:name`): a function like that of torch's LambdaLR.

It gets the epoch, from 0, and returns the factor on the peak learning rate of that epoch. With `schedule.by=step` it
gets the step, from 0, instead. Ranks call `load_user_schedule`. Other processes must not import user code.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from engine.base.errors import UsageError
from engine.config.schema import Config
from engine.config.training_sections import by_epoch
from engine.config.user_code import as_number, describe_value, load_user_function, user_failures

SCHEDULE_KEY = "schedule.name"


def load_user_schedule(config: Config, steps_per_epoch: int) -> Sequence[float]:
    """Return the factor at each position (epoch, or step with `schedule.by=step`) of a run.

    The function is called for all positions in order, so every rank and every resumed session gets the same factors.
    Raises UsageError if it fails or returns another value than a number of at least 0.
    """
    count = config.run.epochs * (1 if by_epoch(config.schedule) else steps_per_epoch)
    name = config.schedule.name
    function = load_user_function(SCHEDULE_KEY, name, config.run)
    return array("d", (_factor(config, function, position) for position in range(count)))


def _factor(config: Config, function: Callable[[int], Any], position: int) -> float:
    """Call the user's function. Raises UsageError."""
    name, unit = config.schedule.name, "epoch" if by_epoch(config.schedule) else "step"
    with user_failures(SCHEDULE_KEY, f"{name} fails with {unit} {position}", config.run.code, config.run.code_packages):
        value = function(position)
    factor = as_number(value)
    if factor is None or not (math.isfinite(factor) and factor >= 0):
        shown = describe_value(value) if factor is None else f"{factor:g}"
        reason = f"{name} returns {shown} for {unit} {position} instead of a factor of at least 0"
        raise UsageError.one(SCHEDULE_KEY, reason, code="invalid-value")
    return factor
