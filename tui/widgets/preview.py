"""The preview of a run: key figures, small curves, and the config keys that it changed.

`tui.pollers.run_previews` reads the run in a thread and posts a message when there is more to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.text import Text
from textual.message import Message
from textual.timer import Timer

from engine.runs.run_row import RunRow
from engine.utils.text import printable
from tui.palette import MUTED, STRONG
from tui.phrases import when_text
from tui.pollers.run_previews import RunPreviews
from tui.pollers.watched import RefreshIntervals, Watched
from tui.tables import wrap_text
from tui.tables.preview import RunPreview, figure_lines
from tui.widgets.lines import Lines, escape_markup

if TYPE_CHECKING:
    from engine.show.charts import Chart
    from tui.charts.plot import Curve

# Keys that arrive faster than this pass over the runs in between.
DEBOUNCE_SECONDS = 0.08
# Wide enough for the changes of the config beside the figures, and for two charts beside each other.
MIN_TWO_COLUMNS, MIN_TWO_CHARTS = 84, 50
MIN_CHART_LINES, LOW_CHART_LINES, MAX_CHART_LINES = 6, 8, 30
GAP = "   "
# Gap between the curves of a legend, and whether they have labels beside their markers: the first that fits is used.
LEGENDS = (("   ", True), ("  ", True), (" ", True), ("  ", False), (" ", False))


class Preview(Lines):
    """A panel that shows the run given to `show_run`."""

    class Read(Message):
        """The run has been read for the first time."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._row: RunRow | None = None
        self._previews = RunPreviews()
        self._poller = Watched("preview", self._previews.read, interval_s=RefreshIntervals.charts_s)
        self._poller.on_poll = self._report_first
        self._timer: Timer | None = None
        self._drawn: object = None
        self._drawn_preview: RunPreview | None = None
        self.set_titles("Preview")

    def on_mount(self) -> None:
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.close()

    def show_run(self, row: RunRow | None) -> None:
        """Show a run, or nothing. Another run than before is drawn when no other one follows at once."""
        moved = (row.folder if row else None) != (self._row.folder if self._row else None)
        self._row = row
        if self._timer is not None:
            if moved:
                self._timer.reset()
        elif moved:
            self._timer = self.set_timer(DEBOUNCE_SECONDS, self._load)
        else:
            self._draw()

    def _load(self) -> None:
        self._timer = None
        shown = self._row is not None and not self._row.unreadable and self.display
        self._previews.request(self._row.folder if self._row is not None and shown else None)
        self._poller.request_poll()
        self._draw()

    def _report_first(self) -> None:
        """Have a run drawn that nothing is known of. More of it is drawn with the next refresh of the whole screen: a
        refresh of its own would cost as much as one of the screen. Called in the thread."""
        if self._drawn_preview is None:
            self.post_message(self.Read())

    def on_preview_read(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        super().on_resize()
        if self._timer is None:
            # Only a visible panel requests its run: it may have been hidden when it was given the run.
            self._load()

    def _draw(self) -> None:
        """Draw the run, if anything that is shown has changed."""
        if self._timer is not None or not self.display or not self.size.width:
            return
        if self.app.screen is not self.screen:
            # Textual repaints the whole screen on top when one below it changes.
            return
        row = self._row
        preview = self._previews.find(row.folder) if row else None
        key = (row, when_text(row) if row else "", preview, self.size)
        if key != self._drawn:
            self._drawn, self._drawn_preview = key, preview
            self.set_titles(escape_markup(printable(row.name)) if row else "Preview")
            self.set_texts(self._lines(row, preview) if row else [Text("No run is selected", MUTED)])

    @property
    def is_loading(self) -> bool:
        """Whether the run that `show_run` got is not drawn yet."""
        if self._row is None or self._row.unreadable or not self.region:
            return False
        is_read = self._previews.find(self._row.folder) is not None
        return self._timer is not None or (not is_read and self._poller.unexpected_error is None)

    def _lines(self, row: RunRow, preview: RunPreview | None) -> list[Text]:
        width, room = self.text_width, self.size.height
        two_columns = width >= MIN_TWO_COLUMNS
        column = (width - len(GAP)) // 2 if two_columns else width
        text = figure_lines(row, preview, column)
        if preview is None:
            problem = self._poller.unexpected_error or ("" if row.unreadable else "Loading …")
            return [*text, Text(""), *wrap_text(Text(printable(str(problem)), MUTED), width)]
        if room - len(text) <= MIN_CHART_LINES:
            # A low panel has as many key figures as its charts leave.
            text = text[: max(room - LOW_CHART_LINES, 0)]
            return [*text, *_chart_lines(preview, room - len(text), width)]
        if two_columns:
            text = _side_by_side(text, preview.parameter_lines(column)[: room - MIN_CHART_LINES - 1], width=column)
        return [*text, Text(""), *_chart_lines(preview, room - len(text) - 1, width)]


def _chart_lines(preview: RunPreview, room: int, width: int) -> list[Text]:
    """Return two charts beside each other in `room` lines, or the more important one where there is less width."""
    height = min(room, MAX_CHART_LINES)
    if height < MIN_CHART_LINES or not preview.charts:
        return []
    if width < MIN_TWO_CHARTS or len(preview.charts) == 1:
        return _chart(preview, preview.charts[-1], width, height)
    column = (width - len(GAP)) // 2
    left, right = (_chart(preview, chart, column, height) for chart in preview.charts)
    return _side_by_side(left, right, width=column)


def _chart(preview: RunPreview, chart: Chart, width: int, height: int) -> list[Text]:
    """Plot the curves of one chart below a line with its name and legend."""
    # NumPy is not needed for the first screen, and the poller has imported it by now.
    from tui.charts.plot import plot

    curves, name = preview.curves[chart.id], chart.title
    titles = (_legend(name, curves, gap, labeled) for gap, labeled in LEGENDS)
    title = next((title for title in titles if title.cell_len <= width), _legend(name, curves, *LEGENDS[-1]))
    title.truncate(width, overflow="ellipsis")
    lines = [title, *plot(curves, preview.windows[chart.id], width, height - 1).lines]
    return lines + [Text("")] * (height - len(lines))


def _legend(name: str, curves: Sequence[Curve], gap: str, labeled: bool) -> Text:
    """Return the name of a chart, and the marker, label and latest value of each of its curves."""
    from engine.utils.units import format_number
    from tui.widgets.chart import marker_of

    legend = Text.assemble((name, STRONG), no_wrap=True, end="")
    for curve in curves:
        value = curve.series.latest()
        sign = marker_of(curve)
        legend.append_text(Text.assemble(gap, (f"{sign} {curve.label}" if labeled else sign, curve.style)))
        if value is not None:
            legend.append(f" {format_number(value, 3)}")
    return legend


def _side_by_side(left: Sequence[Text], right: Sequence[Text], *, width: int) -> list[Text]:
    """Join two columns of lines, each `width` columns wide."""
    joined = []
    for first, second in zip_longest(left, right, fillvalue=Text("")):
        line = first.copy()
        line.truncate(width, pad=True)
        joined.append(Text.assemble(line, GAP, second, no_wrap=True, end=""))
    return joined
