"""Rows of runs (`engine.runs.run_row`) as text for `gputrain runs` and the screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.runs.run_row import RunRow
from engine.utils.text import format_duration as format_duration
from engine.utils.text import printable
from tui.text.tables import UNKNOWN

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent, RankFailed
    from tui.text.ranks import RankReadings

HEADER = ("NAME", "STATE", "EPOCH", "BEST ACCURACY", "AGE")
FOREIGN_HEADER = "FOREIGN"


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
