"""The panels of the run screen: charts, ranks and log in a grid whose layout follows the size of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Container

from engine.gpus.snapshot import Snapshot
from tui.charts.view import CHART_TITLES
from tui.screens.run_layout import PanelRoom, run_layout
from tui.text.log_lines import log_lines
from tui.text.ranks import rank_lines
from tui.text.runs import RunSnapshot
from tui.widgets.chart import Chart
from tui.widgets.lines import Lines, Row

# The panel scrolls over these; the dialog shows more.
MAX_LOG_LINES = 200


class LogPanel(Lines):
    """Lines of a log. It follows the last line, unless the user has scrolled up."""

    follows = True

    def set_rows(self, rows: Sequence[Row], header: Sequence[Text] = (), empty_text: Text | None = None) -> None:
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


class RunPanels(Container):
    """Charts, ranks and log. Charts that share a place take turns: the one that was focused last is shown."""

    def __init__(self, id: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.is_full = False
        """Whether a single chart fills the screen."""
        self._focused_charts: list[str] = []
        """Charts that were focused, the latest one first."""
        self._room = PanelRoom(0, 0, 1, 0)
        self._arranged: tuple[PanelRoom, bool, list[str]] | None = None
        self._layout_of_room = run_layout(self._room)

    def compose(self) -> ComposeResult:
        for chart_id, title in CHART_TITLES.items():
            yield Chart(title, chart_id)
        yield Lines(id="ranks")
        yield LogPanel(id="log")

    def fit(self, room: PanelRoom) -> bool:
        """Arrange the panels, unless nothing has changed that the layout depends on.

        Return whether a chart appeared, which is then to be drawn.
        """
        self._room = room
        wanted = (room, self.is_full, list(self._focused_charts))
        if wanted == self._arranged:
            return False
        self._arranged = wanted
        layout = self._layout_of_room = run_layout(room, full=self.is_full)
        self.styles.grid_rows = " ".join(layout.rows)
        self.styles.grid_size_rows = len(layout.rows)
        shown = [self._shown_chart(slot) for slot in layout.slots]
        hidden = [panel for panel in self.query(Chart) if not panel.display]
        for panel in self.query(Lines):
            span = layout.span_of(str(panel.id))
            panel.display = span > 0 and (panel.id in shown or not isinstance(panel, Chart))
            if span:
                panel.styles.column_span = span
        return any(panel.display for panel in hidden)

    def _shown_chart(self, slot: Sequence[str]) -> str:
        """Return the chart of a slot that was focused last."""
        return next((chart for chart in self._focused_charts if chart in slot), slot[0])

    def show(self, snapshot: RunSnapshot, gpus: Snapshot | None) -> None:
        """Show the ranks and the log. The log follows its last line, unless the user has scrolled up."""
        ranks, log = self.query_one("#ranks", Lines), self.query_one(LogPanel)
        title, lines = rank_lines(snapshot.ranks, gpus, ranks.text_width, self._layout_of_room.rows_per_rank)
        ranks.set_titles(title)
        ranks.set_texts(lines[1:], lines[:1])
        log.set_texts(log_lines(snapshot.log[-MAX_LOG_LINES:], snapshot.epochs))
        log.set_titles("log ─ following" if snapshot.row.live and log.follows else "log")

    @property
    def active_chart(self) -> Chart:
        """The chart that was focused last, else the loss chart."""
        return self.query_one(f"#{self._focused_charts[0] if self._focused_charts else 'loss'}", Chart)

    def toggle_full(self) -> None:
        """Show only the active chart, or all panels."""
        self.is_full = not self.is_full
        self.fit(self._room)
        self.active_chart.focus()

    def focus_next_panel(self, step: int) -> None:
        """Focus the panel `step` places after the focused one, in the order of the charts, the ranks and the log."""
        layout = self._layout_of_room
        panels = [panel for panel in (*CHART_TITLES, "ranks", "log") if layout.span_of(panel)]
        focused = self.screen.focused
        index = panels.index(str(focused.id)) if focused is not None and str(focused.id) in panels else -step
        panel = panels[(index + step) % len(panels)]
        if panel in CHART_TITLES:
            self._remember_chart(panel)
            self.fit(self._room)
        self.query_one(f"#{panel}").focus()

    def _remember_chart(self, chart: str) -> None:
        self._focused_charts = [chart, *(other for other in self._focused_charts if other != chart)]

    @on(events.DescendantFocus)
    def _focus_changed(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, Chart):
            self._remember_chart(str(event.widget.id))
