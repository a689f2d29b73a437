"""A comparison of runs: config keys that differ, then metrics, one column a run; and the list of the compared runs.

`gputrain compare` prints it, and `tui.screens.compare` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase

from engine.config.differences import KeyDifference
from engine.runs.command_events import SHORT_COMMIT
from engine.runs.comparison import Comparison, RunGroup, Spread, has_key, spread_text
from engine.runs.metrics import Metric, format_metric
from engine.runs.records import CodeSummary
from engine.show.table import Align, Cell, Column, FittedTable, Line, Shorten, fit, plain_lines, shorten
from engine.utils.text import printable
from engine.utils.units import UNKNOWN
from tui.palette import ACCENT, GOOD, MUTED, series_style
from tui.tables.config import format_config_value

BEST_SIGN = "*"
MAX_NAME_COLUMNS, MAX_PRINTED_COLUMNS = 30, 40
MAX_LABEL_COLUMNS, MIN_CELL_COLUMNS, MAX_CELL_COLUMNS = 24, 6, 30
MIN_ENTRY_COLUMNS, VALUE_COLUMNS = 12, 8
STATE_LABEL, BASELINE_LABEL, CODE_LABEL = "state", "baseline", "code"
SHORT_DIGEST = 4
SPREAD_NOTE = "Mean ± standard deviation of the runs that differ in the seed alone"


@dataclass(frozen=True)
class CompareRow:
    """One row: a label, a cell for each run or group, and the indices of the best cells."""

    label: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    is_config: bool = False


@dataclass(frozen=True)
class CompareEntry:
    """A run in the list of the screen by its index, with its value of a metric at the cursor."""

    index: int
    name: str
    note: str
    metric: Metric
    value: float | None


def run_letter(index: int) -> str:
    """Return the letter of a run: its mark on the curves and in the tables."""
    return ascii_uppercase[index % len(ascii_uppercase)]


def column_name(comparison: Comparison, column: RunGroup) -> str:
    """Return the name of a run, or of the first run of a group and the number of its runs."""
    name = printable(comparison.runs[column.runs[0]].name)
    return f"{name} ×{len(column.runs)}" if column.is_group else name


def compare_rows(
    comparison: Comparison,
    columns: Sequence[RunGroup],
    baseline: RunGroup | None = None,
) -> list[CompareRow]:
    """Return the rows: states, config keys that differ, metrics. With a baseline, the metrics of the other columns have
    their difference from it."""
    states = [_joined(comparison.runs[run].shown_state for run in column.runs) for column in columns]
    rows = [CompareRow(STATE_LABEL, tuple(states))]
    codes = [_joined(_code_text(comparison.runs[run].record.code) for run in column.runs) for column in columns]
    if len(set(codes)) > 1:
        rows.append(CompareRow(CODE_LABEL, tuple(codes)))
    for difference in comparison.differences:
        cells = [_joined(_config_text(comparison, run, difference) for run in column.runs) for column in columns]
        rows.append(CompareRow(difference.key, tuple(cells), is_config=True))
    for metric in comparison.shown_metrics:
        values = [comparison.value(column, metric) for column in columns]
        if all(value is None for value in values):
            continue
        reference = None if baseline is None else comparison.value(baseline, metric)
        texts = []
        for column, value in zip(columns, values, strict=True):
            change = _difference(metric, value, None if column == baseline else reference)
            text = UNKNOWN if value is None else spread_text(metric, value)
            texts.append(f"{text} ({change})" if change else text)
        best = frozenset(comparison.best_columns(columns, metric))
        rows.append(CompareRow(printable(metric.label), tuple(texts), best))
    return rows


def _code_text(code: CodeSummary | None) -> str:
    """Return the commit of a run, and if it had changes, the beginning of the digest that tells them apart."""
    if code is None:
        return UNKNOWN
    commit = code.commit[:SHORT_COMMIT] or "no commit"
    text = f"{commit}+{code.fingerprint[:SHORT_DIGEST]}" if code.is_dirty else commit
    return printable(f"{text}, then changed" if code.changed else text)


def _config_text(comparison: Comparison, run: int, difference: KeyDifference) -> str:
    if not has_key(comparison.runs[run], difference.key):
        return UNKNOWN
    return format_config_value(difference.values[run]) or "none"


def _joined(texts: Iterator[str]) -> str:
    """Return the different texts in their order."""
    return ", ".join(dict.fromkeys(texts))


def _difference(metric: Metric, value: Spread | None, reference: Spread | None) -> str:
    if value is None or reference is None or value.mean == reference.mean:
        return ""
    difference = value.mean - reference.mean
    return ("-" if difference < 0 else "+") + format_metric(metric, abs(difference))


def _cell(row: CompareRow, index: int, limit: int) -> Line:
    is_best = index in row.best
    return ((shorten(row.cells[index], limit - is_best, Shorten.MIDDLE) + BEST_SIGN * is_best, GOOD * is_best),)


def format_comparison(comparison: Comparison, width: int, baseline: int | None = None) -> str:
    """Return the tables of `gputrain compare`: each run, then the groups. Columns beyond `width` follow below."""
    columns = comparison.columns(grouped=False)
    pinned = None if baseline is None else columns[baseline]
    rows = compare_rows(comparison, columns, pinned)
    if pinned is not None:
        rows.insert(0, CompareRow(BASELINE_LABEL, tuple("yes" if column == pinned else "" for column in columns)))
    parts = _printed_blocks(comparison, columns, rows, width)
    if groups := [column for column in comparison.columns(grouped=True) if column.is_group]:
        parts += ["", SPREAD_NOTE, *_printed_blocks(comparison, groups, compare_rows(comparison, groups), width)]
    if any(row.best for row in rows):
        parts += ["", f"{BEST_SIGN} best of the row"]
    return "\n".join(parts)


def _printed_blocks(
    comparison: Comparison, columns: Sequence[RunGroup], rows: Sequence[CompareRow], width: int
) -> list[str]:
    label = Column[CompareRow]("", "", lambda row: shorten(row.label, MAX_PRINTED_COLUMNS, Shorten.MIDDLE), priority=1)
    left = [
        Column(
            str(index), shorten(column_name(comparison, column), MAX_NAME_COLUMNS, Shorten.MIDDLE),
            partial(_cell, index=index, limit=MAX_PRINTED_COLUMNS),
        )
        for index, column in enumerate(columns)
    ]  # fmt: skip
    lines: list[str] = []
    while left:
        # At least one run stands beside the labels.
        shown = max(len(fit([label, *left], rows, width).columns) - 1, 1)
        lines += [*([""] if lines else []), *plain_lines([label, *left[:shown]], rows)]
        left = left[shown:]
    return lines


def fit_differences(rows: Sequence[CompareRow], runs: int, selected: int, width: int) -> FittedTable[CompareRow]:
    """Return the table of differences on the screen. Of columns that do not all fit, those around the selected one are
    shown."""
    label_width = min(MAX_LABEL_COLUMNS, max(width // 2, 8))
    limit = min(max(width - label_width - 2, MIN_CELL_COLUMNS), MAX_CELL_COLUMNS)
    label = Column[CompareRow](
        "", "", lambda row: row.label, max_width=label_width, priority=2,
        style=lambda row: ACCENT if row.is_config else MUTED, shorten=Shorten.MIDDLE,
    )  # fmt: skip
    columns = [label]
    for index in range(runs):
        cell = partial(_cell, index=index, limit=limit)
        priority = 1 if index == selected else -abs(index - selected)
        columns.append(Column(str(index), run_letter(index), cell, width=MIN_CELL_COLUMNS, priority=priority))
    return fit(columns, rows, width)


def differences_header(table: FittedTable[CompareRow], names: Sequence[str]) -> Line:
    """Return letters and names of the shown runs in their styles, and how many are hidden."""
    hidden = len(names) - len(table.columns) + 1
    widths = {column.key: width for column, width in zip(table.columns, table.widths, strict=True)}

    def title(column: Column[CompareRow]) -> Cell:
        if not column.key:
            return f"{hidden} more" if hidden else ""
        index, width = int(column.key), widths[column.key]
        name = f" {shorten(names[index], width - 2, Shorten.MIDDLE)}" if width > 8 else ""
        return ((run_letter(index) + name, series_style(index + 1)),)

    return table.header(MUTED, title)


ENTRY_COLUMNS: tuple[Column[CompareEntry], ...] = (
    Column(
        "name", "", lambda entry: ((f"{run_letter(entry.index)} ", series_style(entry.index + 1)), (entry.name, "")),
        flex=True, width=MIN_ENTRY_COLUMNS, priority=2, shorten=Shorten.MIDDLE,
    ),
    Column("value", "", lambda entry: _value_text(entry), Align.RIGHT, VALUE_COLUMNS, priority=1),
    Column("note", "", lambda entry: entry.note, optional=True, style=MUTED),
)  # fmt: skip
"""The list of the compared runs: letter and name, value, and a note."""


def _value_text(entry: CompareEntry) -> str:
    return UNKNOWN if entry.value is None else format_metric(entry.metric, entry.value)
