"""The panels of the screen of a run: charts, chosen among its metrics, ranks or GPUs, and the end of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text
from textual.app import ComposeResult

from engine.gpus.snapshot import Snapshot
from engine.report.charts import Chart
from tui.screens.chart_panels import ChartPanels
from tui.screens.run_layout import CHART_PANELS, LOG_PANEL, RANKS_PANEL, Layout, RunRoom, run_layout
from tui.screens.tables.log_lines import fit_bar
from tui.screens.tables.ranks import RankReadings, rank_lines
from tui.screens.widgets.lines import KeyedRow, Lines

# The panel scrolls over these; the dialog shows more.
MAX_LOG_LINES = 200
NO_CHARTS = dict.fromkeys(CHART_PANELS, Chart("", "", {}))


class LogPanel(Lines):
    """Lines of a log. It follows the last line, unless the user has scrolled up."""

    follows = True

    def set_rows(self, rows: Sequence[KeyedRow], header: Sequence[Text] = (), empty_text: Text | None = None) -> None:
        super().set_rows(rows, header, empty_text)
        self._follow()

    def on_resize(self) -> None:
        super().on_resize()
        self._follow()

    def _follow(self) -> None:
        if self.follows and self.scroll_offset.y < self.max_scroll_y:
            self.scroll_to(y=self.max_scroll_y, animate=False, force=True, immediate=True)

    def action_move(self, rows: int) -> None:
        super().action_move(rows)
        self._scrolled_by_user()

    def on_mouse_scroll_up(self) -> None:
        self._scrolled_by_user()

    def on_mouse_scroll_down(self) -> None:
        self._scrolled_by_user()

    def _scrolled_by_user(self) -> None:
        self.call_after_refresh(self._update_follows)

    def _update_follows(self) -> None:
        self.follows = self.scroll_offset.y >= self.max_scroll_y


class RunPanels(ChartPanels[RunRoom]):
    """Charts, ranks and log. The charts are chosen with `choose`."""

    OTHER_PANELS = (RANKS_PANEL, LOG_PANEL)

    def __init__(self, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id, RunRoom(), CHART_PANELS)
        self.chosen: Mapping[str, Chart] = NO_CHARTS
        """The charts by the ids of their panels; one without metrics in a panel that is not used."""

    def compose(self) -> ComposeResult:
        for panel in (*self.make_charts(), Lines(id=RANKS_PANEL), LogPanel(id=LOG_PANEL)):
            # Until the layout is known.
            panel.display = panel.id == CHART_PANELS[0]
            yield panel

    def layout_of(self, room: RunRoom) -> Layout:
        return run_layout(room, full=self.is_full)

    def choose(self, charts: Sequence[Chart]) -> None:
        """Put these charts into the panels, the first ones of them if there are too many."""
        self.chosen = {**NO_CHARTS, **dict(zip(CHART_PANELS, charts, strict=False))}
        for widget in self.chart_widgets:
            widget.rename(self.chosen[str(widget.id)].title)

    @property
    def num_charts(self) -> int:
        return sum(bool(chart.metrics) for chart in self.chosen.values())

    def show_ranks(self, ranks: RankReadings, gpus: Snapshot | None) -> None:
        """Show the ranks of a training, or the GPUs of a command."""
        panel = self.get_child_by_id(RANKS_PANEL, Lines)
        title, lines = rank_lines(ranks, gpus, panel.text_width, self._layout_of_room.rows_per_rank)
        panel.set_titles(title)
        panel.set_texts(lines[1:], lines[:1])

    def show_log(self, lines: Sequence[Text], *, live: bool) -> None:
        """Show the end of the log, which follows its last line unless the user has scrolled up."""
        log = self.log_panel
        log.set_texts([fit_bar(line, log.text_width) for line in lines])
        log.set_titles("log ─ following" if live and log.follows else "log")

    @property
    def log_panel(self) -> LogPanel:
        return self.get_child_by_id(LOG_PANEL, LogPanel)
