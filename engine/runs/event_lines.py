"""Format events as lines of `log.txt`, and events and the progress of an epoch for a terminal without the screen.

`engine.runs.recorder` writes them to the log, the CLI to stderr. `engine.runs.events` has the events of the journal.
The others are here: only a terminal shows them, and `engine.jobs.launch` emits them."""

from __future__ import annotations

import math
from functools import partial

from engine.base.codec import Count, or_none
from engine.base.text import pluralize, printable
from engine.base.units import format_count, format_rate, format_score, format_share
from engine.runs.bottleneck import MAX_DATA_WAIT_SHARE, describe_efficiency, valid_share
from engine.runs.command_events import CodeChanged, CodeRecorded, CommandResumed, CommandStarted, change_line, code_line
from engine.runs.control import REFUSAL_OUTCOMES
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    EpochEvent,
    Event,
    FinalTest,
    GpusGranted,
    PhaseChanged,
    Profiled,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    StepEvent,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.history import History, describe_run_devices, mean_epoch_seconds
from engine.runs.metrics import METRIC_PREFIX, format_known, format_of_epoch


class RunStarting(Event, frozen=True, kw_only=True, tag="starting"):
    """The run folder exists and its ranks are being set up. Shown on the terminal, never written to the journal."""

    name: str
    """Name of the run."""
    folder: str
    """Path of the run folder."""


class DataDownload(Event, frozen=True, kw_only=True, tag="data_download"):
    """Progress of `data.download` before the run starts. Shown on the terminal."""

    message: str
    """What is downloaded, and how much of it there is."""


class TrainingProgress(Event, frozen=True, kw_only=True, tag="progress"):
    """All ranks have completed a step. Independent of `run.log_every`, whose steps may take minutes."""

    step: Count
    """Global step, counted from 1 over all epochs."""


class CommandOutput(Event, frozen=True, kw_only=True, tag="output"):
    """Lines that a command printed. Shown on the terminal; the log of the run has them."""

    lines: list[str]
    """Printable text, and colors as SGR escape sequences."""
    pending: tuple[str, ...] = ()
    """The lines below them that may still change, such as a progress bar."""


def event_line(event: Event) -> str | None:
    """Return the log line of an event, without unprintable characters; None if the event has no line, like `step`."""
    line = _format_event(event)
    return None if line is None else printable(line)


def event_lines(event: Event, history: History) -> list[str]:
    """Return the log lines of an event that `history` already includes.

    The bottleneck precedes the end of the run. Devices and mean time of an epoch
    follow it, or precede it if the last line says how to continue.
    """
    lines = [event_line(event)]
    if isinstance(event, RunFinished):
        ends = event.state == "finished"
        lines = [bottleneck_line(history), *([] if ends else [speed_line(history)]), *lines]
        lines += [speed_line(history)] if ends else []
    return [line for line in lines if line is not None]


def speed_line(history: History) -> str | None:
    """Return devices and mean time of the epochs of this session; None if it trained none from start to end."""
    epochs, started = history.full_session_epochs, history.started
    if not epochs or started is None:
        return None
    since = " since the resume" if isinstance(started, RunResumed) else ""
    seconds = mean_epoch_seconds(epochs)
    return printable(
        f"{pluralize(len(epochs), 'epoch')}{since} on {describe_run_devices(started)}, {seconds:.1f} s per epoch"
    )


def bottleneck_line(history: History) -> str | None:
    """Return the bottleneck of a run that finished or was stopped, as a log line; None if it is unknown."""
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
            return f"{event.name}: resumed after step {event.from_step}, {describe_run_setup(event)}"
        case RunStarted():
            return f"{event.name}: {describe_run_setup(event)}"
        case CommandResumed():
            return f"{event.name}: resumed as process {event.pid} on {describe_run_devices(event)}: {event.command}"
        case CommandStarted():
            return f"{event.name}: process {event.pid} on {describe_run_devices(event)}: {event.command}"
        case CodeRecorded():
            return code_line(event)
        case CodeChanged():
            return change_line(event)
        case EpochEvent():
            return "  ".join(epoch_values(event))
        case FinalTest():
            return "  ".join(test_values(event))
        case WaitingForGpus():
            place = or_none(event.place)
            return f"waiting: {event.message}{'' if place is None else f' (place {place} in the queue)'}"
        case GpusGranted():
            devices = f"GPUs granted: {', '.join(event.devices)}" if event.devices else "the run can start"
            return f"{devices}, after {event.seconds:.0f} s in the queue"
        case DataDownload():
            return event.message
        case WarningEvent():
            return f"warning: {event.message}"
        case ControlEvent() if event.request in REFUSAL_OUTCOMES:
            return f"{event.request} from {event.by}: {event.outcome}"
        case ControlEvent():
            return f"{event.request} requested by {event.by}: {event.outcome}"
        case CheckpointSaved() if event.requested:
            return f"checkpoint of step {event.step} saved"
        case Profiled():
            steps = (
                f"profiled {pluralize(event.steps, 'step')} from step {event.step} on" if event.steps else "no profile"
            )
            folder = f", see {event.folder}" if event.folder else ""
            return f"{steps}{folder}{': ' if event.message else ''}{event.message}"
        case RunPaused():
            return f"paused after step {event.step}"
        case RunContinued():
            return f"continued after step {event.step}"
        case RunFinished():
            return f"{event.state}{': ' + event.message if event.message else ''}"
    return None


def epoch_values(epoch: EpochEvent) -> list[str]:
    """Return the parts of the line of an epoch, the most important ones first."""
    shown = partial(format_of_epoch, epoch, "nan")
    wait = valid_share(epoch.data_wait) or 0.0
    values = (
        epoch_name(epoch.epoch),
        f"train loss {shown('train_loss')}{_accuracy('acc', epoch.train_accuracy)}",
        f"val loss {shown('val_loss')}{_accuracy('acc', epoch.val_accuracy)}",
        *(f"{name} {shown(METRIC_PREFIX + name)}" for name in epoch.metrics),
        "" if epoch.ema is None else _accuracy("ema", epoch.ema.accuracy).strip() or f"ema {shown('ema_val_loss')}",
        f"lr {format_known('lr', epoch.lr, 'nan')}",
        format_known("seconds", epoch.seconds),
        f"data wait {format_share(wait)}" if wait > MAX_DATA_WAIT_SHARE else "",
        f"{pluralize(epoch.skipped_steps, 'step')} skipped" if epoch.skipped_steps else "",
        f"{pluralize(epoch.skipped_images, 'image')} skipped" if epoch.skipped_images else "",
        f"{format_known('images_per_second', epoch.images_per_second)} images/s",
    )
    return [printable(value) for value in values if value]


def test_values(test: FinalTest) -> list[str]:
    """Return the parts of the line of the test images, which is like that of an epoch."""
    values = (
        f"{'test':<{len(epoch_name(0))}}",
        f"loss {format_known('test_loss', test.loss, 'nan')}{_accuracy('acc', test.accuracy)}",
        *(f"{name} {'nan' if value is None else format_score(value)}" for name, value in test.metrics.items()),
        f"weights of epoch {test.epoch}",
        pluralize(test.images, "image"),
        f"{pluralize(test.skipped_images, 'image')} skipped" if test.skipped_images else "",
    )
    return [printable(value) for value in values if value]


def _accuracy(label: str, value: float | None) -> str:
    """Return an accuracy for a line of the log, such as ` acc 0.9716`; empty if the task has no accuracy."""
    return "" if value is None else f" {label} {format_score(value)}"


def epoch_name(number: int) -> str:
    """Return the name of an epoch at the beginning of a line, as wide in every line of a log."""
    return f"epoch {number:>3}"


def describe_devices(event: RunStarted) -> str:
    """Return the number of ranks and their devices."""
    devices = "the CPU" if set(event.devices) == {"cpu"} else ", ".join(event.devices)
    return f"{pluralize(event.world_size, 'rank')} on {devices}"


def describe_run_setup(event: RunStarted) -> str:
    """Return devices, batch size, epochs, dataset, model and precision of a run as one line."""
    image_format = f", images: {event.image_format}" if event.image_format else ""
    start_method = f", started by {event.start_method}" if event.start_method else ""
    precision = f"; precision: {event.precision}" if event.precision else ""
    held_out = f" and {event.val_images} for validation"
    if event.test_images:
        held_out = f", {event.val_images} for validation and {event.test_images} for the test"
    outputs = event.outputs if event.classes != 1 else event.outputs.removesuffix("s")
    return (
        f"{describe_devices(event)}{start_method}, global batch size {event.global_batch}, "
        f"{pluralize(event.steps_per_epoch, 'step')} per epoch, {pluralize(event.epochs, 'epoch')}, "
        f"{event.train_images} images for training{held_out}, {event.classes} {outputs}, {describe_parameters(event)}"
        f"{image_format}, {event.pipeline} pipeline ({event.pipeline_reason}){precision}"
    )


def describe_parameters(event: RunStarted) -> str:
    """Return the number of parameters, and of the trainable ones if some are frozen."""
    trainable = event.trainable_parameters
    trained = f" ({format_count(trainable)} trainable)" if trainable < event.parameters else ""
    return f"{format_count(event.parameters)} parameters{trained}"


class EpochProgress:
    """Position and throughput of the current epoch. `history` already includes each event that is added."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._start_time, self._start_step = math.inf, 0
        self.steps = 0
        """Number of completed steps of the epoch."""
        self.step_seconds: float | None = None
        """Mean time of a step since the start of the epoch, the resume or the last pause; None before the first."""

    def add(self, event: Event) -> None:
        if not isinstance(event, PhaseChanged | RunContinued | StepEvent | TrainingProgress):
            return
        steps = event.step - self._first_step()
        # Losses arrive a step later, on a GPU several.
        self.steps = max(self.steps, steps) if isinstance(event, StepEvent) else steps
        if isinstance(event, RunContinued) or (isinstance(event, PhaseChanged) and event.phase == "training"):
            self._start_time, self._start_step, self.step_seconds = event.time, event.step, None
        elif event.step > self._start_step and isinstance(event, TrainingProgress):
            self.step_seconds = max(event.time - self._start_time, 0.0) / (event.step - self._start_step)

    @property
    def number(self) -> int:
        """The current epoch, from 1."""
        return max(self._history.current_epoch, 1)

    def _first_step(self) -> int:
        """Return the number of steps before the current epoch."""
        started = self._history.started
        if self._history.epochs:
            return self._history.epochs[-1].step
        if isinstance(started, RunResumed):
            # The events begin with the resume, which may be within an epoch.
            return started.from_step // started.steps_per_epoch * started.steps_per_epoch
        return 0

    def describe(self) -> str:
        """Return throughput and loss as far as they are known."""
        latest, started = self._history.latest_step, self._history.started
        rate, loss = None, ""
        if started is not None and self.step_seconds:
            rate = started.global_batch / self.step_seconds
        if latest is not None and latest.epoch == self.number:
            rate = latest.images_per_second
            # The journal stores a loss that is NaN or infinite as null.
            loss = f"  loss {format_score(math.nan if latest.losses[-1] is None else latest.losses[-1])}"
        if rate is None:
            return ""
        return f"{format_rate(rate)} images/s{loss}"
