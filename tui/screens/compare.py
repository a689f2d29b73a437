"""Several runs side by side: their curves on the same charts, the config keys that differ, and their metrics.

`tui.pollers.compare` reads the runs, `tui.tables.compare` makes the tables.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.command.metric_files import CommandMetrics
from engine.runs.comparison import Comparison
from engine.runs.curves import NO_BLOCKS, X_AXES, Curves, XAxis, default_axis
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder
from engine.runs.metrics import metric_of_key
from engine.show.charts import Chart, Place, charts_of, compared_charts
from engine.show.table import fit
from engine.utils.text import pluralize, printable
from tui.charts.plot import Curve
from tui.charts.view import ChartView
from tui.keymap import COMPARE_KEYS, Key
from tui.palette import BAD, MUTED, WARNING, series_style
from tui.pollers.compare import ComparePoller, ReadRun
from tui.screens.base import AppServices
from tui.screens.chart_panels import ChartPanels
from tui.screens.charts import ChartScreen
from tui.screens.run_layout import GRID_COLUMNS, Layout
from tui.tables import styled
from tui.tables.compare import (
    ENTRY_COLUMNS,
    CompareEntry,
    compare_rows,
    differences_header,
    fit_differences,
    run_letter,
)
from tui.widgets.chart import ChartPanel, curve_value
from tui.widgets.lines import KeyedRow, Lines, escape_markup
from tui.widgets.text_line import TextLine

RUNS_PANEL, TABLE_PANEL = "compared-runs", "differences"
MIN_COLUMNS_OF_TWO_CHARTS, MIN_ROWS_OF_FOUR_CHARTS = 100, 40
# Maximum share of the height for the tables, and their minimum number of rows.
MAX_TABLE_SHARE, MIN_TABLE_ROWS, FRAME_ROWS = 0.45, 6, 2
# Runs of gputrain have all charts but that of the gradient norm; further ones are those of foreign runs.
MIN_CHARTS = 4
FURTHER_PANELS = ("chart-5", "chart-6", "chart-7")
# The panel of the runs needs fewer columns than the table.
RUNS_SPAN, WIDE_RUNS_SPAN, MIN_WIDE_COLUMNS = 5, 4, 140


@dataclass(frozen=True)
class CompareRoom:
    """What the layout depends on: cells for the panels, lines of the longer one of the lower panels, and how many of
    the charts there are."""

    width: int
    height: int
    lines: int
    charts: int = MIN_CHARTS


class ComparePanels(ChartPanels[CompareRoom]):
    """Charts above, runs and differences below. `f` fills the screen with the panel that has the focus."""

    OTHER_PANELS = (RUNS_PANEL, TABLE_PANEL)

    def __init__(self, id: str) -> None:  # noqa: A002 (Textual's name)
        self._full_panel = ""
        further = [Chart(panel, "", {}) for panel in FURTHER_PANELS]
        super().__init__(id, CompareRoom(0, 0, 0), [*charts_of(Place.COMPARE), *further])

    def compose(self) -> ComposeResult:
        yield from self.make_charts()
        yield Lines(selectable=True, id=RUNS_PANEL)
        yield Lines(id=TABLE_PANEL, empty_text=Text("Reading the runs …", MUTED))

    def layout_of(self, room: CompareRoom) -> Layout:
        charts = self.charts[: max(room.charts, 1)]
        if self.is_full:
            if self._full_panel:
                return Layout((), ("1fr",), (), {self._full_panel: GRID_COLUMNS})
            return Layout((charts,), ("1fr",), (GRID_COLUMNS,))
        slots: Sequence[tuple[str, ...]] = (charts,)
        if room.width >= MIN_COLUMNS_OF_TWO_CHARTS:
            slots = ((charts[0], *charts[3:]), charts[1:3])
            if room.height >= MIN_ROWS_OF_FOUR_CHARTS:
                slots = (charts[:1], charts[1:2], charts[2:3], charts[3:])
            slots = tuple(filter(None, slots))
        slot_spans = [GRID_COLUMNS // 2] * len(slots)
        if len(slots) % 2:
            # The last chart fills its row.
            slot_spans[-1] = GRID_COLUMNS
        rows = ["1fr"] * -(-len(slots) // 2)
        below = min(max(room.lines + FRAME_ROWS, MIN_TABLE_ROWS), int(room.height * MAX_TABLE_SHARE))
        runs_span = WIDE_RUNS_SPAN if room.width >= MIN_WIDE_COLUMNS else RUNS_SPAN
        spans = {RUNS_PANEL: runs_span, TABLE_PANEL: GRID_COLUMNS - runs_span}
        return Layout(tuple(slots), (*rows, str(below)), tuple(slot_spans), spans)

    def rename_charts(self, charts: Mapping[str, Chart]) -> None:
        """Give the panels the titles of these charts, by the ids of the panels."""
        for widget in self.chart_widgets:
            widget.rename(charts[str(widget.id)].title)

    def toggle_full(self) -> None:
        """Show only the panel that has the focus, or all panels."""
        focused = self.screen.focused
        panel = str(focused.id) if focused is not None else ""
        self._full_panel = panel if panel in self.OTHER_PANELS and not self.is_full else ""
        self.is_full = not self.is_full
        self.fit(self._room)
        if panel in self.OTHER_PANELS:
            self.query_one(f"#{panel}").focus()
        else:
            self.active_chart.focus()


DRAIN_INTERVAL_SECONDS = 0.05
# While runs are read, seconds from one drawing of all charts to the next.
READING_DRAW_SECONDS = 0.5
# Losses of single steps of several runs cover each other.
INITIAL_SMOOTHING = 0.02
# With more runs, the pale curves of all points hide the smoothed ones.
MAX_RAW_CURVES = 2


class CompareData:
    """The curves of the compared runs, None before they are read: an extent of charts."""

    def __init__(self, runs: Sequence[Curves | None] = ()) -> None:
        self.runs = tuple(runs)
        self.known = [run for run in runs if run is not None]

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest step of all runs; 1 before the first step."""
        return max((run.last_x(axis) for run in self.known), default=0.0) or 1.0

    def odd_limits(self, names: Iterable[str], axis: XAxis) -> tuple[float, float] | None:
        """Return the limits of the x axis of metrics whose steps differ in kind from those of others."""
        limits = [run.odd_limits(map(run.name_of, names), axis) for run in self.known]
        return next(filter(None, limits), None)

    def curves_for(self, chart_id: str, axis: XAxis) -> list[Curve]:
        """Return a curve for each run, with its letter."""
        return [_curve(index, run, chart_id, axis) for index, run in enumerate(self.runs)]


def _curve(index: int, run: Curves | None, chart_id: str, axis: XAxis) -> Curve:
    blocks = NO_BLOCKS if run is None else run.over(run.name_of(chart_id), axis)
    best = None if run is None or chart_id != "best_val_accuracy" else run.best(axis)
    star_x = None if best is None else best.x
    return Curve("", blocks, series_style(index + 1), star_x=star_x, mark=run_letter(index))


class CompareScreen(ChartScreen):
    """Compares runs, live or ended."""

    CSS_PATH = "compare.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = COMPARE_KEYS

    def __init__(self, app: AppServices, runs: Sequence[OpenedRun]) -> None:
        super().__init__(app)
        self.view = ChartView(smoothing=INITIAL_SMOOTHING)
        self.compare_poller = self.follow(ComparePoller(runs))
        self.data = CompareData()
        self._runs: tuple[ReadRun, ...] = ()
        self._comparison: Comparison | None = None
        self._chosen: Collection[str] = ()
        self._num_charts = 0
        self._shown = (-1, False)
        """Version of what is shown, and whether all had been read."""
        self._next_draw_time = 0.0

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="message")
        yield ComparePanels(id="compare-panels")

    def on_mount(self) -> None:
        self.set_interval(DRAIN_INTERVAL_SECONDS, self._show_news)
        self.query_one(ComparePanels).active_chart.focus()
        self._rebuild()

    def _show_news(self) -> None:
        """Show what has been read, once in a while: all of it as soon as it has been read, then what is new of live
        runs at the rate of the screen of a run."""
        poller = self.compare_poller
        state, is_due = (poller.version, poller.caught_up), time.monotonic() >= self._next_draw_time
        if self.is_on_top and state != self._shown and (is_due or state[1] != self._shown[1]):
            self._rebuild()

    def _rebuild(self) -> None:
        """Show what has been read."""
        poller = self.compare_poller
        interval = self.gputrain_app.intervals.charts_s if poller.caught_up else READING_DRAW_SECONDS
        self._next_draw_time, self._shown = time.monotonic() + interval, (poller.version, poller.caught_up)
        self._comparison, self._runs = poller.comparison, poller.runs
        self.data = CompareData([run.curves for run in self._runs])
        self._choose_charts()
        self.update_content()
        self.draw_charts()
        self.update_keys()

    @property
    def _selected(self) -> int:
        """Index of the run under the cursor of the list."""
        key = self.query_one(f"#{RUNS_PANEL}", Lines).selected_key
        return min(int(key), max(len(self._runs) - 1, 0)) if key is not None else 0

    @property
    def _names(self) -> list[str]:
        return [printable(run.run.name) for run in self._runs]

    @property
    def chart_data(self) -> CompareData:
        return self.data

    def draw_chart(self, chart: ChartPanel) -> None:
        chart_id = str(chart.id)
        window = replace(self.view.window(self.data, chart_id), with_raw=len(self.data.runs) <= MAX_RAW_CURVES)
        chart.draw(
            self.data.curves_for(self.view.charts[chart_id].id, self.view.axis),
            window,
            self.chart_note(chart_id),
            self.view.cursor,
        )
        if chart is self.active_chart:
            self._show_runs()

    def chart_note(self, chart_id: str) -> str:
        words = self.view.settings(chart_id)
        steps = max((run.block_size(run.name_of("train_loss")) for run in self.data.known), default=1)
        if self.view.charts[chart_id].id == "train_loss" and steps > 1 and self.view.span is not None:
            words.append(f"reduced to blocks of {steps:,} steps")
        return "  ".join(words)

    def _set_view(self, view: ChartView) -> None:
        super()._set_view(view)
        self._show_runs()

    def action_sideways(self, columns: int) -> None:
        super().action_sideways(columns)
        self._show_runs()

    def update_content(self) -> None:
        self.show_title(f"compare {pluralize(len(self._runs), 'run')}", right=self._reading_note())
        message = self._message()
        line = self.query_one("#message", TextLine)
        line.display = bool(message.plain)
        line.show(message)
        self._show_table(bool(message.plain))
        self._show_runs()

    def _reading_note(self) -> str:
        runs = self._runs
        read = sum(run.curves is not None for run in runs)
        return "" if self.compare_poller.caught_up else f"{read} of {len(runs)} read "

    def _message(self) -> Text:
        """Return what the user should know of the runs, in one line."""
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        parts: list[tuple[str, str]] = []
        if (error := self.compare_poller.unexpected_error) is not None:
            parts.append((str(error), BAD))
        parts += [
            (f"{run.run.name} was deleted; this is its last known state", BAD) for run in self._runs if run.is_missing
        ]
        parts += [(str(note), WARNING) for note in (self._comparison.notes if self._comparison else ())]
        parts += [(f"{run.run.name}: this run {run.foreign}", WARNING) for run in self._runs if run.foreign]
        for text, style in parts:
            line.append("   " if line.plain else " ").append(printable(text), style)
        return line

    def _show_table(self, with_message: bool) -> None:
        comparison = self._comparison
        panel = self.query_one(f"#{TABLE_PANEL}", Lines)
        lines = len(self._runs)
        if comparison is not None:
            # The states are in the list of the runs.
            names, rows = self._names, compare_rows(comparison, comparison.columns(grouped=False))[1:]
            table = fit_differences(rows, len(names), self._selected, panel.text_width)
            lines = max(len(rows), len(names)) + 1
            panel.set_texts([styled(table.line(row)) for row in rows], [styled(differences_header(table, names))])
            keys = len(comparison.differences)
            kind = "parameter" if all(run.formats for run in comparison.runs) else "config key"
            panel.set_titles(f"{pluralize(keys, kind)} differ{'s' if keys == 1 else ''}, and figures")
        room = CompareRoom(self.size.width, self.size.height - 2 - with_message, lines, self._num_charts)
        if self.query_one(ComparePanels).fit(room):
            self.call_after_refresh(self.draw_charts)

    def _show_runs(self) -> None:
        """Show the runs with their values at the cursor, or the latest ones."""
        panel, chart = self.query_one(f"#{RUNS_PANEL}", Lines), self.active_chart
        row = self.view.charts[str(chart.id)]
        entries = []
        for index, (name, run) in enumerate(zip(self._names, self._runs, strict=True)):
            curve = chart.curves[index] if index < len(chart.curves) else None
            value = None if curve is None else curve_value(curve, self.view.cursor)
            entries.append(CompareEntry(index, name, self._note_on(run), metric_of_key(row.id), value))
        table = fit(ENTRY_COLUMNS, entries, panel.text_width)
        panel.set_rows([KeyedRow(str(index), styled(table.line(entry))) for index, entry in enumerate(entries)])
        where = "latest" if self.view.cursor is None else f"{self.view.axis} {self.view.cursor:,.6g}"
        panel.set_titles(escape_markup(f"{row.title}, {where}"))

    def _note_on(self, run: ReadRun) -> str:
        if run.is_missing:
            return "deleted"
        if run.curves is None and not self.compare_poller.caught_up:
            return "reading"
        return "" if run.described is None or run.described.state == "finished" else run.described.state

    def on_lines_moved(self, event: Lines.Moved) -> None:
        if event.lines.id == RUNS_PANEL:
            self._show_table(self.query_one("#message").display)
            self.update_keys()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_open()

    @property
    def _foreign(self) -> list[Curves]:
        """The curves of the foreign runs that have been read."""
        return [run for run in self.data.known if not run.is_own]

    def _chart_rows(self) -> list[Chart]:
        """Return the charts that the runs have a value for: those of every comparison, then those of foreign runs.

        Runs of gputrain have all of the first ones before they have values, except for optional ones."""
        runs, charts = self.data.known, charts_of(Place.COMPARE)
        rows = compared_charts(runs, charts)
        return rows if self._foreign else [row for row in charts if row in rows or not (row.is_optional and runs)]

    def _choose_charts(self) -> None:
        """Give each panel its chart."""
        panels, rows, runs = self.query_one(ComparePanels), self._chart_rows(), self.data.known
        if self._chosen:
            rows = [row for row in rows if row.id in self._chosen] or rows
        rows = rows[: len(panels.charts)]
        self._num_charts = len(rows)
        # Curves with values of epochs are not averaged.
        is_long = {row.id: all(run.is_long(row.id) for run in runs if run.has(row.id)) for row in rows}
        rows = [replace(row, smoothed=row.smoothed and is_long[row.id]) for row in rows]
        charts = dict.fromkeys(panels.charts, Chart("", "", {})) | dict(zip(panels.charts, rows, strict=False))
        self.view = replace(self.view, charts=charts)
        panels.rename_charts(charts)
        axes = tuple(axis for axis in X_AXES if all(axis in run.axes for run in runs))
        if axes != self.view.axes:
            axis = default_axis(runs) if self.view.axes == X_AXES else self.view.axis
            self.view = replace(self.view, axes=axes, axis=axis if axis in axes else "step")

    def chart_choices(self) -> Sequence[Chart]:
        return self._chart_rows()

    def show_charts(self, chosen: Collection[str]) -> None:
        self._chosen = chosen
        self._rebuild()

    def is_available(self, action: str) -> bool:
        if action == "charts":
            return bool(self._foreign)
        return super().is_available(action)

    def action_open(self) -> None:
        """Open the screen of the selected run."""
        if not self._runs:
            return
        run = self._runs[self._selected].run
        if isinstance(run, RunFolder):
            self.gputrain_app.open_run(str(run.path))
        elif isinstance(run, CommandMetrics):
            self.gputrain_app.open_run(str(run.folder))
        else:
            self.gputrain_app.open_foreign_run(run)
