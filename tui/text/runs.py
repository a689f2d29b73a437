"""Runs as rows for `gputrain runs` and the screens: name, state, progress, accuracy, age."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from engine.runs.folder import LIVE_STATES, RunFolder, RunState
from engine.utils.files import read_json
from engine.utils.text import printable
from tui.text.tables import UNKNOWN

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent, RankFailed, RunFinished
    from engine.runs.history import History, RunSummary
    from engine.runs.watcher import RunWatcher
    from tui.text.ranks import RankReadings

# The readings of one GPU take 400 bytes.
MAX_SUMMARY_BYTES = 1 << 22
HEADER = ("NAME", "STATE", "EPOCH", "BEST ACCURACY", "AGE")
FOREIGN_HEADER = "FOREIGN"


@dataclass(frozen=True)
class RunRow:
    """State and results of one run.

    `age_seconds` counts from the last journal event or start. `eta_seconds` is the remaining time at the latest
    throughput. `step` of `steps` is the global step. `bottleneck` is the bottleneck message, `data_wait` the share of
    the training time spent waiting for data, `mfu` the model FLOPs utilization. `message` says why the run ended, or
    why its files are `unreadable`. `foreign` is why other users can change the run, None if they cannot.
    `cpu_fallback` is why it trains on the CPU although the host has GPUs. `phase` is what its ranks do: training,
    validating, saving, or "" if unknown or ended. `current_epoch` is the epoch that they are in, and `grad_norm` the
    latest norm of the gradient. `seconds` is the duration of all sessions.
    """

    name: str
    state: str
    epoch: int
    epochs: int | None
    best_val_accuracy: float | None
    age_seconds: float
    folder: str
    val_accuracy: float | None = None
    val_loss: float | None = None
    step: int = 0
    steps: int | None = None
    images_per_second: float | None = None
    eta_seconds: float | None = None
    message: str = ""
    data_wait: float | None = None
    mfu: float | None = None
    bottleneck: str | None = None
    unreadable: bool = False
    foreign: str | None = None
    cpu_fallback: str = ""
    phase: str = ""
    current_epoch: int = 0
    best_epoch: int | None = None
    grad_norm: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        values = asdict(self)
        return values | {"verdict": values.pop("bottleneck")}

    @property
    def live(self) -> bool:
        return self.state in LIVE_STATES


def make_run_row(watcher: RunWatcher) -> RunRow:
    """Poll the run and return its current row. An error in one run must not hide the others."""
    try:
        history = watcher.poll()
        return row_of_history(watcher.folder, history, partial=watcher.partial, problem=watcher.problem)
    except Exception as error:
        return unreadable_row(watcher.folder, f"cannot be read: {type(error).__name__}: {error}")


def row_of_history(folder: RunFolder, history: History, *, partial: bool, problem: str | None) -> RunRow:
    """Build the row from the history; if it is `partial`, the rest comes from summary.json.

    `problem` says why the journal cannot be read.
    """
    # The first frame of the screen does without events and their history.
    from engine.runs.history import RunSummary

    stored = RunSummary.from_dict((read_json(folder.summary, MAX_SUMMARY_BYTES) or {}) if partial else {})
    epoch, best, started = (history.epochs[-1] if history.epochs else None), history.best, history.started
    best_values = (best.selection_accuracy if best else None, stored.best_val_accuracy)
    accuracies = [float(value) for value in best_values if value is not None]
    state = folder.state(history)
    # A partial history lacks the GPU samples that date a throttle, so use the stored bottleneck.
    bottleneck = stored.bottleneck if partial else history.bottleneck
    is_paused = state is RunState.PAUSED
    rate = history.latest_step.images_per_second if history.latest_step else epoch.images_per_second if epoch else None
    return RunRow(
        name=folder.name,
        state=str(state),
        epoch=epoch.epoch if epoch else stored.epochs,
        epochs=started.epochs if started else None,
        best_val_accuracy=max(accuracies, default=None),
        age_seconds=run_age_seconds(folder),
        folder=str(folder.path),
        val_accuracy=epoch.val_accuracy if epoch else stored.val_accuracy,
        val_loss=epoch.val_loss if epoch else stored.val_loss,
        step=history.steps_done,
        steps=started.epochs * started.steps_per_epoch if started else None,
        images_per_second=None if is_paused else rate,
        eta_seconds=history.eta_s if state.live and not is_paused else None,
        message=problem or end_message(history.finished, state),
        data_wait=history.data_wait,
        mfu=history.mfu,
        bottleneck=bottleneck.message if bottleneck else None,
        unreadable=problem is not None,
        foreign=folder.owner_problem(),
        cpu_fallback=history.cpu_fallback or stored.cpu_fallback,
        phase=history.phase if state.live else "",
        # A checkpoint after the last epoch is at the beginning of the next one.
        current_epoch=min(history.current_epoch, started.epochs) if started else history.current_epoch,
        best_epoch=stored.best_epoch if partial else best.epoch if best else None,
        grad_norm=_finite(history.latest_step.grad_norm) if history.latest_step else None,
        seconds=stored.seconds if partial else round(history.total_seconds, 3),
    )


def _finite(value: float | None) -> float | None:
    """Return None for a value that is not finite, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def read_summary(folder: RunFolder) -> RunSummary:
    """Return the stored summary of a run; one of defaults if there is none."""
    from engine.runs.history import RunSummary

    return RunSummary.from_dict(read_json(folder.summary, MAX_SUMMARY_BYTES) or {})


def unreadable_row(folder: RunFolder, message: str) -> RunRow:
    """Return the row of a run whose files cannot be read."""
    return RunRow(
        name=folder.name,
        state=RunState.CRASHED,
        epoch=0,
        epochs=None,
        best_val_accuracy=None,
        age_seconds=0.0,
        folder=str(folder.path),
        message=message,
        unreadable=True,
        foreign=folder.owner_problem(),
    )


def end_message(finished: RunFinished | None, state: RunState) -> str:
    """Return why a run ended; empty while it is live."""
    if state is RunState.CRASHED:
        return "supervisor exited unexpectedly; `gputrain resume` resumes from the last checkpoint"
    return finished.message if finished is not None and not state.live else ""


def run_age_seconds(folder: RunFolder) -> float:
    """Return seconds since the last journal event, or since the start of a run without events."""
    mtimes = []
    for path in (folder.journal, folder.lock):
        try:
            mtimes.append(path.stat().st_mtime)
        except OSError:
            continue
    return round(max(time.time() - max(mtimes, default=time.time()), 0.0), 1)


def row_cells(row: RunRow) -> tuple[str, ...]:
    """Return the cells for `HEADER`, with control characters escaped."""
    epoch, state = f"{row.epoch}/{row.epochs or '?'}", "unreadable" if row.unreadable else row.state
    return (printable(row.name), state, epoch, format_accuracy(row.best_val_accuracy), format_age(row.age_seconds))


def format_accuracy(accuracy: float | None) -> str:
    return UNKNOWN if accuracy is None else f"{accuracy:.4f}"


def format_runs_table(rows: Sequence[RunRow]) -> str:
    """Return the table of `gputrain runs`; its last column exists only if other users can change one of the runs."""
    lines = [HEADER, *(row_cells(row) for row in rows)]
    if any(row.foreign for row in rows):
        notes = [FOREIGN_HEADER, *(row.foreign or "" for row in rows)]
        lines = [(*line, printable(note)) for line, note in zip(lines, notes, strict=True)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def format_age(seconds: float) -> str:
    """Format an age in its largest unit: 3 h."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 2h05m, 2m41s, 41s."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


@dataclass(frozen=True)
class RunSnapshot:
    """Latest state of a run, its ranks, the end of its log and its latest epochs."""

    row: RunRow
    ranks: RankReadings
    failures: tuple[RankFailed, ...] = ()
    log: tuple[str, ...] = ()
    epochs: tuple[EpochEvent, ...] = ()
    folder_missing: bool = False
    resumable: bool = False
    """Whether it has a checkpoint."""
    evaluated: bool = False
    """Whether it has an evaluation, for the confusion matrix."""
