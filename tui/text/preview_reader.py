"""Read what a preview shows of a run, in a thread of `tui.pollers.PreviewPoller`.

`tui.text.preview` makes text of it. This module imports NumPy and the config schema, which take a quarter of a second.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config.yaml_io import MAX_CONFIG_BYTES
from engine.runs.curves import CurveData
from engine.runs.events import (
    EpochEvent,
    Event,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
)
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal import MAX_LINE_BYTES, JournalReader, event_type, from_line
from engine.utils.files import open_regular_file, read_bytes
from tui.charts.plot import Curve
from tui.charts.view import ChartView
from tui.text.config import ConfigChange, config_changes
from tui.text.preview import CHARTS, RunPreview

# Before the second epoch, the training loss of the steps is all there is to draw.
MIN_EPOCHS = 2
# Events that the curves and figures need from the whole journal. All others are read from its end only.
CURVE_EVENTS = (EpochEvent, RunStarted, RunResumed, RunFinished, RunPaused, RunContinued)
# A fifth of a second of comparing.
MAX_SCANNED_BYTES = 1 << 26
TAIL_BYTES = 1 << 16


class PreviewReader:
    """Reads a run: its journal once without most lines, then the new lines only."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._reader: JournalReader | None = None
        self._config_stamp: tuple[int, int] | None = None
        self._changes: tuple[ConfigChange, ...] = ()
        self._preview: RunPreview | None = None

    def poll(self) -> RunPreview:
        """Return the preview: the same object as before if the run has not changed."""
        config_changed = self._read_config()
        events = self._new_events()
        if self._preview is None or events or config_changed:
            for event in events:
                self._history.add(event)
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
            self._history, self._data, self._preview = History(), CurveData(), None
            self._reader = JournalReader(self._folder.journal)
            if size > TAIL_BYTES:
                try:
                    start = max(size - MAX_SCANNED_BYTES, 0)
                    earlier, self._reader.offset = _selected_events(self._folder.journal, start, size - TAIL_BYTES)
                except OSError:
                    self._reader.offset = size
        return [*earlier, *self._reader.poll()]

    def _read_config(self) -> bool:
        """Read the config if it has changed; return whether it has."""
        try:
            status = self._folder.config.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if stamp == self._config_stamp:
                return False
            self._config_stamp = stamp
            self._changes = config_changes(read_bytes(self._folder.config, MAX_CONFIG_BYTES).decode(errors="replace"))
        except OSError:
            self._config_stamp, self._changes = None, ()
        return True

    def _make_preview(self) -> RunPreview:
        view, data, history = ChartView(), self._data, self._history
        curves = {chart: view.curves_for(data, chart) for chart in CHARTS}
        if len(history.epochs) >= MIN_EPOCHS:
            first, *others = curves["loss"]
            curves["loss"] = [replace(first, series=data.epoch_metric("train_loss", view.axis)), *others]
        # The arrays grow with the next events, which are added in another thread than the one that draws.
        curves = {chart: [_frozen(curve) for curve in group] for chart, group in curves.items()}
        return RunPreview(
            str(self._folder.path), curves, view.window(data, "loss"), history.summary(), history.started, self._changes
        )


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
