"""A comparison of runs as a table of text: config keys that differ, then metrics, one column a run.

`gputrain compare` prints it, and `tui.screens.compare` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from engine.runs.comparison import Column, Comparison, Spread, spread_text
from engine.runs.metrics import Metric, format_metric
from engine.utils.text import printable
from tui.text.config import format_config_value
from tui.text.tables import COLUMN_GAP, UNKNOWN, format_table, shorten_middle

BEST_SIGN = "*"
MAX_NAME_COLUMNS, MIN_CELL_COLUMNS, MAX_CELL_COLUMNS = 30, 6, 40
STATE_LABEL = "state"
BASELINE_LABEL = "baseline"
SPREAD_NOTE = "Mean ± standard deviation of the runs that differ in the seed alone"


@dataclass(frozen=True)
class TableRow:
    """One row: a label, a cell for each column, and the indices of the best cells."""

    label: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    is_config: bool = False


def run_letter(index: int) -> str:
    """Return the letter of a run or group: its mark on the curves and in the tables."""
    return ascii_uppercase[index % len(ascii_uppercase)]


def column_name(comparison: Comparison, column: Column) -> str:
    """Return the name of a run, or of the first run of a group and the number of its runs."""
    name = printable(comparison.runs[column.runs[0]].name)
    return f"{name} ×{len(column.runs)}" if column.is_group else name


def table_rows(
    comparison: Comparison, columns: Sequence[Column], baseline: Column | None = None, *, short: bool = False
) -> list[TableRow]:
    """Return the rows: states, config keys that differ, metrics. With a baseline, the metrics of the other columns have
    their difference from it; `short` leaves out their values."""
    states = [_joined(comparison.runs[run].state for run in column.runs) for column in columns]
    rows = [TableRow(STATE_LABEL, tuple(states))]
    for difference in comparison.differences:
        cells = [
            _joined(_config_text(comparison, run, difference.values[run]) for run in column.runs) for column in columns
        ]
        rows.append(TableRow(difference.key, tuple(cells), is_config=True))
    for metric in comparison.shown_metrics:
        values = [comparison.value(column, metric) for column in columns]
        if all(value is None for value in values):
            continue
        reference = None if baseline is None else comparison.value(baseline, metric)
        texts = []
        for column, value in zip(columns, values, strict=True):
            change = _difference(metric, value, None if column == baseline else reference)
            if change:
                texts.append(change if short else f"{value_text(metric, value)} ({change})")
            else:
                texts.append(value_text(metric, value))
        rows.append(
            TableRow(printable(metric.label), tuple(texts), frozenset(comparison.best_columns(columns, metric)))
        )
    return rows


def _config_text(comparison: Comparison, run: int, value: object) -> str:
    if comparison.runs[run].config is None:
        return UNKNOWN
    return format_config_value(value) or "none"


def _joined(texts: Iterator[str]) -> str:
    """Return the different texts in their order."""
    return ", ".join(dict.fromkeys(texts))


def value_text(metric: Metric, value: Spread | None) -> str:
    """Format a metric; of a group the mean and the standard deviation."""
    return UNKNOWN if value is None else spread_text(metric, value)


def _difference(metric: Metric, value: Spread | None, reference: Spread | None) -> str:
    if value is None or reference is None:
        return ""
    difference = value.mean - reference.mean
    return "" if difference == 0 else ("-" if difference < 0 else "+") + format_metric(metric, abs(difference))


def format_comparison(comparison: Comparison, width: int, baseline: int | None = None) -> str:
    """Return the tables of `gputrain compare`: each run, then the groups. Columns beyond `width` follow below."""
    columns = comparison.columns(grouped=False)
    parts = _tables(comparison, columns, width, None if baseline is None else columns[baseline])
    if groups := [column for column in comparison.columns(grouped=True) if column.is_group]:
        parts += ["", SPREAD_NOTE, *_tables(comparison, groups, width, None)]
    if any(row.best for row in table_rows(comparison, columns)):
        parts += ["", f"{BEST_SIGN} best of the row"]
    return "\n".join(parts)


def _tables(comparison: Comparison, columns: Sequence[Column], width: int, baseline: Column | None) -> list[str]:
    rows = table_rows(comparison, columns, baseline)
    names = [shorten_middle(column_name(comparison, column), MAX_NAME_COLUMNS) for column in columns]
    table = [["", *names]]
    if baseline is not None:
        table.append([BASELINE_LABEL, *("yes" if column == baseline else "" for column in columns)])
    for row in rows:
        cells = [
            shorten_middle(cell, MAX_CELL_COLUMNS) + (BEST_SIGN if index in row.best else "")
            for index, cell in enumerate(row.cells)
        ]
        table.append([shorten_middle(row.label, MAX_CELL_COLUMNS), *cells])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines: list[str] = []
    for first, end in _blocks(widths, width):
        lines += [""] if lines else []
        lines += format_table([[line[0], *line[first:end]] for line in table], [])
    return lines


def _blocks(widths: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns that fit beside column 0, at least one column each."""
    first = 1
    while first < len(widths):
        end, used = first, widths[0]
        while end < len(widths) and (end == first or used + len(COLUMN_GAP) + widths[end] <= width):
            used += len(COLUMN_GAP) + widths[end]
            end += 1
        yield first, end
        first = end
