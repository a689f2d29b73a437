"""The user's own learning rate schedule (`schedule.name=module:name`): a function like that of torch's LambdaLR.

It gets the epoch, from 0, and returns the factor on the peak learning rate of that epoch. With `schedule.by=step` it
gets the step, from 0, instead. Ranks call `load_user_schedule`. Other processes must not import user code:
`engine.jobs.launch.preflight` calls `check_user_schedule`, which evaluates the function in a helper process.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from engine.base.answers import Answer
from engine.base.codec import Count, Record
from engine.base.errors import UsageError
from engine.base.helper_process import ParentPipe
from engine.config.loader import validate_config
from engine.config.schema import Config
from engine.config.training_sections import by_epoch
from engine.config.user_code import (
    as_number,
    ask_user_code,
    describe_value,
    is_user_code,
    load_user_function,
    user_failures,
)

SCHEDULE_KEY = "schedule.name"
EVALUATION_TIMEOUT_SECONDS = 60.0


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


class ScheduleRequest(Record, frozen=True):
    """Request to the helper process: evaluate the schedule of a config."""

    config: dict[str, Any]
    steps_per_epoch: Count


def check_user_schedule(config: Config, steps_per_epoch: int | None) -> None:
    """Evaluate the user's schedule for a whole run in a helper process.

    `steps_per_epoch` is None if it is unknown; a schedule by step is then not evaluated, as is a schedule that
    is no user code. Raises UsageError as `load_user_schedule`.
    """
    if not is_user_code(config.schedule.name) or (steps_per_epoch is None and not by_epoch(config.schedule)):
        return
    ask_user_code(
        "engine.train.optim.user_schedule",
        ScheduleRequest(config.model_dump(mode="json"), steps_per_epoch or 1),
        Answer[bool],
        EVALUATION_TIMEOUT_SECONDS,
        key=SCHEDULE_KEY,
        name=config.schedule.name,
        verb="called",
        result="returned all factors",
    )


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process: reply with the problems of the schedule."""
    # Leave no __pycache__ in the user's folder.
    sys.dont_write_bytecode = True
    request = parent.receive(ScheduleRequest)
    parent.send(Answer.of(lambda: bool(load_user_schedule(validate_config(request.config), request.steps_per_epoch))))
