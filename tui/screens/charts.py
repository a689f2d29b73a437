"""A screen with charts of one x axis: its keys change the view, the cursor and the layout.

The base of `tui.screens.run` and `tui.screens.compare`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from engine.report.charts import Chart
from tui.charts.view import ChartView, Extent
from tui.screens.base import GputrainScreen
from tui.screens.chart_panels import ChartPanels
from tui.screens.dialogs import MultiChoiceDialog
from tui.screens.keymap import Ability, Key
from tui.screens.services import AppServices
from tui.screens.widgets.chart import ChartPanel
from tui.screens.widgets.lines import KeyedRow
from tui.terminal.palette import MUTED

# Without a chart, they do nothing.
CHART_ACTIONS = ("charts", "full", "x_axis", "whole_range", "zoom", "pan")


class ChartScreen(GputrainScreen):
    """Draws its charts.

    A subclass yields `ChartPanels` and implements `chart_data`, `draw_chart` and `chart_note`.
    """

    def __init__(self, app: AppServices, abilities: Ability = Ability.ALL) -> None:
        super().__init__(app, abilities)
        self.view = ChartView()
        self._charts: Sequence[Chart] = ()
        """The charts to choose from."""

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
    def shown_charts(self) -> list[Chart]:
        return [chart for chart in self.view.charts.values() if chart.metrics]

    @property
    def panels(self) -> ChartPanels[Any]:
        return self.query_one(ChartPanels)

    @property
    def active_chart(self) -> ChartPanel:
        """The chart that was focused last."""
        return self.panels.active_chart

    def title_of(self, key: Key) -> str:
        """Return `all panels` while one panel fills the screen."""
        leaves_full = self.panels.is_full and key.action in ("full", "back")
        return "all panels" if leaves_full else super().title_of(key)

    def is_available(self, action: str) -> bool:
        """Hide keys that change no chart that is shown."""
        name, charts = action.partition("(")[0], self.shown_charts
        if name == "smooth":
            return any(chart.smoothed for chart in charts)
        if name == "log_scale":
            return any(chart.log for chart in charts)
        if name == "zoom_all":
            return self.view != self.view.reset_zoom()
        return bool(charts) or name not in CHART_ACTIONS

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

    def action_whole_range(self) -> None:
        self._set_view(replace(self.view, whole=not self.view.whole))

    def action_zoom(self, factor: float) -> None:
        self._set_view(self.view.zoom(self.chart_data, factor))

    def action_zoom_all(self) -> None:
        self._set_view(self.view.reset_zoom())

    def action_pan(self, share: float) -> None:
        self._set_view(self.view.pan(self.chart_data, share))

    async def action_back(self) -> None:
        if self.panels.is_full:
            self.action_full()
        else:
            await super().action_back()

    def action_sideways(self, columns: int) -> None:
        """Move the cursor that reads values."""
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

    def show_charts(self, chosen: Collection[str]) -> None:
        """Show the charts with these ids."""
        raise NotImplementedError

    def action_charts(self) -> None:
        """Choose the charts. The first ones of too many are shown."""
        rows = [KeyedRow(chart.id, _chart_text(chart)) for chart in self._charts]
        shown = [chart.id for chart in self.shown_charts]

        def answer(chosen: list[str] | None) -> None:
            if chosen is not None:
                self.show_charts(chosen)

        title = f"Charts, {len(self.panels.charts)} at most"
        self.app.push_screen(MultiChoiceDialog(title, rows, shown), answer)


def _chart_text(chart: Chart) -> Text:
    """Return the title of a chart, and the names of its metrics if they differ from it."""
    text, names = Text(chart.title, no_wrap=True, overflow="ellipsis"), list(chart.metrics)
    return text if names == [chart.title] else text.append(f"  {', '.join(names)}", MUTED)
