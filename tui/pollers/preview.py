"""Read what a preview shows of a run, for `tui.pollers.runs.RunPreviews`.

`tui.tables.preview` makes text of it. The module imports NumPy and the config schema, which
takes a quarter of a second.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain

from engine.command.run_metrics import MetricsFinder
from engine.command.spec import has_command
from engine.runs.curves import CurveData
from engine.runs.events import (
    EpochEvent,
    RunContinued,
    RunPaused,
    RunResumed,
    RunStarted,
)
from engine.runs.folder import RunFolder
from engine.runs.journal_follower import JournalFollower
from engine.runs.record_completion import open_run, read_listed_record
from engine.runs.run_record import RunRecord, read_run_record
from engine.show.foreign_charts import group_metrics
from engine.show.foreign_curves import CurveReader
from engine.utils.files import FileStamp, find_file_stamp
from tui.chart_choice import read_chart_choice
from tui.charts.foreign_view import curves_for
from tui.charts.plot import Curve
from tui.charts.view import ChartView
from tui.tables.config import config_changes
from tui.tables.preview import MAX_CHARTS, PREVIEW_CHARTS, RunPreview

# A poll reads the metrics of a command for as long as this.
READ_SECONDS = 0.2
# Before the second epoch, the training loss of the steps is all there is to draw.
MIN_EPOCHS = 2
# Events that the curves need from the whole journal. All others are read from its end only.
CURVE_EVENTS = (EpochEvent, RunStarted, RunResumed, RunPaused, RunContinued)


class PreviewReader:
    """Reads a run: its journal once without most lines, then the new lines only."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._data, self._journal = CurveData(), JournalFollower(folder.journal, CURVE_EVENTS)
        self._record_stamp: FileStamp | None = None
        self._preview: RunPreview | None = None

    def poll(self) -> RunPreview:
        """Return the preview: the same object as before if the run has not changed."""
        if self._journal.look():
            self._data, self._preview = CurveData(), None
        events = list(chain.from_iterable(self._journal.chunks()))
        stamp = find_file_stamp(self._folder.summary)
        if self._preview is None or events or stamp != self._record_stamp:
            self._record_stamp = stamp
            for event in events:
                self._data.add(event)
            self._preview = self._make_preview()
        return self._preview

    def _make_preview(self) -> RunPreview:
        view, data = ChartView(), self._data
        curves = {chart.id: view.curves_for(data, chart.id) for chart in PREVIEW_CHARTS}
        per_epoch = data.epoch_metric("train_loss", view.axis)
        if len(per_epoch.y) >= MIN_EPOCHS:
            first, *others = curves["loss"]
            curves["loss"] = [replace(first, series=per_epoch), *others]
        # The arrays grow with the next events, which are added in another thread than the one that draws.
        curves = {chart: [_frozen(curve) for curve in group] for chart, group in curves.items()}
        window = view.window(data, "loss")
        record = self._read_record()
        return RunPreview(str(self._folder.path), curves, window, record, config_changes(record.config or {}))

    def _read_record(self) -> RunRecord:
        if self._folder.is_own:
            return open_run(self._folder).record
        # The journal of another user may be of any length.
        return read_run_record(self._folder) or read_listed_record(self._folder).record


class CommandPreviewReader:
    """Reads the run of a command: its metrics at first, then what is new."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._metrics = folder, MetricsFinder(folder)
        self._reader: CurveReader | None = None
        self._state: object = None
        self._preview: RunPreview | None = None

    def poll(self) -> RunPreview:
        """Return the preview: the same object as before if the run has not changed."""
        run, deadline = self._metrics.find(), time.monotonic() + READ_SECONDS
        reader = self._reader
        if reader is None or reader.run is not run:
            reader = self._reader = CurveReader(run)
        while reader.read_slice() and time.monotonic() < deadline:
            pass
        data = reader.curves
        state = (data, data.version, find_file_stamp(self._folder.summary))
        if self._preview is None or state != self._state:
            self._state = state
            hidden = read_chart_choice(run.choice_folder).hidden
            charts = [chart for chart in group_metrics(data.names) if chart.id not in hidden][:MAX_CHARTS]
            curves = {chart.id: curves_for(data, chart, "step") for chart in charts}
            record = read_run_record(self._folder) or read_listed_record(self._folder).record
            window = ChartView("step").window(data, "loss")
            self._preview = RunPreview(str(self._folder.path), curves, window, record, (), tuple(charts))
        return self._preview


def make_preview_reader(folder: RunFolder) -> PreviewReader | CommandPreviewReader:
    """Return the reader for a run."""
    return CommandPreviewReader(folder) if has_command(folder) else PreviewReader(folder)


def _frozen(curve: Curve) -> Curve:
    return replace(curve, series=replace(curve.series, x=curve.series.x.copy(), y=curve.series.y.copy()))
