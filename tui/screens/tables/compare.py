"""A comparison of runs as a table: a row a run, a column a config key that differs or a metric.

`gputrain compare` prints it, also with a column a run, and `tui.screens.compare` shows it below the curves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_letters
from typing import Any, TypeVar

from engine.base.text import printable
from engine.base.units import UNKNOWN, format_number
from engine.config.differences import KeyDifference
from engine.report.table import Align, Column, FittedTable, Line, Shorten, fit, plain_lines, shorten
from engine.runs.command_events import SHORT_COMMIT
from engine.runs.comparison import Comparison, RunGroup, Spread, has_key, spread_text
from engine.runs.folder import RunState
from engine.runs.metrics import Better, Metric, format_metric
from engine.runs.records import CodeSummary
from tui.screens.phrases import MARK, state_symbol
from tui.screens.tables.config import format_config_value
from tui.terminal.palette import GOOD, MUTED, series_style

Row = TypeVar("Row")
BEST_SIGN = "*"
MIN_NAME_COLUMNS, MAX_NAME_COLUMNS, MAX_CELL_COLUMNS = 12, 40, 30
STATE_LABEL, BASELINE_LABEL = "state", "baseline"
SHORT_DIGEST = 4
SPREAD_NOTE = "Mean ± standard deviation of the runs that differ in the seed alone"


@dataclass(frozen=True)
class ComparedValue:
    """What is compared: a config key or a metric, with a cell for each run or group, the indices of the best cells, and
    the values behind the cells, None for an unknown one."""

    label: str
    cells: tuple[str, ...]
    values: tuple[Any, ...]
    best: frozenset[int] = frozenset()
    better: Better = Better.NEITHER
    is_config: bool = False
    key: str = ""
    """That of the metric."""

    def order(self) -> list[int]:
        """Return the indices of the runs: the best values or the lowest ones first, unknown ones last."""
        known = [index for index, value in enumerate(self.values) if value is not None]
        are_numbers = all(isinstance(self.values[index], int | float) for index in known)
        known.sort(
            key=lambda index: self.values[index] if are_numbers else str(self.values[index]),
            reverse=self.better is Better.HIGH,
        )
        return [*known, *(index for index, value in enumerate(self.values) if value is None)]

    def cell(self, index: int) -> Line:
        """Return the cell of a run. The best one is marked without color, too."""
        is_best = index in self.best
        text = shorten(self.cells[index], MAX_CELL_COLUMNS - is_best, Shorten.MIDDLE)
        return ((text + BEST_SIGN * is_best, GOOD if is_best else ""),)


@dataclass(frozen=True)
class ComparedRun:
    """A run or a group in the table. `letter` is the number of its letter and its color on the curves, None if it is
    not selected. `note` says that it is the baseline, deleted or not read yet."""

    index: int
    name: str
    state: str = ""
    letter: int | None = None
    note: str = ""


def column_name(comparison: Comparison, column: RunGroup) -> str:
    """Return the name of a run, or of the first run of a group and the number of its runs."""
    name = printable(comparison.runs[column[0]].name)
    return f"{name} ×{len(column)}" if len(column) > 1 else name


def compared_values(
    comparison: Comparison, columns: Sequence[RunGroup], baseline: RunGroup | None = None
) -> list[ComparedValue]:
    """Return what is compared of runs or groups: the most important metric, states, code and config keys that differ,
    then the other metrics. With a baseline, the metrics of the others have their difference from it."""
    metrics = [_compared_metric(comparison, columns, metric, baseline) for metric in comparison.shown_metrics]
    # A number of the setup that several have in common says nothing.
    metrics = [each for each in metrics if each.better or len(columns) == 1 or len(set(each.values) - {None}) > 1]
    first = next((index for index, each in enumerate(metrics) if each.better), 0)
    states = _texts(comparison, columns, STATE_LABEL, lambda run: comparison.runs[run].shown_state)
    codes = _texts(comparison, columns, "code", lambda run: _code_text(comparison.runs[run].record.code))
    facts = [states] if set(states.cells) != {RunState.FINISHED} else []
    facts += [codes] if len(set(codes.cells)) > 1 else []
    keys = [_compared_key(comparison, columns, difference) for difference in comparison.differences]
    return [*metrics[first : first + 1], *facts, *keys, *metrics[:first], *metrics[first + 1 :]]


def _texts(
    comparison: Comparison, columns: Sequence[RunGroup], label: str, text: Callable[[int], str]
) -> ComparedValue:
    cells = tuple(_joined(map(text, column)) for column in columns)
    return ComparedValue(label, cells, cells)


def _compared_key(comparison: Comparison, columns: Sequence[RunGroup], difference: KeyDifference) -> ComparedValue:
    texts = _texts(comparison, columns, difference.key, partial(_config_text, comparison, difference))
    values = tuple(difference.values[column[0]] for column in columns)
    return ComparedValue(difference.key, texts.cells, values, is_config=True)


def _compared_metric(
    comparison: Comparison, columns: Sequence[RunGroup], metric: Metric, baseline: RunGroup | None
) -> ComparedValue:
    values = [comparison.value(column, metric) for column in columns]
    reference = None if baseline is None else comparison.value(baseline, metric)
    texts = []
    for column, value in zip(columns, values, strict=True):
        change = _difference(metric, value, None if column == baseline else reference)
        text = UNKNOWN if value is None else spread_text(metric, value)
        texts.append(f"{text} ({change})" if change else text)
    best = frozenset(comparison.best_columns(columns, metric))
    means = tuple(None if value is None else value.mean for value in values)
    return ComparedValue(printable(metric.label), tuple(texts), means, best, metric.better, key=metric.key)


def _code_text(code: CodeSummary | None) -> str:
    """Return the commit of a run, and if it had changes, the beginning of the digest that tells them apart."""
    if code is None:
        return UNKNOWN
    commit = code.commit[:SHORT_COMMIT] or "no commit"
    text = f"{commit}+{code.fingerprint[:SHORT_DIGEST]}" if code.is_dirty else commit
    return printable(f"{text}, then changed" if code.changed else text)


def _config_text(comparison: Comparison, difference: KeyDifference, run: int) -> str:
    value = difference.values[run]
    if not has_key(comparison.runs[run], difference.key):
        return UNKNOWN
    return format_number(value) if isinstance(value, float) else format_config_value(value) or "none"


def _joined(texts: Iterator[str]) -> str:
    """Return the different texts in their order."""
    return ", ".join(dict.fromkeys(texts))


def _difference(metric: Metric, value: Spread | None, reference: Spread | None) -> str:
    # What differs in digits that are not shown is the same to a reader.
    if value is None or reference is None or format_metric(metric, value.mean) == format_metric(metric, reference.mean):
        return ""
    difference = value.mean - reference.mean
    return ("-" if difference < 0 else "+") + format_metric(metric, abs(difference))


def value_columns(values: Sequence[ComparedValue]) -> list[Column[ComparedRun]]:
    """Return a column for each compared value."""

    def cell(value: ComparedValue, run: ComparedRun) -> Line:
        return value.cell(run.index)

    aligns = (Align.LEFT if value.is_config else Align.RIGHT for value in values)
    return [
        Column(value.label, value.label, partial(cell, value), align)
        for value, align in zip(values, aligns, strict=True)
    ]


def format_comparison(
    comparison: Comparison, width: int, baseline: int | None = None, *, transposed: bool = False
) -> str:
    """Return the tables of `gputrain compare`: each run, then the groups, with a row a run, or `transposed` with a
    column a run. Columns beyond `width` follow below."""
    columns = comparison.columns(grouped=False)
    values = compared_values(comparison, columns, None if baseline is None else columns[baseline])
    if baseline is not None:
        marks = tuple("yes" if index == baseline else "" for index in range(len(columns)))
        values.insert(0, ComparedValue(BASELINE_LABEL, marks, marks))
    parts = _printed(comparison, columns, values, width, transposed)
    if groups := [column for column in comparison.columns(grouped=True) if len(column) > 1]:
        values_of_groups = compared_values(comparison, groups)
        parts += ["", SPREAD_NOTE, *_printed(comparison, groups, values_of_groups, width, transposed)]
    if any(value.best for value in values):
        parts += ["", f"{BEST_SIGN} best run"]
    return "\n".join(parts)


def _printed(
    comparison: Comparison, columns: Sequence[RunGroup], values: Sequence[ComparedValue], width: int, transposed: bool
) -> list[str]:
    runs = [
        ComparedRun(index, shorten(column_name(comparison, column), MAX_NAME_COLUMNS, Shorten.MIDDLE))
        for index, column in enumerate(columns)
    ]
    if not transposed:
        name: Column[ComparedRun] = Column("", "run", lambda run: run.name, priority=1)
        return _blocks([name, *value_columns(values)], runs, width)
    label: Column[ComparedValue] = Column("", "", lambda value: value.label, priority=1)
    cells = [
        Column[ComparedValue](str(run.index), run.name, partial(ComparedValue.cell, index=run.index)) for run in runs
    ]
    return _blocks([label, *cells], values, width)


def _blocks(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> list[str]:
    """Return the lines of a table; columns beyond `width` follow below, behind the first one again."""
    (first, *left), lines = columns, list[str]()
    while left or not lines:
        # At least one column stands beside the first one.
        shown = max(len(fit([first, *left], rows, width).columns) - 1, 1)
        lines += [*([""] if lines else []), *plain_lines([first, *left[:shown]], rows)]
        left = left[shown:]
    return lines


def run_letter(number: int) -> str:
    """Return the letter of a selected run, its mark on the curves and in the table."""
    return ascii_letters[(number + 26) % len(ascii_letters)]


def _name_cell(run: ComparedRun) -> Line:
    style = "" if run.letter is None else series_style(run.letter + 1)
    sign = "  " if run.letter is None else MARK + run_letter(run.letter)
    symbol = state_symbol(run.state) if run.state else (" ", "")
    return (sign, style), symbol, (" ", ""), (run.name, style)


def fit_runs(
    runs: Sequence[ComparedRun], values: Sequence[ComparedValue], first: int, width: int
) -> tuple[FittedTable[ComparedRun], int, int]:
    """Return the table of the screen for lines of `width` cells, its first value and the number of those that are
    hidden behind the last one.

    It begins with the value `first`, or with an earlier one if all from there on fit. The name of a run is always
    visible."""
    name = Column(
        "", "    run", _name_cell, width=MIN_NAME_COLUMNS, max_width=max(width // 3, MIN_NAME_COLUMNS), priority=2,
        shorten=Shorten.MIDDLE,
    )  # fmt: skip
    note: Column[ComparedRun] = Column(" ", "", lambda run: run.note, priority=1, optional=True, style=MUTED)
    columns = value_columns(values)

    def fit_from(start: int) -> tuple[FittedTable[ComparedRun], int]:
        table = fit([name, note, *columns[start:]], runs, width)
        return table, len(columns) - start - sum(bool(column.key.strip()) for column in table.columns)

    first = min(first, max(len(columns) - 1, 0))
    while first and fit_from(first - 1)[1] == 0:
        first -= 1
    table, hidden = fit_from(first)
    return table, first, hidden
