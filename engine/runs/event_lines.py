"""Events in words: one line for a log or a plain terminal."""

from __future__ import annotations

import math

from engine.runs.bottleneck import MOST_WAIT, figures_in_words
from engine.runs.control import REFUSED
from engine.runs.events import (
    BatchFound,
    CheckpointSaved,
    Continued,
    Control,
    Epoch,
    Event,
    Paused,
    RunFinished,
    RunResumed,
    RunStarted,
    Starting,
    Waiting,
    Warned,
)
from engine.runs.history import History
from engine.utils.text import counted, printable


def line_of(event: Event) -> str | None:
    """None for events that come too often, or say too little, for a line of their own. What comes from outside, such as
    the name of a file, can do nothing to a terminal."""
    line = _line_of(event)
    return None if line is None else printable(line)


def lines_of(event: Event, history: History) -> list[str]:
    """The lines of an event that `history` has taken in: before its last what limited the run."""
    limit = verdict_line(history) if isinstance(event, RunFinished) else None
    return [line for line in (limit, line_of(event)) if line is not None]


def verdict_line(history: History) -> str | None:
    """What limited a run that is over, where it trained an epoch and that is known."""
    verdict, finished = history.verdict, history.finished
    if verdict is None or finished is None or finished.state == "failed":
        return None
    figures = figures_in_words(history.data_wait, history.mfu).replace("   ", ", ")
    return printable(f"{verdict.message} ({figures})")


def _line_of(event: Event) -> str | None:
    match event:
        case Starting():
            return f"{event.name}: starting in {event.folder}"
        case RunResumed():
            return f"{event.name}: goes on after step {event.from_step}, {plan_in_words(event)}"
        case RunStarted():
            return f"{event.name}: {plan_in_words(event)}"
        case Epoch():
            averaged = f"ema {_known(event.ema_val_accuracy):.4f}  "
            averaged = "" if math.isnan(_known(event.ema_val_accuracy)) else averaged
            waits = (event.data_wait or 0) > MOST_WAIT
            skipped = f"  data wait {event.data_wait:.0%}" if waits else ""
            skipped += f"  skipped {event.skipped}" if event.skipped else ""
            skipped += f"  {counted(event.unread, 'image')} left out" if event.unread else ""
            return (
                f"epoch {event.epoch:>3}  train loss {_known(event.train_loss):.4f} "
                f"acc {_known(event.train_accuracy):.4f}  val loss {_known(event.val_loss):.4f} "
                f"acc {_known(event.val_accuracy):.4f}  {averaged}{_known(event.images_per_second):,.0f} img/s  "
                f"lr {_known(event.lr):.3g}  {_known(event.seconds):.1f} s{skipped}"
            )
        case Waiting():
            return f"waiting: {event.message}"
        case BatchFound():
            return event.message
        case Warned():
            return f"warning: {event.message}"
        case Control() if event.request in REFUSED:
            return f"{event.request} of {event.by}: {event.outcome}"
        case Control():
            return f"{event.request} requested by {event.by}: {event.outcome}"
        case CheckpointSaved() if event.asked:
            return f"checkpoint of step {event.step} saved"
        case Paused():
            return f"paused after step {event.step}"
        case Continued():
            return f"goes on after step {event.step}"
        case RunFinished():
            return f"{event.state}{': ' + event.message if event.message else ''}"
    return None


def _known(number: float | None) -> float:
    """What was no number is null in a journal."""
    return math.nan if number is None else number


def plan_in_words(event: RunStarted) -> str:
    devices = "the CPU" if set(event.devices) == {"cpu"} else ", ".join(event.devices)
    return (
        f"{counted(event.world_size, 'rank')} on {devices}, global batch {event.global_batch}, "
        f"{counted(event.steps_per_epoch, 'step')} an epoch, {counted(event.epochs, 'epoch')}, "
        f"{event.train_images} images for training and {event.val_images} for validation in "
        f"{event.classes} classes, {parameters_in_words(event)}{pipeline_in_words(event)}"
    )


def pipeline_in_words(event: RunStarted) -> str:
    return f", {event.pipeline} pipeline ({event.pipeline_why})" if event.pipeline else ""


def parameters_in_words(event: RunStarted) -> str:
    trained = f", of which {event.trainable:,} train" if 0 <= event.trainable < event.parameters else ""
    return f"{event.parameters:,} parameters{trained}"
