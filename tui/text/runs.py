"""Rows of runs (`engine.runs.run_row`) as text for `gputrain runs` and the screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from engine.runs.fields import Field, Kind, as_text, date_text
from engine.runs.folder import RunState
from engine.runs.metrics import METRICS, format_known, format_metric
from engine.runs.run_row import RunRow
from engine.utils.text import format_duration as format_duration
from engine.utils.text import printable
from tui.text.tables import UNKNOWN

if TYPE_CHECKING:
    from engine.runs.events import EpochEvent, RankFailed
    from tui.text.ranks import RankReadings

TAGS_HEADER, FOREIGN_HEADER, CAUSE_HEADER = "TAGS", "FOREIGN", "CAUSE"
ENDED_BADLY = (RunState.FAILED, RunState.CRASHED, RunState.INTERRUPTED)


def row_cells(row: RunRow) -> tuple[str, ...]:
    """Return the cells of a run, with control characters escaped."""
    state = "unreadable" if row.unreadable else row.state
    return (
        printable(row.name),
        state,
        format_epoch(row),
        format_known("best_val_accuracy", row.record.best_val_accuracy, UNKNOWN),
        format_age(row.age_seconds),
    )


def format_epoch(row: RunRow) -> str:
    """Return how far a run is, and of a sweep the number of its trials."""
    return f"{row.trials} trials" if row.trials else f"{row.record.epochs}/{row.record.total_epochs or '?'}"


def format_runs_table(rows: Sequence[RunRow]) -> str:
    """Return the table of `gputrain runs`.

    Columns for tags and for why other users can change a run exist only if one of the runs has any, and a column for
    the cause only if every run ended with one.
    """
    header = ("NAME", "STATE", "EPOCH", METRICS["best_val_accuracy"].label.upper(), "AGE")
    lines = [header, *(row_cells(row) for row in rows)]
    if any(row.tags for row in rows):
        tags = [TAGS_HEADER, *(",".join(row.tags) for row in rows)]
        lines = [(*line, cell) for line, cell in zip(lines, tags, strict=True)]
    if any(row.foreign for row in rows):
        notes = [FOREIGN_HEADER, *(row.foreign or "" for row in rows)]
        lines = [(*line, printable(note)) for line, note in zip(lines, notes, strict=True)]
    if all(row.message and row.state in ENDED_BADLY for row in rows):
        causes = [CAUSE_HEADER, *(printable(row.message) for row in rows)]
        lines = [(*line, cause) for line, cause in zip(lines, causes, strict=True)]
    return format_table(lines)


def format_columns(rows: Sequence[RunRow], fields: Sequence[Field]) -> str:
    """Return a table of chosen fields; numbers are aligned to the right."""
    lines = [tuple(printable(field.name.upper()) for field in fields)]
    lines += [tuple(format_cell(field, row) for field in fields) for row in rows]
    right = [any(_is_number(field.value(row)) for row in rows) for field in fields]
    return format_table(lines, right)


def format_table(lines: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Return lines of cells as columns, two blanks apart. `right` says which columns are aligned to the right."""
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    aligned = right or [False] * len(widths)
    return "\n".join(
        "  ".join(
            " " * (width - _width(cell)) + cell if is_right else cell + " " * (width - _width(cell))
            for cell, width, is_right in zip(line, widths, aligned, strict=True)
        ).rstrip()
        for line in lines
    )


def _width(text: str) -> int:
    """Return the width in columns of a terminal."""
    return len(text) if text.isascii() else cell_len(text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_cell(field: Field, row: RunRow) -> str:
    """Format the value of a field."""
    value = field.value(row)
    if value is None or value == ():
        return "" if field.kind is Kind.TAGS else UNKNOWN
    if field.metric is not None:
        return format_metric(field.metric, value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.kind is Kind.DATE:
        return date_text(value)
    if field.kind is Kind.DURATION:
        return format_age(value)
    return f"{value:.4g}" if isinstance(value, float) else printable(as_text(value))


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
