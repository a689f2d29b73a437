"""The panels of the run screen: charts, ranks and log in a grid whose layout follows the size of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult

from engine.gpus.snapshot import Snapshot
from engine.show.charts import Place
from tui.pollers.runs import RunSnapshot
from tui.screens.chart_panels import ChartPanels
from tui.screens.run_layout import Layout, PanelRoom, run_layout
from tui.tables.log_lines import log_lines
from tui.tables.ranks import rank_lines
from tui.widgets.lines import KeyedRow, Lines

# The panel scrolls over these; the dialog shows more.
MAX_LOG_LINES = 200


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


class RunPanels(ChartPanels[PanelRoom]):
    """Charts, ranks and log."""

    PLACE = Place.RUN
    OTHER_PANELS = ("ranks", "log")

    def __init__(self, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id, PanelRoom(0, 0, 1, 0))

    def compose(self) -> ComposeResult:
        yield from self.make_charts()
        yield Lines(id="ranks")
        yield LogPanel(id="log")

    def layout_of(self, room: PanelRoom) -> Layout:
        return run_layout(room, full=self.is_full)

    def show(self, snapshot: RunSnapshot, gpus: Snapshot | None) -> None:
        """Show the ranks and the log. The log follows its last line, unless the user has scrolled up."""
        ranks, log = self.query_one("#ranks", Lines), self.query_one(LogPanel)
        title, lines = rank_lines(snapshot.ranks, gpus, ranks.text_width, self._layout_of_room.rows_per_rank)
        ranks.set_titles(title)
        ranks.set_texts(lines[1:], lines[:1])
        log.set_texts(log_lines(snapshot.log[-MAX_LOG_LINES:], snapshot.epochs))
        log.set_titles("log ─ following" if snapshot.row.live and log.follows else "log")
