"""Several runs side by side: the curves of one metric of the selected runs, and a table with a row a run.

`tui.screens.pollers.compare` reads the runs, `tui.screens.tables.compare` makes the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.base.text import pluralize, printable
from engine.base.units import UNKNOWN
from engine.jobs.command.metric_files import CommandMetrics
from engine.report.charts import Chart, Place, charts_of, charts_without_accuracy, compared_charts, metric_chart
from engine.runs.curves import NO_BLOCKS, X_AXES, XAxis, default_axis
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder, RunState
from engine.runs.metrics import format_metric, metric_of_key
from tui.charts.plot import Curve
from tui.charts.view import ChartView
from tui.screens.chart_panels import ChartPanels
from tui.screens.charts import ChartScreen
from tui.screens.dialogs import ChoiceDialog
from tui.screens.keymap import COMPARE_KEYS, Key
from tui.screens.pollers.compare import ComparePoller, ReadRun
from tui.screens.run_layout import GRID_COLUMNS, Layout
from tui.screens.services import AppServices
from tui.screens.tables import styled, wrap_text
from tui.screens.tables.compare import STATE_LABEL, ComparedRun, ComparedValue, compared_values, fit_runs, run_letter
from tui.screens.widgets.chart import ChartPanel, curve_value
from tui.screens.widgets.lines import KeyedRow, LazyRows, Lines, escape_markup
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import BAD, MUTED, WARNING, series_style

CHART_PANEL, TABLE_PANEL = "compare-chart", "compared-runs"
# Lines of the frame and of the titles of the table, and its height with few runs.
TABLE_FRAME_ROWS, MIN_TABLE_ROWS, MAX_TABLE_SHARE = 3, 6, 0.5
# Most lines of notes that are shown. A hundred runs can have many.
MAX_NOTES = 4
# Runs that are selected at first, as many as there are colors.
FIRST_SELECTED = 8


class ComparePanels(ChartPanels[tuple[int, int]]):
    """The curves of a metric above the table of the runs. `f` fills the screen with the panel that has the focus. The
    room is the lines for the panels, and the number of runs."""

    OTHER_PANELS = (TABLE_PANEL,)

    def __init__(self, id: str) -> None:  # noqa: A002 (Textual's name)
        self._full_panel = CHART_PANEL
        super().__init__(id, (0, 0), (CHART_PANEL,))

    def compose(self) -> ComposeResult:
        for chart in self.make_charts():
            chart.has_legend = False
            yield chart
        yield Lines(selectable=True, id=TABLE_PANEL, empty_text=Text("Reading the runs …", MUTED))

    def layout_of(self, room: tuple[int, int]) -> Layout:
        if self.is_full and self._full_panel == TABLE_PANEL:
            return Layout((), ("1fr",), {TABLE_PANEL: GRID_COLUMNS})
        if self.is_full:
            return Layout((self.charts,), ("1fr",), {CHART_PANEL: GRID_COLUMNS})
        height, runs = room
        below = min(max(runs + TABLE_FRAME_ROWS, MIN_TABLE_ROWS), int(height * MAX_TABLE_SHARE))
        return Layout((self.charts,), ("1fr", str(below)), dict.fromkeys((CHART_PANEL, TABLE_PANEL), GRID_COLUMNS))

    def toggle_full(self) -> None:
        """Show only the panel that has the focus, or all panels."""
        focused = self.screen.focused
        self._full_panel = CHART_PANEL if focused is None else str(focused.id)
        super().toggle_full()
        self.query_one(f"#{self._full_panel}").focus()


DRAIN_INTERVAL_SECONDS = 0.05
# While runs are read, seconds from one drawing of all charts to the next.
READING_DRAW_SECONDS = 0.5
# Losses of single steps of several runs cover each other.
INITIAL_SMOOTHING = 0.1
# With more runs, the pale curves of all points hide the smoothed ones.
MAX_RAW_CURVES = 2


class CompareData:
    """The curves of the compared runs, None before they are read: an extent of charts."""

    def __init__(self, runs: Sequence[ReadRun] = ()) -> None:
        self.runs = tuple(run.curves for run in runs)
        self.known = [run for run in self.runs if run is not None]
        self._best_epochs = [run.described and run.described.record.values.get("best_epoch") for run in runs]

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest step of all runs; 1 before the first step."""
        return max((run.last_x(axis) for run in self.known), default=0.0) or 1.0

    def odd_limits(self, names: Iterable[str], axis: XAxis) -> tuple[float, float] | None:
        """Return the limits of the x axis of metrics whose steps differ in kind from those of others."""
        limits = [run.odd_limits(map(run.name_of, names), axis) for run in self.known]
        return next(filter(None, limits), None)

    def curve(self, index: int, letter: int, chart_id: str, axis: XAxis) -> Curve:
        """Return the curve of a run, with its letter."""
        run = self.runs[index]
        blocks = NO_BLOCKS if run is None else run.over(run.name_of(chart_id), axis)
        is_starred = chart_id == "best_val_accuracy"
        star_x = None if run is None or not is_starred else run.end_of_epoch(self._best_epochs[index], axis)
        return Curve("", blocks, series_style(letter + 1), star_x=star_x, mark=run_letter(letter))


class CompareScreen(ChartScreen):
    """Compares runs, live or ended: the curves of the selected ones, and a row of the table for each."""

    CSS_PATH = "compare.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = COMPARE_KEYS

    def __init__(self, app: AppServices, runs: Sequence[OpenedRun]) -> None:
        super().__init__(app)
        self.view = ChartView(smoothing=INITIAL_SMOOTHING)
        self.compare_poller = self.follow(ComparePoller(runs))
        self.data = CompareData()
        self._runs: tuple[ReadRun, ...] = ()
        self._values: list[ComparedValue] = []
        """The columns of the table."""
        self._letters: dict[int, int] | None = None
        """The numbers of the letters of the selected runs, by the indices of those; None before a run is read."""
        self._baseline: int | None = None
        self._chosen = {"chart": "", "order": ""}
        """Id of the chart, and label of the value that the runs are sorted by; empty for the first ones."""
        self._first_value = 0
        self._shown = (-1, False)
        """Version of what is shown, and whether all had been read."""
        self._next_draw_time = 0.0

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="message")
        yield ComparePanels(id="compare-panels")

    def on_mount(self) -> None:
        self.set_interval(DRAIN_INTERVAL_SECONDS, self._show_news)
        self._table.focus()
        self._rebuild()

    def _show_news(self) -> None:
        """Show what has been read, once in a while: all of it as soon as it has been read, then what is new of live
        runs at the rate of the screen of a run."""
        poller = self.compare_poller
        state, is_due = (poller.version, poller.caught_up), time.monotonic() >= self._next_draw_time
        if self.is_topmost and state != self._shown and (is_due or state[1] != self._shown[1]):
            self._rebuild()

    def _rebuild(self) -> None:
        """Show what has been read."""
        poller = self.compare_poller
        interval = self.gputrain_app.intervals.charts_s if poller.caught_up else READING_DRAW_SECONDS
        self._next_draw_time, self._shown = time.monotonic() + interval, (poller.version, poller.caught_up)
        self._runs, comparison = poller.runs, poller.comparison
        self.data = CompareData(self._runs)
        if comparison is not None:
            groups = comparison.columns(grouped=False)
            baseline = None if self._baseline is None else groups[self._baseline]
            values = compared_values(comparison, groups, baseline)
            # The name of a run has its state.
            self._values = [value for value in values if value.label != STATE_LABEL]
            if self._letters is None:
                self._letters = {run: letter for letter, run in enumerate(self._order()[:FIRST_SELECTED])}
        self._choose_chart()
        self.update_content()
        self.draw_charts()
        self.update_keys()

    @property
    def _sort_value(self) -> ComparedValue | None:
        """What the runs are sorted by: the chosen value, else the most important metric."""
        values = {value.label: value for value in self._values}
        return values.get(self._chosen["order"]) or next((value for value in self._values if value.better), None)

    def _order(self) -> list[int]:
        """Return the indices of the runs in the order of the table, which is empty before they are described."""
        value = self._sort_value
        return list(range(len(self._runs))) if value is None else value.order()

    @property
    def _table(self) -> Lines:
        return self.query_one(f"#{TABLE_PANEL}", Lines)

    @property
    def _selected(self) -> int:
        """Index of the run under the cursor."""
        return int(self._table.selected_key or 0)

    @property
    def chart_data(self) -> CompareData:
        return self.data

    def draw_chart(self, chart: ChartPanel) -> None:
        letters, selected = self._letters or {}, self._selected
        window = replace(self.view.window(self.data, CHART_PANEL), with_raw=len(letters) <= MAX_RAW_CURVES)
        # The curve of the run under the cursor is on top.
        drawn = sorted(letters.items(), key=lambda item: (item[0] == selected, item[1]))
        row = self.view.charts[CHART_PANEL]
        curves = [self.data.curve(index, letter, row.id, self.view.axis) for index, letter in drawn]
        chart.draw(curves, window, self.chart_note(CHART_PANEL), self.view.cursor)

    def chart_note(self, chart_id: str) -> str:
        words = self.view.settings(chart_id)
        steps = max((run.block_size(run.name_of("train_loss")) for run in self.data.known), default=1)
        if self.view.charts[chart_id].id == "train_loss" and steps > 1 and self.view.span is not None:
            words.append(f"reduced to blocks of {steps:,} steps")
        return "  ".join(words)

    def _set_view(self, view: ChartView) -> None:
        super()._set_view(view)
        self._show_table()

    def update_content(self) -> None:
        self.show_title(f"compare {pluralize(len(self._runs), 'run')}", right=self._reading_note())
        notes = self._notes()
        self.query_one("#message", TextLine).show_lines(notes)
        self._show_table()
        if self.query_one(ComparePanels).fit((self.size.height - 2 - len(notes), len(self._runs))):
            self.call_after_refresh(self.draw_charts)

    def _reading_note(self) -> str:
        read = sum(run.curves is not None for run in self._runs)
        return "" if self.compare_poller.caught_up else f"{read} of {len(self._runs)} read "

    def _notes(self) -> list[Text]:
        """Return what the user should know of the runs, wrapped."""
        error, comparison = self.compare_poller.problem, self.compare_poller.comparison
        parts = [] if error is None else [(str(error), BAD)]
        parts += [
            (f"{run.run.name} was deleted; this is its last known state", BAD) for run in self._runs if run.is_missing
        ]
        parts += [(str(note), WARNING) for note in (comparison.notes if comparison else ())]
        parts += [(f"{run.run.name}: this run {run.foreign}", WARNING) for run in self._runs if run.foreign]
        width = self.size.width - 2
        return [part for text, style in parts for part in wrap_text(Text(printable(text), style), width)][:MAX_NOTES]

    def _show_table(self) -> None:
        """Show a row for each run, the best ones first, as many columns as fit, and where the others are."""
        values, panel, letters = self._values, self._table, self._letters or {}
        if self.view.cursor is not None:
            values = [self._value_at_cursor(self.view.cursor), *values]
        runs = [self._row(index, run) for index, run in enumerate(self._runs)]
        table, self._first_value, hidden = fit_runs(runs, values, self._first_value, panel.text_width)
        order = [] if self._letters is None else self._order()
        rows = LazyRows(list(map(str, order)), lambda row: styled(table.line(runs[order[row]])))
        panel.set_rows(rows, [styled(table.header(MUTED))])
        sides = [f"← {self._first_value} more" * bool(self._first_value), f"{hidden} more →" * bool(hidden)]
        order_name = "" if (value := self._sort_value) is None else f", by {value.label}"
        title = escape_markup(f"{len(letters)} of {pluralize(len(runs), 'run')} selected{order_name}")
        panel.set_titles(title, "  ".join(filter(None, sides)))

    def _value_at_cursor(self, x: float) -> ComparedValue:
        """Return the column of the values of the selected runs at the cursor."""
        letters, chart = self._letters or {}, self.view.charts[CHART_PANEL]
        values = [
            curve_value(self.data.curve(index, 0, chart.id, self.view.axis), x) if index in letters else None
            for index in range(len(self._runs))
        ]
        metric = metric_of_key(chart.id)
        cells = tuple(UNKNOWN if value is None else format_metric(metric, value) for value in values)
        return ComparedValue(f"at {self.view.axis} {x:,.4g}", cells, tuple(values))

    def _row(self, index: int, run: ReadRun) -> ComparedRun:
        """Return the row of a run. Its note says what the symbol of its state does not."""
        state = "" if run.described is None else run.described.shown_state
        is_unread = run.curves is None and not self.compare_poller.caught_up
        notes = {state: state not in ("", RunState.FINISHED), "deleted": run.is_missing, "reading": is_unread}
        note = ", ".join(text for text, holds in (notes | {"baseline": index == self._baseline}).items() if holds)
        return ComparedRun(index, printable(run.run.name), state, (self._letters or {}).get(index), note)

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self.draw_charts()

    def _chart_rows(self) -> list[Chart]:
        """Return the charts that the runs have a value for: those of every comparison, then those of foreign runs
        and of trainings without an accuracy.

        Other runs of gputrain have all of the first ones before they have values, except for optional ones."""
        runs, charts = self.data.known, charts_of(Place.COMPARE)
        rows = compared_charts(runs, charts)
        if not any(not run.is_own or charts_without_accuracy(run) for run in runs):
            rows = [row for row in charts if row in rows or not (row.is_optional and runs)]
        monitor = None if self.compare_poller.comparison is None else self.compare_poller.comparison.monitor
        if monitor is not None and all(row.id != monitor.key for row in rows):
            rows.append(metric_chart(monitor.key, title=printable(monitor.label.removeprefix("best "))))
        return rows

    def _choose_chart(self) -> None:
        """Give the panel the chosen chart, by default that of the metric that ranks the runs."""
        rows, runs = self._chart_rows(), self.data.known
        ranking = next((value.key for value in self._values if value.better), "")
        wanted = (self._chosen["chart"], ranking, rows[0].id if rows else "")
        row = next((row for key in wanted for row in rows if row.id == key), Chart("", "", {}))
        # Curves with values of epochs are not averaged.
        is_long = all(run.is_long(row.id) for run in runs if run.has(row.id))
        self.view = replace(self.view, charts={CHART_PANEL: replace(row, smoothed=row.smoothed and is_long)})
        self.active_chart.rename(row.title)
        axes = tuple(axis for axis in X_AXES if all(axis in run.axes for run in runs))
        if axes != self.view.axes:
            axis = default_axis(runs) if self.view.axes == X_AXES else self.view.axis
            self.view = replace(self.view, axes=axes, axis=axis if axis in axes else "step")

    # Keys

    def action_sideways(self, columns: int) -> None:
        """Show other columns of the table, or move the cursor of the chart if that has the focus."""
        if self._table.has_focus:
            self._first_value = max(self._first_value + columns, 0)
        else:
            super().action_sideways(columns)
        self._show_table()

    def action_charts(self) -> None:
        """Choose the metric whose curves are drawn."""
        self._choose("Curves of", {row.id: row.title for row in self._chart_rows()}, "chart")

    def action_sort(self) -> None:
        """Choose the value that the runs are sorted by, the best ones first."""
        self._choose("Sort by", {value.label: value.label for value in self._values}, "order")

    def _choose(self, title: str, choices: Mapping[str, str], what: str) -> None:
        def answer(key: str | None) -> None:
            if key is not None:
                self._chosen[what] = key
                self._rebuild()

        rows = [KeyedRow(key, Text(printable(label))) for key, label in choices.items()]
        self.app.push_screen(ChoiceDialog(title, rows, selected=self._chosen[what]), answer)

    def action_select(self) -> None:
        """Draw the curve of the run under the cursor, or no longer."""
        letters = self._letters
        if letters is None:
            return
        if letters.pop(self._selected, None) is None:
            free = set(range(len(letters) + 1)).difference(letters.values())
            letters[self._selected] = min(free)
        self._table.action_move(1)
        self._redraw()

    def action_select_all(self) -> None:
        """Draw the curves of all runs, or of none if all are drawn."""
        is_all = len(self._letters or ()) == len(self._runs)
        self._letters = {} if is_all else {run: letter for letter, run in enumerate(self._order())}
        self._redraw()

    def _redraw(self) -> None:
        self._show_table()
        self.draw_charts()

    def action_baseline(self) -> None:
        """Show the differences from the run under the cursor, or no longer."""
        self._baseline = None if self._baseline == self._selected else self._selected
        self._rebuild()

    def action_open(self) -> None:
        """Open the screen of the run under the cursor."""
        if not self._runs:
            return
        run = self._runs[self._selected].run
        if isinstance(run, RunFolder):
            self.gputrain_app.open_run(str(run.path))
        elif isinstance(run, CommandMetrics):
            self.gputrain_app.open_run(str(run.folder))
        else:
            self.gputrain_app.open_foreign_run(run)
