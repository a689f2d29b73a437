"""Read what a preview shows of a run, for `tui.pollers.run_previews`.

`tui.tables.preview` makes text of it. The module imports NumPy and the config schema, which
takes a quarter of a second.
"""

from __future__ import annotations

import time
from dataclasses import replace

from engine.command.run_metrics import MetricsFinder
from engine.command.spec import has_command
from engine.runs.curve_reader import CurveReader
from engine.runs.curves import Curves
from engine.runs.events import (
    EpochEvent,
    RunContinued,
    RunPaused,
    RunResumed,
    RunStarted,
)
from engine.runs.folder import RunFolder
from engine.runs.journal_source import EPOCH_LOSS, journal_run
from engine.runs.record_completion import open_run, read_listed_record
from engine.runs.run_record import RunRecord, read_run_record
from engine.show.charts import Chart, run_charts
from engine.utils.files import find_file_stamp
from tui.chart_choice import read_chart_choice
from tui.charts.view import ChartView, curves_for
from tui.tables.config import config_changes
from tui.tables.preview import MAX_CHARTS, RunPreview

# A poll reads the curves for as long as this.
READ_SECONDS = 0.2
# Before the second epoch, the training loss of the steps is all there is to draw.
MIN_EPOCHS = 2
# Events that the curves need from the whole journal. All others are read from its end only.
CURVE_EVENTS = (EpochEvent, RunStarted, RunResumed, RunPaused, RunContinued)


class PreviewReader:
    """Reads a run: what is needed of its journal, or the metrics of its command, once, then what is new."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = MetricsFinder(folder) if has_command(folder) else None
        self._reader = CurveReader(journal_run(folder, CURVE_EVENTS) if self._metrics is None else self._metrics.find())
        self._state: object = None
        self._preview: RunPreview | None = None

    def poll(self) -> RunPreview:
        """Return the preview: the same object as before if the run has not changed."""
        deadline = time.monotonic() + READ_SECONDS
        if self._metrics is not None and (run := self._metrics.find()) is not self._reader.run:
            self._reader = CurveReader(run)
        while self._reader.read_slice() and time.monotonic() < deadline:
            pass
        curves, files = self._reader.curves, (self._folder.summary, self._folder.journal)
        state = (curves, curves.version, *map(find_file_stamp, files))
        if self._preview is None or state != self._state:
            self._state, self._preview = state, self._make_preview(curves)
        return self._preview

    def _make_preview(self, data: Curves) -> RunPreview:
        axis = data.axes[0]
        hidden = read_chart_choice(self._reader.run.choice_folder).hidden
        charts = [chart for chart in run_charts(data) if chart.id not in hidden][:MAX_CHARTS]
        if data.extremes(EPOCH_LOSS).count >= MIN_EPOCHS:
            charts = [_of_epochs(chart) for chart in charts]
        curves = {chart.id: curves_for(data, chart, axis) for chart in charts}
        view, record = ChartView(axis, charts={chart.id: chart for chart in charts}), self._read_record()
        windows = {chart.id: view.window(data, chart.id) for chart in charts}
        changes = config_changes(record.config or {}) if self._metrics is None else ()
        return RunPreview(str(self._folder.path), curves, windows, record, changes, tuple(charts))

    def _read_record(self) -> RunRecord:
        if self._folder.is_own:
            return open_run(self._folder).record
        # The journal of another user may be of any length.
        return read_run_record(self._folder) or read_listed_record(self._folder).record


def _of_epochs(chart: Chart) -> Chart:
    """Return the chart with the loss of each epoch in place of that of each step."""
    metrics = {EPOCH_LOSS if key == "train_loss" else key: source for key, source in chart.metrics.items()}
    return replace(chart, metrics=metrics)
