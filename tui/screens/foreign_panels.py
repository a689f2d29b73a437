"""The panels of the screen of a foreign run, or of a command: charts that are chosen among its metrics, the GPUs of a
command, and the end of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult

from engine.show.charts import Chart
from tui.chart_choice import MAX_CHARTS
from tui.screens.chart_panels import ChartPanels
from tui.screens.run_layout import FRAME_ROWS, GRID_COLUMNS, MIN_CHART_ROWS, MIN_ROWS_WITH_LOG, Layout
from tui.screens.run_panels import LogPanel
from tui.tables.log_lines import fit_bar
from tui.widgets.lines import Lines

PANELS = tuple(f"chart-{number}" for number in range(MAX_CHARTS))
NO_CHARTS = dict.fromkeys(PANELS, Chart("", "", {}))
# From these widths, two and three charts are beside each other.
COLUMN_WIDTHS = (80, 140)
GPU_PANEL, LOG_PANEL = "gpus", "log"
MAX_LOG_LINES = 200


@dataclass(frozen=True)
class ForeignRoom:
    """What the layout depends on: cells for the panels, number of charts, of log lines, and of lines about GPUs."""

    width: int
    height: int
    charts: int
    log_lines: int
    gpu_lines: int = 0


def foreign_layout(room: ForeignRoom, *, full: bool = False) -> Layout:
    """Return the layout; with `full`, of a single chart. The charts that have no place take turns in the last one.

    Without charts, the log has their place.
    """
    charts = PANELS[: room.charts]
    if full and charts:
        return Layout((charts,), ("1fr",), (GRID_COLUMNS,))
    gpu_rows = room.gpu_lines + FRAME_ROWS if room.gpu_lines and room.height >= MIN_ROWS_WITH_LOG else 0
    below = {GPU_PANEL: str(gpu_rows)} if gpu_rows else {}
    if not charts:
        below[LOG_PANEL] = "1fr"
        return Layout((), tuple(below.values()), (), dict.fromkeys(below, GRID_COLUMNS))
    columns = min(1 + sum(room.width >= width for width in COLUMN_WIDTHS), len(charts))
    if len(charts) == 4:
        columns = min(columns, 2)
    log_rows = min(room.log_lines, max(room.height // 5, 2)) + FRAME_ROWS if room.log_lines else 0
    if room.height - gpu_rows - log_rows <= MIN_CHART_ROWS:
        log_rows = 0
    if log_rows:
        below[LOG_PANEL] = str(log_rows)
    wanted_rows = -(-len(charts) // columns)
    chart_rows = min(max((room.height - gpu_rows - log_rows) // MIN_CHART_ROWS, 1), wanted_rows)
    places = min(chart_rows * columns, len(charts))
    slots = (*((chart,) for chart in charts[: places - 1]), charts[places - 1 :])
    spans = [GRID_COLUMNS // columns] * places
    # The last chart fills its row.
    spans[-1] += GRID_COLUMNS // columns * (chart_rows * columns - places)
    rows = ("1fr",) * chart_rows
    return Layout(slots, (*rows, *below.values()), tuple(spans), dict.fromkeys(below, GRID_COLUMNS))


class ForeignPanels(ChartPanels[ForeignRoom]):
    """Charts and log. The charts are chosen with `choose`."""

    OTHER_PANELS = (GPU_PANEL, LOG_PANEL)

    def __init__(self, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id, ForeignRoom(0, 0, 1, 0), [Chart(panel, "", {}) for panel in PANELS])
        self.chosen: Mapping[str, Chart] = NO_CHARTS
        """The charts by the ids of their panels; one without metrics in a panel that is not used."""

    def compose(self) -> ComposeResult:
        for panel in (*self.make_charts(), Lines(id=GPU_PANEL), LogPanel(id=LOG_PANEL)):
            # Until the layout is known.
            panel.display = panel.id == PANELS[0]
            yield panel

    def layout_of(self, room: ForeignRoom) -> Layout:
        return foreign_layout(room, full=self.is_full)

    def choose(self, charts: Sequence[Chart]) -> None:
        """Put these charts into the panels, the first ones of them if there are too many."""
        self.chosen = {**NO_CHARTS, **dict(zip(PANELS, charts, strict=False))}
        for widget in self.chart_widgets:
            widget.rename(self.chosen[str(widget.id)].title)

    def show_log(self, lines: Sequence[Text], *, live: bool) -> None:
        """Show the end of the log, which follows its last line unless the user has scrolled up."""
        log = self.log_panel
        log.set_texts([fit_bar(line, log.text_width) for line in lines])
        log.set_titles("log ─ following" if live and log.follows else "log")

    @property
    def log_panel(self) -> LogPanel:
        return self.get_child_by_id(LOG_PANEL, LogPanel)

    @property
    def gpu_panel(self) -> Lines:
        return self.get_child_by_id(GPU_PANEL, Lines)
