"""The result of `gputrain lr-find`: how the test ended, and what it suggests."""

from __future__ import annotations

from engine.optim.lr_range import LossCurve, LrRange
from engine.runs.event_lines import describe_devices, event_line
from engine.runs.events import ControlEvent, Event, RunStarted
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from engine.utils.units import format_lr


def lr_find_lines(curve: LossCurve, suggestion: float) -> list[str]:
    """Return how a test ended, and its suggestion."""
    return [describe_end(curve), f"optim.lr={format_lr(suggestion)}  two thirds into the range in which the loss falls"]


def describe_end(curve: LossCurve) -> str:
    """Return why the test ended where it did."""
    last = format_lr(curve.learning_rates[-1])
    if curve.diverged:
        return f"the loss diverged at {last}, after {len(curve.losses)} of {curve.lr_range.steps} steps"
    return f"the loss did not diverge up to {last}"


def describe_range_test(started: RunStarted, tested: LrRange) -> str:
    """Return what is tested: devices, batch size and learning rates."""
    return (
        f"{describe_devices(started)}, global batch size {started.global_batch}, up to "
        f"{pluralize(tested.steps, 'step')} with optim.lr from {format_lr(tested.low)} to {format_lr(tested.high)}"
    )


def range_test_line(event: Event, tested: LrRange) -> str | None:
    """Return the line of an event for the terminal; None if it has none."""
    if isinstance(event, RunStarted):
        return describe_range_test(event, tested)
    if isinstance(event, ControlEvent):
        return f"stopped by {printable(event.by)} before the end of the test: no suggestion"
    return event_line(event)


def no_suggestion_problem(curve: LossCurve) -> Problem:
    """Return why a curve suggests nothing, and what to do."""
    tested = curve.lr_range
    advice = "lower --from" if curve.diverged else "raise --to, or check model and data with a short run"
    low, last = format_lr(tested.low), format_lr(curve.learning_rates[-1])
    reason = f"no suggestion: the loss does not fall between {low} and {last}"
    return Problem("", reason, advice, code="no-suggestion")
