"""Events in words: one line for a log or a plain terminal."""

from __future__ import annotations

import math

from engine.runs.bottleneck import MAX_DATA_WAIT_SHARE, describe_efficiency
from engine.runs.control import REFUSAL_OUTCOMES
from engine.runs.events import (
    BatchSizeFound,
    CheckpointSaved,
    ControlEvent,
    EpochEvent,
    Event,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    RunStarting,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.history import History
from engine.utils.text import pluralize, printable


def event_line(event: Event) -> str | None:
    """None for events that come too often, or say too little, for a line of their own. What comes from outside, such as
    the name of a file, can do nothing to a terminal."""
    line = _format_event(event)
    return None if line is None else printable(line)


def event_lines(event: Event, history: History) -> list[str]:
    """The lines of an event that `history` has taken in: before its last what limited the run."""
    limit = bottleneck_line(history) if isinstance(event, RunFinished) else None
    return [line for line in (limit, event_line(event)) if line is not None]


def bottleneck_line(history: History) -> str | None:
    """What limited a run that is over, where it trained an epoch and that is known."""
    bottleneck, finished = history.bottleneck, history.finished
    if bottleneck is None or finished is None or finished.state == "failed":
        return None
    figures = describe_efficiency(history.data_wait, history.mfu).replace("   ", ", ")
    return printable(f"{bottleneck.message} ({figures})")


def _format_event(event: Event) -> str | None:
    match event:
        case RunStarting():
            return f"{event.name}: starting in {event.folder}"
        case RunResumed():
            return f"{event.name}: goes on after step {event.from_step}, {describe_run_setup(event)}"
        case RunStarted():
            return f"{event.name}: {describe_run_setup(event)}"
        case EpochEvent():
            averaged = f"ema {_nan_if_none(event.ema_val_accuracy):.4f}  "
            averaged = "" if math.isnan(_nan_if_none(event.ema_val_accuracy)) else averaged
            waits = (event.data_wait or 0) > MAX_DATA_WAIT_SHARE
            skipped = f"  data wait {event.data_wait:.0%}" if waits else ""
            skipped += f"  skipped {event.skipped}" if event.skipped else ""
            skipped += f"  {pluralize(event.unread, 'image')} left out" if event.unread else ""
            return (
                f"epoch {event.epoch:>3}  train loss {_nan_if_none(event.train_loss):.4f} "
                f"acc {_nan_if_none(event.train_accuracy):.4f}  val loss {_nan_if_none(event.val_loss):.4f} "
                f"acc {_nan_if_none(event.val_accuracy):.4f}  {averaged}{_nan_if_none(event.images_per_second):,.0f} "
                f"img/s  lr {_nan_if_none(event.lr):.3g}  {_nan_if_none(event.seconds):.1f} s{skipped}"
            )
        case WaitingForGpus():
            return f"waiting: {event.message}"
        case BatchSizeFound():
            return event.message
        case WarningEvent():
            return f"warning: {event.message}"
        case ControlEvent() if event.request in REFUSAL_OUTCOMES:
            return f"{event.request} of {event.by}: {event.outcome}"
        case ControlEvent():
            return f"{event.request} requested by {event.by}: {event.outcome}"
        case CheckpointSaved() if event.asked:
            return f"checkpoint of step {event.step} saved"
        case RunPaused():
            return f"paused after step {event.step}"
        case RunContinued():
            return f"goes on after step {event.step}"
        case RunFinished():
            return f"{event.state}{': ' + event.message if event.message else ''}"
    return None


def _nan_if_none(number: float | None) -> float:
    """What was no number is null in a journal."""
    return math.nan if number is None else number


def describe_run_setup(event: RunStarted) -> str:
    devices = "the CPU" if set(event.devices) == {"cpu"} else ", ".join(event.devices)
    return (
        f"{pluralize(event.world_size, 'rank')} on {devices}, global batch {event.global_batch}, "
        f"{pluralize(event.steps_per_epoch, 'step')} an epoch, {pluralize(event.epochs, 'epoch')}, "
        f"{event.train_images} images for training and {event.val_images} for validation in "
        f"{event.classes} classes, {describe_parameters(event)}{describe_pipeline(event)}"
    )


def describe_pipeline(event: RunStarted) -> str:
    return f", {event.pipeline} pipeline ({event.pipeline_why})" if event.pipeline else ""


def describe_parameters(event: RunStarted) -> str:
    trained = f", of which {event.trainable:,} train" if 0 <= event.trainable < event.parameters else ""
    return f"{event.parameters:,} parameters{trained}"
