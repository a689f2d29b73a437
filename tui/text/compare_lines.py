"""The lower panels of the compare screen as lines: the runs with their values, and the table of differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from engine.utils.ticks import format_number
from tui.charts.compare_view import ComparedCurves
from tui.palette import ACCENT, GOOD, MUTED, STRONG
from tui.text.compare import BEST_SIGN, TableRow
from tui.text.run_lines import fit_cells
from tui.text.tables import UNKNOWN, shorten_middle

MAX_LABEL_COLUMNS, MIN_CELL_COLUMNS, MAX_CELL_COLUMNS = 24, 6, 30
GAP = "  "
VALUE_COLUMNS = 8


@dataclass(frozen=True)
class EntryLine:
    """A run or group in the list: `reference` is the value of the baseline, None without one or for itself."""

    letter: str
    name: str
    style: str
    note: str
    value: float | None
    reference: float | None
    is_baseline: bool


def entry_lines(entries: Sequence[EntryLine], width: int) -> list[Text]:
    """Return a line for each entry: letter, name, value, difference from the baseline, and a note if there is room."""
    has_baseline = any(entry.is_baseline for entry in entries)
    used = 2 + len(GAP) + VALUE_COLUMNS + (1 + VALUE_COLUMNS if has_baseline else 0)
    longest = max((cell_len(entry.name) for entry in entries), default=0)
    name_columns = min(longest, max(width - used, 4))
    lines = []
    for entry in entries:
        line = Text(no_wrap=True, end="")
        line.append(entry.letter, entry.style).append(" ")
        line.append(
            fit_cells(shorten_middle(entry.name, name_columns), name_columns), STRONG if entry.is_baseline else ""
        )
        line.append(GAP + f"{_value_text(entry.value):>{VALUE_COLUMNS}}")
        if entry.is_baseline:
            line.append(f" {'baseline':>{VALUE_COLUMNS}}", ACCENT)
        elif has_baseline:
            line.append(f" {_difference_text(entry):>{VALUE_COLUMNS}}", MUTED)
        if entry.note and width - line.cell_len >= len(GAP) + cell_len(entry.note):
            line.append(GAP + entry.note, MUTED)
        lines.append(line)
    return lines


def _value_text(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if 0.01 <= abs(value) < 100 else format_number(value, 4)


def _difference_text(entry: EntryLine) -> str:
    if entry.value is None or entry.reference is None:
        return UNKNOWN
    difference = entry.value - entry.reference
    return ("-" if difference < 0 else "+") + _value_text(abs(difference))


def table_lines(
    rows: Sequence[TableRow], entries: Sequence[ComparedCurves], selected: int, baseline: int | None, width: int
) -> tuple[Text, list[Text]]:
    """Return the header and the rows in `width` columns. Of columns that do not all fit, those around the selected one
    are shown, and the baseline first."""
    label_columns = _label_columns(rows, width)
    order = list(range(len(entries)))
    widths = [_cell_columns(rows, index) for index in order]
    shown = _columns_that_fit(widths, selected, baseline, width - label_columns)
    hidden = len(order) - len(shown)
    header = Text(fit_cells(f"{hidden} more" if hidden else "", label_columns), MUTED, no_wrap=True, end="")
    for index in shown:
        entry = entries[index]
        name = f"{entry.letter} {shorten_middle(entry.name, widths[index] - 2)}" if widths[index] > 8 else entry.letter
        header.append(GAP).append(fit_cells(name, widths[index]), entry.style)
    lines = []
    for row in rows:
        line = Text(no_wrap=True, end="")
        line.append(
            fit_cells(shorten_middle(row.label, label_columns), label_columns), ACCENT if row.is_config else MUTED
        )
        for index in shown:
            is_best = index in row.best
            cell = shorten_middle(row.cells[index], widths[index] - is_best) + BEST_SIGN * is_best
            line.append(GAP).append(fit_cells(cell, widths[index]), GOOD if is_best else "")
        lines.append(line)
    return header, lines


def fits(rows: Sequence[TableRow], width: int) -> bool:
    """Whether all columns of the table fit in `width` columns of characters."""
    count = len(rows[0].cells) if rows else 0
    return _label_columns(rows, width) + sum(len(GAP) + _cell_columns(rows, index) for index in range(count)) <= width


def _label_columns(rows: Sequence[TableRow], width: int) -> int:
    return min(max((len(row.label) for row in rows), default=0), MAX_LABEL_COLUMNS, max(width // 2, 8))


def _cell_columns(rows: Sequence[TableRow], index: int) -> int:
    longest = max((cell_len(row.cells[index]) + (index in row.best) for row in rows), default=0)
    return min(max(longest, MIN_CELL_COLUMNS), MAX_CELL_COLUMNS)


def _columns_that_fit(widths: Sequence[int], selected: int, baseline: int | None, room: int) -> list[int]:
    """Return the columns to show in order: the baseline, the selected one, and its neighbors as far as they fit."""
    neighbors = sorted(range(len(widths)), key=lambda index: (abs(index - selected), index))
    wanted = dict.fromkeys(index for index in (selected, baseline, *neighbors) if index is not None)
    shown: list[int] = []
    for index in wanted:
        if index >= len(widths):
            continue
        room -= len(GAP) + widths[index]
        if room < 0 and shown:
            break
        shown.append(index)
    return sorted(shown, key=lambda index: (index != baseline, index))
