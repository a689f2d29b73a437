"""Read what a preview shows of a run, for `tui.pollers.runs.RunPreviews`.

`tui.tables.preview` makes text of it. The module imports NumPy and the config schema, which
takes a quarter of a second.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

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
from engine.utils.files import FileStamp, find_file_stamp
from tui.charts.plot import Curve
from tui.charts.view import ChartView
from tui.tables.config import config_changes
from tui.tables.preview import PREVIEW_CHARTS, RunPreview

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


def _frozen(curve: Curve) -> Curve:
    return replace(curve, series=replace(curve.series, x=curve.series.x.copy(), y=curve.series.y.copy()))
