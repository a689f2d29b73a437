"""The preview of a run: key figures, small curves, and the config keys that it changed.

`tui.pollers.runs.RunPreviews` reads the run in a thread and posts a message when there is more to show.
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
from tui.pollers.runs import RunPreviews
from tui.pollers.watched import RefreshIntervals, Watched
from tui.tables import wrap_text
from tui.tables.preview import RunPreview, figure_lines
from tui.widgets.lines import Lines, escape_markup

if TYPE_CHECKING:
    from engine.show.charts import Chart
    from tui.charts.plot import Curve

# Keys that arrive faster than this pass over the runs in between.
DEBOUNCE_SECONDS = 0.08
# Wide enough for two charts beside each other.
MIN_TWO_COLUMNS = 84
MIN_COMPACT_COLUMNS, COMPACT_CHART_LINES = 50, 8
MIN_CHART_LINES, MAX_CHART_LINES = 6, 30
# High enough for two charts below each other, which are wider then.
MIN_STACKED_LINES = 24
GAP = "   "
# Gap between the curves of a legend, and whether they have labels beside their markers: the first that fits is used.
LEGENDS = (("   ", True), ("  ", True), (" ", True), ("  ", False), (" ", False))


class Preview(Lines):
    """A panel that shows the run given to `show_run`. Without `with_text`, only its charts."""

    class Read(Message):
        """The run has been read for the first time."""

    class Drawn(Message):
        """Another run, or more of it, is shown."""

    def __init__(self, *, id: str | None = None, with_text: bool = True) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.with_text = with_text
        self._row: RunRow | None = None
        self._previews = RunPreviews()
        self._poller = Watched("preview", self._previews.read, interval_s=RefreshIntervals.charts_s)
        self._poller.on_poll = self._report_first
        self._timer: Timer | None = None
        self._drawn: object = None
        self._drawn_preview: RunPreview | None = None
        self._charts_key: object = None
        self._charts: list[list[Text]] = []
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
        key = (row, when_text(row) if row else "", preview, self.size, self.with_text)
        if key != self._drawn:
            self._drawn, self._drawn_preview = key, preview
            self.set_titles(escape_markup(printable(row.name)) if row else "Preview")
            self.set_texts(self._lines(row, preview) if row else [Text("No run is selected", MUTED)])
            self.post_message(self.Drawn())

    @property
    def preview(self) -> RunPreview | None:
        """What has been read of the run, None if nothing has."""
        return self._previews.find(self._row.folder) if self._row else None

    @property
    def is_loading(self) -> bool:
        """Whether the run that `show_run` got is not drawn yet."""
        if self._row is None or self._row.unreadable or not self.region:
            return False
        return self._timer is not None or (self.preview is None and self._poller.unexpected_error is None)

    def _lines(self, row: RunRow, preview: RunPreview | None) -> list[Text]:
        width = self.text_width
        two_columns = width >= MIN_TWO_COLUMNS
        column = (width - len(GAP)) // 2 if two_columns else width
        if preview is None:
            figures = figure_lines(row, None, column) if self.with_text else []
            problem = self._poller.unexpected_error or ("" if row.unreadable else "Loading …")
            return [*figures, Text(""), *wrap_text(Text(printable(str(problem)), MUTED), width)]
        room = self.size.height
        if not self.with_text:
            beside = two_columns and room < MIN_STACKED_LINES
            return self._chart_lines(preview, room, column if beside else width, beside=beside)
        figures, changes = figure_lines(row, preview, column), preview.parameter_lines(column)
        if two_columns:
            room -= max(len(figures), len(changes)) + 1
            if room < MIN_CHART_LINES:
                return self._compact_lines(preview, figures, self.size.height)
            charts = self._chart_lines(preview, room, column, beside=True)
            return [*_side_by_side(figures, changes, width=column), Text(""), *charts]
        if room - len(figures) - len(changes) - 2 < MIN_CHART_LINES:
            return self._compact_lines(preview, figures, room)
        charts = self._chart_lines(preview, room - len(figures) - len(changes) - 2, column, beside=False)
        return [*figures, Text(""), *charts, Text(""), *changes]

    def _compact_lines(self, preview: RunPreview, figures: Sequence[Text], room: int) -> list[Text]:
        """Return the charts for a low panel, below as many key figures as there is room for."""
        shown = list(figures[: max(room - COMPACT_CHART_LINES, 0)])
        beside = self.text_width >= MIN_COMPACT_COLUMNS
        column = (self.text_width - len(GAP)) // 2 if beside else self.text_width
        return [*shown, *self._chart_lines(preview, room - len(shown), column, beside=beside)]

    def _chart_lines(self, preview: RunPreview, room: int, width: int, *, beside: bool) -> list[Text]:
        """Return the charts, beside or below each other, in at most `room` lines; as few of them as are readable."""
        count = 1 if beside or room < 2 * MIN_CHART_LINES else 2
        height = min(room // count, MAX_CHART_LINES)
        if height < MIN_CHART_LINES:
            return []
        key = (preview, width, height, count)
        if key != self._charts_key:
            self._charts_key = key
            shown = preview.charts if beside or count == 2 else preview.charts[-1:]
            self._charts = [_chart(preview, chart, width, height) for chart in shown]
        if beside and len(self._charts) > 1:
            return _side_by_side(self._charts[0], self._charts[1], width=width)
        return [line for chart in self._charts for line in chart]


def _chart(preview: RunPreview, chart: Chart, width: int, height: int) -> list[Text]:
    """Plot the curves of one chart below a line with its name and legend."""
    # NumPy is not needed for the first screen, and the poller has imported it by now.
    from tui.charts.plot import plot

    curves, name = preview.curves[chart.id], chart.title
    titles = (_legend(name, curves, gap, labeled) for gap, labeled in LEGENDS)
    title = next((title for title in titles if title.cell_len <= width), _legend(name, curves, *LEGENDS[-1]))
    title.truncate(width, overflow="ellipsis")
    lines = [title, *plot(curves, preview.window, width, height - 1).lines]
    return lines + [Text("")] * (height - len(lines))


def _legend(name: str, curves: Sequence[Curve], gap: str, labeled: bool) -> Text:
    """Return the name of a chart, and the marker, label and latest value of each of its curves."""
    from engine.utils.units import format_number
    from tui.widgets.chart import MARKER_SYMBOLS

    legend = Text.assemble((name, STRONG), no_wrap=True, end="")
    for curve in curves:
        value = curve.series.latest()
        sign = MARKER_SYMBOLS.get(curve.marker, curve.marker)
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
