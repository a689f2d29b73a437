"""A screen with charts of one x axis: its keys change the view, the cursor and the layout.

The base of `tui.screens.run` and `tui.screens.compare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from engine.utils.errors import Problem, UsageError
from tui.charts.plot import Curve
from tui.charts.view import ChartView, Extent
from tui.keymap import Ability, Key
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.chart_panels import ChartPanels
from tui.widgets.chart import ChartPanel

MAX_FILE_NAME_CHARACTERS = 60


def file_name_of(title: str) -> str:
    """Return a part of a file name for a chart whose name is data."""
    return "".join(letter if letter.isalnum() else "-" for letter in title)[:MAX_FILE_NAME_CHARACTERS]


class ChartScreen(GputrainScreen):
    """Draws its charts.

    A subclass yields `ChartPanels` and implements `chart_data`, `draw_chart` and `chart_note`.
    """

    # Instead of Textual's, which skip the hidden charts.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_panel(1)", show=False),
        Binding("shift+tab", "next_panel(-1)", show=False),
    ]

    def __init__(self, app: AppServices, abilities: Ability = Ability.ALL) -> None:
        super().__init__(app, abilities)
        self.view = ChartView()

    @property
    def chart_data(self) -> Extent:
        """The data of the charts."""
        raise NotImplementedError

    def draw_chart(self, chart: ChartPanel) -> None:
        """Draw the curves of one chart."""
        raise NotImplementedError

    def chart_note(self, chart_id: str) -> str:
        """Return the subtitle of a chart."""
        raise NotImplementedError

    def draw_charts(self) -> None:
        """Draw all visible charts."""
        self._draw(self.panels.chart_widgets)

    def _draw(self, charts: Sequence[ChartPanel]) -> None:
        """Draw those of some charts that are visible."""
        for chart in charts:
            if chart.display and chart.id is not None:
                self.draw_chart(chart)

    @property
    def panels(self) -> ChartPanels[Any]:
        return self.query_one(ChartPanels)

    @property
    def active_chart(self) -> ChartPanel:
        """The chart that was focused last."""
        return self.panels.active_chart

    def title_of(self, key: Key) -> str:
        """Return `all panels` while one panel fills the screen."""
        return "all panels" if key.action == "full" and self.panels.is_full else key.title

    def is_available(self, action: str) -> bool:
        return action != "zoom_all" or self.view != self.view.reset_zoom()

    def _set_view(self, view: ChartView) -> None:
        """Change the view, and draw the charts that it changes."""
        before, self.view = self.view, view
        data, charts = self.chart_data, self.panels.chart_widgets
        changed = [chart for chart in charts if before.window(data, str(chart.id)) != view.window(data, str(chart.id))]
        self._draw(changed)
        self._show_cursor([chart for chart in charts if chart not in changed])
        self.update_keys()

    def action_x_axis(self) -> None:
        self._set_view(self.view.next_axis())

    def action_smooth(self) -> None:
        self._set_view(self.view.next_smoothing())

    def action_log_scale(self) -> None:
        self._set_view(replace(self.view, log=not self.view.log))

    def action_zoom(self, factor: float) -> None:
        self._set_view(self.view.zoom(self.chart_data, factor))

    def action_zoom_all(self) -> None:
        self._set_view(self.view.reset_zoom())

    def action_pan(self, share: float) -> None:
        self._set_view(self.view.pan(self.chart_data, share))

    def action_cursor(self, columns: int) -> None:
        self.view = self.view.move_cursor(self.chart_data, columns)
        self._show_cursor(self.panels.chart_widgets)

    def _show_cursor(self, charts: Sequence[ChartPanel]) -> None:
        for chart in charts:
            # A hidden chart is drawn when it appears.
            if chart.display:
                chart.set_cursor(self.view.cursor, self.chart_note(str(chart.id)))

    def action_full(self) -> None:
        self.panels.toggle_full()
        self.call_after_refresh(self.draw_charts)
        self.update_keys()

    def action_next_panel(self, step: int) -> None:
        if self.panels.focus_next_panel(step):
            self.call_after_refresh(self.draw_charts)

    def export_folder(self) -> tuple[Path, str]:
        """Return the folder of the files of `e`, and how a message names it. Raises OSError, and UsageError
        if nothing is written there."""
        return Path(), "the working directory"

    def export_curves(self, chart: ChartPanel) -> Sequence[Curve]:
        """Return the curves of a chart with all of their points."""
        return chart.curves

    def export_name(self) -> str:
        """Return the beginning of the names of these files."""
        raise NotImplementedError

    def chart_name(self, chart_id: str) -> str:
        """Return how the names of these files call a chart."""
        return chart_id

    def action_export(self) -> None:
        from tui.charts.export import export_chart

        chart, name = self.active_chart, self.export_name()
        if not any(len(curve.series.y) for curve in chart.curves):
            self.gputrain_app.show_toast(Problem("", "This chart has no data to export yet", code="not-recorded"))
            return
        place = "the working directory"
        try:
            folder, place = self.export_folder()
            folder.mkdir(exist_ok=True)
            path = export_chart(name, self.chart_name(str(chart.id)), self.export_curves(chart), self.view.axis, folder)
        except UsageError as error:
            self.gputrain_app.show_toast(error)
            return
        except OSError as error:
            self.gputrain_app.show_toast(
                Problem("", f"The chart cannot be written to {place}: {error.strerror}", code="not-writable")
            )
            return
        self.gputrain_app.show_toast(f"Saved {path.name} in {folder.absolute()}", timeout_s=8)
