"""Charts and other panels in a grid whose layout follows the size of the terminal: the base of `RunPanels` and
`ComparePanels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from textual import events, on
from textual.containers import Container

from tui.screens.run_layout import Layout
from tui.screens.widgets.chart import ChartPanel
from tui.screens.widgets.lines import Lines

Room = TypeVar("Room")


class ChartPanels(Container, Generic[Room]):
    """Panels in a grid. Charts that share a place take turns: the one that was focused last is shown.

    A subclass names its other panels in the order of the focus, and lays them out. `Room` is what the layout depends
    on.
    """

    OTHER_PANELS: ClassVar[Sequence[str]] = ()

    def __init__(self, id: str, room: Room, charts: tuple[str, ...]) -> None:  # noqa: A002 (Textual's name)
        """`charts` are the ids of the panels of charts, in the order of the focus."""
        super().__init__(id=id)
        self.charts = charts
        self.is_full = False
        """Whether a single panel fills the screen."""
        self._focused_charts: list[str] = []
        """Charts that were focused, the latest one first."""
        self._room = room
        self._arranged: tuple[Room, bool, list[str]] | None = None
        self._layout_of_room = self.layout_of(room)

    def make_charts(self) -> Iterator[ChartPanel]:
        """Yield a panel for each chart."""
        return (ChartPanel("", chart) for chart in self.charts)

    @property
    def chart_widgets(self) -> list[ChartPanel]:
        """The charts, hidden ones included. A query would match its selector with every widget of the screen."""
        return [panel for panel in self.children if isinstance(panel, ChartPanel)]

    def layout_of(self, room: Room) -> Layout:
        """Return the layout for a room."""
        raise NotImplementedError

    def fit(self, room: Room) -> bool:
        """Arrange the panels, unless nothing has changed that the layout depends on.

        Return whether a chart appeared, which is then to be drawn.
        """
        self._room = room
        wanted = (room, self.is_full, list(self._focused_charts))
        if wanted == self._arranged:
            return False
        self._arranged = wanted
        layout = self._layout_of_room = self.layout_of(room)
        self.styles.grid_rows = " ".join(layout.rows)
        self.styles.grid_size_rows = len(layout.rows)
        shown = [self._shown_chart(slot) for slot in layout.slots]
        hidden = [panel for panel in self.chart_widgets if not panel.display]
        for panel in self.query(Lines):
            span = layout.spans.get(str(panel.id), 0)
            panel.display = span > 0 and (panel.id in shown or not isinstance(panel, ChartPanel))
            if span:
                panel.styles.column_span = span
        return any(panel.display for panel in hidden)

    def _shown_chart(self, slot: Sequence[str]) -> str:
        """Return the chart of a slot that was focused last."""
        return next((chart for chart in self._focused_charts if chart in slot), slot[0])

    @property
    def active_chart(self) -> ChartPanel:
        """The chart that was focused last, else the first one."""
        chart = self._focused_charts[0] if self._focused_charts else self.charts[0]
        return self.get_child_by_id(chart, ChartPanel)

    def toggle_full(self) -> None:
        """Show only the active chart, or all panels."""
        self.is_full = not self.is_full
        self.fit(self._room)
        self.active_chart.focus()

    def focus_next_panel(self, step: int) -> bool:
        """Focus the panel `step` places after the focused one, in the order of the charts and the other panels.

        Return whether a chart appeared, which is then to be drawn.
        """
        layout = self._layout_of_room
        panels = [panel for panel in (*self.charts, *self.OTHER_PANELS) if panel in layout.spans]
        focused = self.screen.focused
        index = panels.index(str(focused.id)) if focused is not None and str(focused.id) in panels else -step
        panel = panels[(index + step) % len(panels)]
        appeared = False
        if panel in self.charts:
            self._remember_chart(panel)
            appeared = self.fit(self._room)
        self.query_one(f"#{panel}").focus()
        return appeared

    def _remember_chart(self, chart: str) -> None:
        self._focused_charts = [chart, *(other for other in self._focused_charts if other != chart)]

    @on(events.DescendantFocus)
    def _focus_changed(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, ChartPanel):
            self._remember_chart(str(event.widget.id))
