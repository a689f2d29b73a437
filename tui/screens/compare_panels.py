"""The panels of the compare screen: charts, the runs with their values at the cursor, and the table of differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult

from engine.show.charts import Chart, Place, charts_of
from tui.palette import MUTED
from tui.screens.chart_panels import ChartPanels
from tui.screens.run_layout import GRID_COLUMNS, Layout
from tui.widgets.lines import Lines

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
