"""Printers of a headless run's events: lines of text, or JSON lines.

`tui.cli.train` passes each event of `engine.jobs.launch` to one of them. Messages go to stderr, data to stdout.
"""

from __future__ import annotations

import math
import queue
import shutil
import sys
import threading
from contextlib import suppress

from engine.base.text import printable
from engine.base.units import format_duration
from engine.report.table import cell_width
from engine.runs.event_lines import (
    CommandOutput,
    EpochProgress,
    RunStarting,
    TrainingProgress,
    describe_parameters,
    epoch_name,
    epoch_values,
    event_lines,
)
from engine.runs.events import (
    EpochEvent,
    Event,
    PhaseChanged,
    RunStarted,
)
from engine.runs.history import History
from tui.cli.command_output import DisconnectSafeStream, OutputPrinter
from tui.cli.console import json_line
from tui.cli.terminal import moves_cursor
from tui.screens.tables import fact_lines

MAX_QUEUED_EVENTS = 10_000
DRAIN_TIMEOUT_SECONDS = 5.0
# Lines about the current epoch: the first after these seconds, later ones at this share of the epoch's time at least.
PROGRESS_SECONDS = 10.0
PROGRESS_SHARE = 0.05
# A narrower terminal has one blank between the values of an epoch, so that the learning rate and the seconds fit.
WIDE_COLUMNS = 100
# Goes to the beginning of the line and deletes it.
CLEAR = "\r\x1b[K"


class JsonPrinter:
    """Print every event as a line of JSON to stdout, except `RunStarting`, `TrainingProgress` and the output of a
    command."""

    def __init__(self) -> None:
        self._out = DisconnectSafeStream(sys.stdout)

    def __call__(self, event: Event) -> None:

        if not isinstance(event, RunStarting | TrainingProgress | CommandOutput):
            self._out.write(json_line(event) + "\n")
            self._out.flush()

    def close(self) -> None:
        self._out.flush()


class PlainPrinter:
    """Print events as lines of text to stderr, and now and then the progress of a long epoch. On a terminal that is one
    line, which is written again in its place."""

    def __init__(self, *, is_live: bool = False) -> None:
        self._out, self._is_live = DisconnectSafeStream(sys.stderr), is_live
        self._history, self._output = History(), OutputPrinter()
        self._progress = EpochProgress(self._history)
        self._next_progress = math.inf
        """Unix time from which on the progress is printed again."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, CommandOutput):
            self._output.print(event)
            return
        self._history.add(event)
        self._progress.add(event)
        columns, progress = shutil.get_terminal_size().columns, list[str]()
        if self._is_live and isinstance(event, EpochEvent):
            lines = [fitted_epoch_line(event, columns)]
        else:
            lines = event_lines(event, self._history)
        if isinstance(event, PhaseChanged) and event.phase == "training":
            self._next_progress = event.time + (0.0 if self._is_live else PROGRESS_SECONDS)
        elif isinstance(event, PhaseChanged | TrainingProgress) and event.time >= self._next_progress:
            progress = self._progress_lines(event)
        if self._is_live:
            shown = "".join(f"{CLEAR}{line}\n" for line in lines) + CLEAR + "".join(progress)[: columns - 1]
        else:
            shown = "".join(f"{line}\n" for line in lines + progress)
        if lines or progress:
            with self._output.hidden():
                self._out.write(shown)
                self._out.flush()

    def _progress_lines(self, event: PhaseChanged | TrainingProgress) -> list[str]:
        """Return a line with steps, throughput and remaining time of the current epoch; none after its last step until
        the validation starts."""
        started, done, step_seconds = self._history.started, self._progress.steps, self._progress.step_seconds
        if started is None or not step_seconds:
            return []
        steps = started.steps_per_epoch
        if isinstance(event, PhaseChanged):
            if event.phase != "validating":
                return []
            rest = "validating"
        elif done < steps:
            rest = f"{format_duration((steps - done) * step_seconds)} until validation"
        else:
            return []
        pause = 0.0 if self._is_live else max(PROGRESS_SECONDS, PROGRESS_SHARE * steps * step_seconds)
        self._next_progress = event.time + pause
        return [f"{epoch_name(self._progress.number)}  step {done}/{steps}  {self._progress.describe()}  {rest}"]

    def close(self) -> None:
        self._out.write(CLEAR if self._is_live else "")
        self._out.flush()


def fitted_epoch_line(epoch: EpochEvent, columns: int) -> str:
    """Return the line of an epoch with the values that fit the columns of a terminal."""
    values, gap = epoch_values(epoch), " " if columns < WIDE_COLUMNS else "  "
    while len(values) > 1 and cell_width(gap.join(values)) > columns:
        values.pop()
    return gap.join(values)


class DryRunPrinter(PlainPrinter):
    """Print the plan of a dry run as a table to stdout, and all other events as lines."""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RunStarted):
            super().__call__(event)
            return
        self._history.add(event)
        out = DisconnectSafeStream(sys.stdout)
        out.write("".join(f"{line}\n" for line in plan_lines(event, self._history.cpu_fallback)))
        out.flush()


class BackgroundPrinter:
    """Passes events to a printer in its own thread, so that a blocked terminal or pipe never stalls training.

    Events that do not fit the queue are dropped; the journal still holds them.
    """

    def __init__(self, printer: JsonPrinter | PlainPrinter) -> None:
        self._printer = printer
        self._queue: queue.Queue[Event | None] = queue.Queue(MAX_QUEUED_EVENTS)
        # Start the thread with the first event: DataLoader workers may be forked before it.
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._print_events, name="printer", daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._queue.put_nowait(event)

    def _print_events(self) -> None:
        while (event := self._queue.get()) is not None:
            # The journal has the event. A printer that fails must not leave a traceback in its output, and later
            # events may be printed again.
            with suppress(Exception):
                self._printer(event)
        self._printer.close()

    def close(self) -> None:
        """Wait until all queued events are printed, or until the printer makes no progress."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=DRAIN_TIMEOUT_SECONDS)
        pending = self._queue.qsize() + 1
        while self._thread.is_alive() and self._queue.qsize() < pending:
            pending = self._queue.qsize()
            self._thread.join(DRAIN_TIMEOUT_SECONDS)


def make_printer(*, json: bool, dry_run: bool) -> JsonPrinter | PlainPrinter:
    """Return the printer for these options and the kind of stderr."""
    if json:
        return JsonPrinter()
    if dry_run:
        return DryRunPrinter()
    return PlainPrinter(is_live=sys.stderr is not None and sys.stderr.isatty() and moves_cursor())


def plan_lines(started: RunStarted, fallback: str | None) -> list[str]:
    """Return the lines of a plan. `fallback` is why it uses the CPU although the host has GPUs."""
    rows = {
        "ranks": started.world_size,
        "devices": ", ".join(started.devices),
        **({"reason for CPU": fallback} if fallback else {}),
        "start method": started.start_method,
        "backend": started.backend,
        "precision": started.precision,
        **_input_rows(started),
        "global batch size": started.global_batch,
        "steps per epoch": started.steps_per_epoch,
        "epochs": started.epochs,
        "training images": started.train_images,
        "validation images": started.val_images,
        **({"test images": started.test_images} if started.test_images else {}),
        "classes": started.classes,
        "input": started.input,
        "parameters": describe_parameters(started).replace(" parameters", ""),
    }
    return fact_lines(rows)


def _input_rows(started: RunStarted) -> dict[str, str]:
    """Return the input pipeline, and its workers if it has any."""
    rows = {"input pipeline": printable(f"{started.pipeline} ({started.pipeline_reason})")}
    if started.pipeline == "stream":
        workers = "decode threads" if started.worker_type == "threads" else "DataLoader workers"
        rows[workers] = f"{started.workers} per rank"
    return rows
