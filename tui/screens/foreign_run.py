"""The screen of one run that another program recorded: its charts, its parameters and its log.

`tui.pollers.foreign_run` reads the run. It is only watched: no key changes it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.foreign.activity import Activity, activity_text
from engine.foreign.folders import ForeignRun, require_unwatched
from engine.runs.curves import Curves
from engine.show.charts import Chart, Kind, kind_of, run_charts
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from engine.utils.units import format_age, format_count
from tui.chart_choice import MAX_CHARTS, FolderCharts, read_chart_choice, save_chart_choice
from tui.charts.view import ChartView, best_note, curves_for, data_notes
from tui.keymap import FOREIGN_RUN_KEYS, Ability, Key
from tui.palette import BAD, MUTED, WARNING
from tui.pollers.foreign_run import ForeignRunPoller
from tui.pollers.process import OwnerPoller, ProcessPoller, ProcessReading
from tui.screens.base import AppServices
from tui.screens.charts import ChartScreen, file_name_of
from tui.screens.dialogs import MultiChoiceDialog, TextDialog
from tui.screens.foreign_panels import MAX_LOG_LINES, NO_CHARTS, ForeignPanels, ForeignRoom
from tui.screens.log import LogDialog
from tui.tables import fact_lines
from tui.tables.foreign_runs import parameter_text
from tui.tables.log_lines import output_line
from tui.widgets.chart import ChartPanel
from tui.widgets.lines import KeyedRow
from tui.widgets.text_line import TextLine

TICK_SECONDS = 0.1
DEFAULT_CHARTS = 6
# Opening the help takes 80 ms of a core.
KEY_SECONDS = 0.15


class ForeignRunScreen(ChartScreen):
    """Follows one run of another program."""

    CSS_PATH = "run.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = FOREIGN_RUN_KEYS
    is_own = False

    def __init__(self, app: AppServices, run: ForeignRun, process: ProcessPoller | OwnerPoller | None = None) -> None:
        """`process` watches the process of the run, if one is known."""
        super().__init__(app, Ability.ALL if self.is_own else Ability.WATCH)
        self.watched_run, self._process = run, process
        self.view = ChartView(axis="step", axes=("step",), charts=NO_CHARTS)
        self.run_poller = self.follow(self.make_poller(run))
        self._choice = read_chart_choice(run.choice_folder)
        self._charts: list[Chart] = []
        self._grouped_names: list[str] = []
        self._drawn: tuple[Curves | None, int] = (None, -1)
        self._draw_time = -math.inf
        self._status_rows = 1

    def make_poller(self, run: ForeignRun) -> ForeignRunPoller:
        """Return what reads the run."""
        return ForeignRunPoller(run, self.is_busy)

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="progress")
        yield TextLine(id="bottleneck")
        yield TextLine(id="message")
        yield ForeignPanels(id="panels")

    def on_mount(self) -> None:
        self.set_interval(TICK_SECONDS, self._show_news)
        self.active_chart.focus()

    def is_busy(self) -> bool:
        """Whether a key is likely to be handled now."""
        return time.monotonic() - self.gputrain_app.last_key_time < KEY_SECONDS

    @property
    def foreign_panels(self) -> ForeignPanels:
        return self.query_one(ForeignPanels)

    @property
    def chart_data(self) -> Curves:
        return self.run_poller.reader.curves

    def _show_news(self) -> None:
        """Draw what was read: at once after a pause, else at the rate at which screens are updated."""
        curves, poller, intervals = self.chart_data, self.run_poller, self.gputrain_app.intervals
        if (curves, curves.version) == self._drawn or not self.is_on_top:
            return
        # Drawing takes time from reading, and from a key while the run is read.
        interval = intervals.poll_s if poller.caught_up else intervals.charts_s
        has_time = poller.caught_up or (curves.num_points > 0 and not self.is_busy())
        if not has_time or time.monotonic() < self._draw_time + interval:
            return
        self.draw_charts()
        self.update_if_on_top()

    def draw_charts(self) -> None:
        self._draw_time = time.monotonic()
        self._drawn = (self.chart_data, self.chart_data.version)
        self._group_metrics()
        self._fit_panels()
        super().draw_charts()

    def _group_metrics(self) -> None:
        """Find the charts of the metrics that have points, and the x axes."""
        names = self.chart_data.names
        if names != self._grouped_names:
            self._grouped_names, self._charts = names, run_charts(self.chart_data)
            self._choose()
        axes = self.chart_data.axes
        if axes != self.view.axes:
            axis = self.view.axis if self.view.axis in axes else axes[0]
            self.view = replace(self.view, axes=axes, axis=axis)

    def _choose(self) -> None:
        """Show the charts that the user chose for this folder, else the first ones."""
        chosen = [chart for chart in self._charts if chart.id in self._choice.charts]
        panels = self.foreign_panels
        shown = [chart for chart in self._charts if chart.id not in self._choice.hidden]
        results = [chart for chart in shown if kind_of(chart.id) is not Kind.PROGRESS]
        panels.choose(chosen[:MAX_CHARTS] or (results or shown)[:DEFAULT_CHARTS])
        self.view = replace(self.view, charts=panels.chosen)

    def draw_chart(self, chart: ChartPanel) -> None:
        data, view, chart_id = self.chart_data, self.view, str(chart.id)
        row = view.charts[chart_id]
        curves, window = curves_for(data, row, view.axis), view.window(data, chart_id)
        chart.draw(curves, window, self.chart_note(chart_id), view.cursor, best_note(data, row))

    def chart_note(self, chart_id: str) -> str:
        return "  ".join([*self.view.settings(chart_id), *data_notes(self.chart_data, self.view.charts[chart_id])])

    def chart_name(self, chart_id: str) -> str:
        return file_name_of(self.view.charts[chart_id].id)

    def update_content(self) -> None:
        run = self.watched_run
        self.show_title(run.name, printable(str(run.folder)))
        self.show_status()
        if self._fit_panels() and self._drawn[0] is not None:
            self.call_after_refresh(self.draw_charts)
        self.foreign_panels.show_log(self.log_texts(), live=self.is_live)

    def log_texts(self) -> list[Text]:
        """Return the end of the log as texts for its panel."""
        return list(map(output_line, self.log_tail[-MAX_LOG_LINES:]))

    @property
    def log_tail(self) -> Sequence[str]:
        """The end of the log."""
        return self.run_poller.log

    @property
    def is_live(self) -> bool:
        """Whether the log goes on."""
        return self._activity is Activity.GROWING

    def show_status(self) -> None:
        """Show the lines below the title."""
        self.show_lines([self.progress_line()], self._process_lines(), self.message())

    def show_lines(self, progress: Sequence[Text], process: Sequence[Text], message: Sequence[Text]) -> None:
        """Show the lines below the title, those of progress, process and message."""
        self._status_rows = 0
        for selector, lines in (("#progress", progress), ("#bottleneck", process), ("#message", message)):
            line = self.query_one(selector, TextLine)
            line.display, line.styles.height = bool(lines), max(len(lines), 1)
            line.show(lines[0] if len(lines) == 1 else Text("\n", end="").join(lines))
            self._status_rows += len(lines)

    def _fit_panels(self) -> bool:
        """Arrange the panels. Return whether a chart appeared, which is then to be drawn."""
        # Title and footer have a line each.
        return self.foreign_panels.fit(self.make_room(self.size.width, self.size.height - 2 - self._status_rows))

    def make_room(self, width: int, height: int) -> ForeignRoom:
        """Return what the panels have to show in these cells."""
        return ForeignRoom(width, height, max(self.num_charts, 1), len(self.log_tail))

    @property
    def num_charts(self) -> int:
        return sum(bool(chart.metrics) for chart in self.foreign_panels.chosen.values())

    def progress_line(self) -> Text:
        """Return how much has been read, how far the run is, and when it was last written."""
        poller = self.run_poller
        line = self.reading_text()
        if poller.changed_at:
            line.append(f"   {activity_text(self._activity, poller.changed_at)}")
            if self._activity is not Activity.QUIET:
                line.append(f"   changed {format_age(max(time.time() - poller.changed_at, 0))} ago", MUTED)
        return line.append(f"   {', '.join(self.watched_run.formats)}", MUTED)

    def reading_text(self) -> Text:
        """Return how much has been read, and how far the run is."""
        poller, curves = self.run_poller, self.chart_data
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        if not poller.caught_up:
            line.append(f" {min(poller.reader.share, 0.99):.0%} read", WARNING)
        if curves.num_points:
            line.append(f" step {format_count(curves.last_x('step'))}   {pluralize(len(curves.names), 'metric')}")
            if hidden := sum(chart.id in self._choice.hidden for chart in self._charts):
                line.append(f"   {pluralize(hidden, 'chart')} hidden", MUTED)
        else:
            line.append(" No values yet" if poller.caught_up else " Reading", MUTED)
        return line

    @property
    def _reading(self) -> ProcessReading | None:
        """What is known of the process of the run."""
        return None if self._process is None else self._process.latest

    @property
    def _activity(self) -> Activity:
        return self.run_poller.activity(None if self._reading is None else self._reading.ended_at)

    def _process_lines(self) -> list[Text]:
        """Return what the process of the run uses; nothing while none is known."""
        return [] if self._reading is None else [self._reading.status_line(self.gputrain_app.gpu_poller.snapshot)]

    def message(self) -> list[Text]:
        """Return what of the run cannot be read, in one line."""
        parts = [(printable(problem), WARNING) for problem in self.run_poller.reader.problems]
        if self.run_poller.unexpected_error is not None:
            parts.insert(0, (printable(str(self.run_poller.unexpected_error)), BAD))
        elif self.run_poller.caught_up and not self.run_poller.changed_at:
            parts.insert(0, ("The files of the run were deleted; this is the last known state", BAD))
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        for text, style in parts:
            line.append(f" {text}  ", style)
        return [line] if parts else []

    def is_available(self, action: str) -> bool:
        if action == "x_axis":
            return len(self.view.axes) > 1
        if action == "log":
            return self.run_poller.log_file is not None
        if action == "hide":
            return bool(self.view.charts[str(self.active_chart.id)].metrics)
        return super().is_available(action)

    def action_charts(self) -> None:
        """Choose the charts, and remember them for this folder."""
        if not self._charts:
            self.gputrain_app.show_toast(Problem("", "The run has no metrics yet", code="not-recorded"))
            return
        shown = [chart.id for chart in self.foreign_panels.chosen.values() if chart.metrics]
        rows = [KeyedRow(chart.id, _chart_text(chart)) for chart in self._charts]
        title = f"Charts of {self.watched_run.name}, {MAX_CHARTS} at most"
        self.app.push_screen(MultiChoiceDialog(title, rows, shown), self._remember)

    def _remember(self, chosen: list[str] | None) -> None:
        if chosen is None:
            return
        if len(chosen) > MAX_CHARTS:
            reason = f"{len(chosen)} charts are too many; the first {MAX_CHARTS} are shown"
            self.gputrain_app.show_toast(Problem("", reason, code="too-many"))
        self._set_choice(self._choice.with_charts(tuple(chosen[:MAX_CHARTS])))

    def action_hide(self) -> None:
        """Hide the focused chart, for this folder. `c` shows it again."""
        chart = self.view.charts[str(self.active_chart.id)]
        if chart.metrics:
            self._set_choice(self._choice.without(chart.id))
            self.gputrain_app.show_toast(f"{printable(chart.title)} is hidden for this folder; c shows it again")

    def _set_choice(self, choice: FolderCharts) -> None:
        self._choice = choice
        self._choose()
        self.update_content()
        self.call_after_refresh(self.draw_charts)
        self.act(lambda: save_chart_choice(choice), in_thread=True)

    def action_parameters(self) -> None:
        """Show the parameters, which are read in a thread."""
        dialog = TextDialog(f"Parameters of {self.watched_run.name}", [Text("Loading …", MUTED)])

        def show(lines: list[str]) -> None:
            dialog.show([Text(line) for line in lines] or [Text("The run has no parameters in a known file", MUTED)])

        def read() -> list[str]:
            parameters = self.run_poller.reader.parameters()
            return fact_lines({key: parameter_text(value) for key, value in parameters.items()})

        self.app.push_screen(dialog)
        self.act(read, show, in_thread=True)

    def action_log(self) -> None:
        if self.run_poller.log_file is None:
            self.gputrain_app.show_toast(Problem("", "The run has no log file in its folder", code="not-found"))
            return
        self.app.push_screen(LogDialog(self.watched_run.name, lambda: self.run_poller.log))

    def action_refuse(self) -> None:
        """Say why nothing is changed."""
        self.refuse_change(self.watched_run.name)

    def export_folder(self) -> tuple[Path, str]:
        require_unwatched(Path.cwd(), [self.watched_run.folder, *self.gputrain_app.watched_paths])
        return super().export_folder()

    def export_name(self) -> str:
        return self.watched_run.folder.name


def _chart_text(chart: Chart) -> Text:
    """Return the title of a chart, and the names of its metrics if they differ from it."""
    text, names = Text(chart.title, no_wrap=True, overflow="ellipsis"), list(chart.metrics)
    return text if names == [chart.title] else text.append(f"  {', '.join(names)}", MUTED)
