"""What a run says without a screen: a progress bar and a line an epoch on a terminal, plain lines elsewhere, or the
events as JSON. Messages go to stderr, data to stdout."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import suppress
from typing import IO, Any, cast

from engine.runs.event_lines import describe_parameters, event_line, event_lines
from engine.runs.events import EpochEvent, Event, RunFinished, RunStarted, RunStarting, StepEvent, WarningEvent
from engine.runs.history import History
from engine.runs.journal import to_line

MAX_QUEUED_EVENTS = 10_000
DRAIN_TIMEOUT_SECONDS = 5.0


class DisconnectSafeStream:
    """A stream whose reader may leave: when the terminal is gone, the run goes on and what it says is lost."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            return cast(IO[str], self._stream).write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            cast(IO[str], self._stream).flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class JsonPrinter:
    """Every event as a line of JSON on stdout, and nothing else there."""

    def __init__(self) -> None:
        self._out = DisconnectSafeStream(sys.stdout)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RunStarting):
            self._out.write(to_line(event) + "\n")
            self._out.flush()

    def close(self) -> None:
        self._out.flush()


class PlainPrinter:
    """One line for each event that has something to say."""

    def __init__(self) -> None:
        self._out = DisconnectSafeStream(sys.stderr)
        self._history = History()

    def __call__(self, event: Event) -> None:
        self._history.add(event)
        for line in event_lines(event, self._history):
            self._out.write(line + "\n")
            self._out.flush()

    def close(self) -> None:
        self._out.flush()


class ProgressPrinter:
    """A bar for the epoch that is under way, and above it a line for each that is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._history = History()
        self._console = Console(file=cast(IO[str], DisconnectSafeStream(sys.stderr)), highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        self._task: Any = None

    def __call__(self, event: Event) -> None:
        self._history.add(event)
        for line in event_lines(event, self._history):
            style = "yellow" if isinstance(event, WarningEvent) else None
            if isinstance(event, RunFinished):
                self.close()
                style = {"finished": "green", "failed": "red"}.get(event.state, "yellow")
            # What matters of an epoch fits 80 columns; the rest of its line is for wider terminals.
            one_line = isinstance(event, EpochEvent)
            self._console.print(
                line, markup=False, style=style, no_wrap=one_line, overflow="ellipsis" if one_line else "fold"
            )
        started = self._history.started
        if started is None or isinstance(event, RunFinished):
            return
        if isinstance(event, RunStarted):
            self._progress.start()
            self._begin_epoch(len(self._history.epochs) + 1, started)
        elif isinstance(event, StepEvent) and self._task is not None:
            done = event.step - (self._history.epochs[-1].step if self._history.epochs else 0)
            # A loss that JSON cannot hold comes as None.
            loss = event.losses[-1] if event.losses[-1] is not None else float("nan")
            rate = f"{event.images_per_second:,.0f} img/s  loss {loss:.4f}"
            self._progress.update(self._task, completed=done, rate=rate)
        elif isinstance(event, EpochEvent) and event.epoch < started.epochs:
            self._begin_epoch(event.epoch + 1, started)

    def _begin_epoch(self, epoch: int, started: RunStarted) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(f"epoch {epoch}/{started.epochs}", total=started.steps_per_epoch, rate="")

    def close(self) -> None:
        self._progress.stop()


class DryRunPrinter:
    """What a dry run found out, as a table on stdout."""

    def __init__(self) -> None:
        self._out = DisconnectSafeStream(sys.stdout)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            rows = {
                "ranks": event.world_size,
                "devices": ", ".join(event.devices),
                "backend": event.backend,
                "loader processes": f"{event.workers} a rank",
                "global batch": event.global_batch,
                "steps an epoch": event.steps_per_epoch,
                "epochs": event.epochs,
                "training images": event.train_images,
                "validation images": event.val_images,
                "classes": event.classes,
                "parameters": describe_parameters(event).replace(" parameters", ""),
            }
            self._out.write("".join(f"{name:<18} {value}\n" for name, value in rows.items()))
        elif (line := event_line(event)) is not None:
            print(line, file=cast(IO[str], DisconnectSafeStream(sys.stderr)))

    def close(self) -> None:
        self._out.flush()


class BackgroundPrinter:
    """Hands events to a listener in a thread of its own, so that a terminal or a pipe that takes nothing holds up no
    run. What does not fit into the queue is left out; the journal has it."""

    def __init__(self, printer: JsonPrinter | PlainPrinter | ProgressPrinter | DryRunPrinter) -> None:
        self._printer = printer
        self._queue: queue.Queue[Event | None] = queue.Queue(MAX_QUEUED_EVENTS)
        # Started with the first event, because loader processes may be forked before.
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._print_events, name="listener", daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._queue.put_nowait(event)

    def _print_events(self) -> None:
        while (event := self._queue.get()) is not None:
            self._printer(event)
        self._printer.close()

    def close(self) -> None:
        """Wait until all is said, as long as someone listens."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=DRAIN_TIMEOUT_SECONDS)
        left = self._queue.qsize() + 1
        while self._thread.is_alive() and self._queue.qsize() < left:
            left = self._queue.qsize()
            self._thread.join(DRAIN_TIMEOUT_SECONDS)


def make_printer(*, json: bool, dry_run: bool) -> JsonPrinter | PlainPrinter | ProgressPrinter | DryRunPrinter:
    """The one that fits what was asked for and where stderr leads."""
    if json:
        return JsonPrinter()
    if dry_run:
        return DryRunPrinter()
    return ProgressPrinter() if sys.stderr is not None and sys.stderr.isatty() else PlainPrinter()
