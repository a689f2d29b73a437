"""Read what a preview shows of a run, in a thread of `tui.pollers.PreviewPoller`.

`tui.text.preview` makes text of it. This module imports NumPy and the config schema, which take a quarter of a second.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.runs.curves import CurveData
from engine.runs.events import (
    EpochEvent,
    Event,
    RunContinued,
    RunPaused,
    RunResumed,
    RunStarted,
)
from engine.runs.folder import RunFolder
from engine.runs.journal import MAX_LINE_BYTES, JournalReader, event_type, from_line
from engine.runs.record_completion import open_run, read_listed_record
from engine.runs.run_record import RunRecord, read_run_record
from engine.utils.files import open_regular_file
from tui.charts.plot import Curve
from tui.charts.view import ChartView
from tui.text.config import config_changes
from tui.text.preview import CHARTS, RunPreview

# Before the second epoch, the training loss of the steps is all there is to draw.
MIN_EPOCHS = 2
# Events that the curves need from the whole journal. All others are read from its end only.
CURVE_EVENTS = (EpochEvent, RunStarted, RunResumed, RunPaused, RunContinued)
# A fifth of a second of comparing.
MAX_SCANNED_BYTES = 1 << 26
TAIL_BYTES = 1 << 16


class PreviewReader:
    """Reads a run: its journal once without most lines, then the new lines only."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._reader: JournalReader | None = None
        self._record_stamp: tuple[int, int] | None = None
        self._preview: RunPreview | None = None

    def poll(self) -> RunPreview:
        """Return the preview: the same object as before if the run has not changed."""
        events = self._new_events()
        stamp = _stamp(self._folder.summary)
        if self._preview is None or events or stamp != self._record_stamp:
            self._record_stamp = stamp
            for event in events:
                self._data.add(event)
            self._preview = self._make_preview()
        return self._preview

    def _new_events(self) -> list[Event]:
        try:
            size = self._folder.journal.stat().st_size
        except OSError:
            size = 0
        earlier: list[Event] = []
        if self._reader is None or size < self._reader.offset:
            self._data, self._preview = CurveData(), None
            self._reader = JournalReader(self._folder.journal)
            if size > TAIL_BYTES:
                try:
                    start = max(size - MAX_SCANNED_BYTES, 0)
                    earlier, self._reader.offset = _selected_events(self._folder.journal, start, size - TAIL_BYTES)
                except OSError:
                    self._reader.offset = size
        return [*earlier, *self._reader.poll()]

    def _make_preview(self) -> RunPreview:
        view, data = ChartView(), self._data
        curves = {chart: view.curves_for(data, chart) for chart in CHARTS}
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


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes with a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _frozen(curve: Curve) -> Curve:
    return replace(curve, series=replace(curve.series, x=curve.series.x.copy(), y=curve.series.y.copy()))


def _selected_events(journal: Path, start: int, end: int) -> tuple[list[Event], int]:
    """Read the events that the curves need, of the lines between bytes `start` and `end`.

    Returns them, and the offset of the first line that begins at byte `end` or later. Raises OSError.
    """
    events: list[Event] = []
    with open_regular_file(journal) as file:
        file.seek(start)
        offset = start
        while offset < end and (line := file.readline(MAX_LINE_BYTES)):
            offset += len(line)
            if event_type(line) in CURVE_EVENTS and (event := from_line(line)) is not None:
                events.append(event)
    return events, offset
