"""The panels beside the fields of the form: learning rate, plan and command."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.geometry import Size

from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.runs.curves import BlockSeries
from engine.runs.series import Series
from engine.utils.errors import Problem
from engine.utils.text import printable
from engine.utils.units import UNKNOWN, format_number
from tui.charts.plot import DOTS_PER_COLUMN, Curve, PlotWindow
from tui.charts.view import LR_STYLE
from tui.form.checks import FormCheckResult
from tui.form.fields import ConfigField
from tui.form.model import lr_curve
from tui.palette import MUTED
from tui.widgets.chart import ChartPanel
from tui.widgets.text_line import TextLine

# While the number of images is unknown.
ASSUMED_STEPS_PER_EPOCH = 100
# Beginnings of the keys on which the learning rate depends.
LR_KEYS = ("optim.", "schedule.", "run.epochs")


class LearningRateChart(ChartPanel):
    """The planned learning rate. Its title shows the highest: the last one is close to 0."""

    def _legend_part(self, curve: Curve, decimals: int) -> str:
        return f"peak {format_number(float(curve.series.y.max()), 3)}"


class SidebarBlock(TextLine):
    """A text as high as its lines. An invalid form keeps the height of the text before.

    A letter often makes a value wrong and the next one right. Each change of the height would lay out the whole screen.
    """

    def __init__(self, id: str, title: str) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self.border_title = title
        self._keeps_height = False
        self._shape = (0, 0)
        """Columns and rows of the text in the layout."""

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        columns, before = self._shape
        rows = self._rows_of_text(width)
        if self._keeps_height and width == columns:
            rows = max(rows, before)
        self._shape = (width, rows)
        return rows

    def _rows_of_text(self, width: int) -> int:
        return len(self.text.wrap(self.app.console, max(width, 1)))

    def show_text(self, text: Text, *, keep_height: bool) -> None:
        """Show another text. With `keep_height`, a shorter one leaves lines empty."""
        if text == self.text:
            return
        self.show(text)
        self._keeps_height = keep_height
        columns, rows = self._shape
        needed = self._rows_of_text(columns)
        if needed > rows or (needed < rows and not keep_height):
            self.refresh(layout=True)


class FormSidebar(Container):
    """Learning rate, plan and command of the values in the form."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._drawn_curve: object = None
        self._edited: ConfigField | None = None

    def compose(self) -> ComposeResult:
        chart = LearningRateChart("Learning rate", "form-lr")
        # The input of the form keeps the focus.
        chart.can_focus = False
        yield chart
        for name, title in (("plan", "Plan"), ("command", "As a command")):
            yield SidebarBlock(name, title)

    def show_plan(self, text: Text, edited: ConfigField | None) -> None:
        """Show the plan; the panel does not become lower while the same field is edited."""
        self.query_one("#plan", SidebarBlock).show_text(text, keep_height=edited == self._edited)
        self._edited = edited

    def show_command(self, command: str | None) -> None:
        """Show the command of a valid config, None if it is invalid."""
        text = Text(UNKNOWN, MUTED) if command is None else Text(printable(command))
        self.query_one("#command", SidebarBlock).show_text(text, keep_height=command is None)

    def draw_lr_curve(self, config: Config | None, problems: Sequence[Problem], result: FormCheckResult | None) -> None:
        """Draw the learning rate over the epochs, unless a value that it depends on is wrong, or the schedule
        is the user's own."""
        chart = self.query_one(LearningRateChart)
        if (
            config is None
            or is_user_code(config.schedule.name)
            or any(problem.location.startswith(LR_KEYS) for problem in problems)
        ):
            self._drawn_curve = None
            chart.draw([], PlotWindow(0.0, 1.0))
        elif result is not None:
            steps = result.sampler.steps_per_epoch if result.sampler is not None else 0
            points = max(chart.size.width, 1) * DOTS_PER_COLUMN
            curve = (config.optim, config.schedule, config.run.epochs, result.total_ranks, steps, points)
            if curve != self._drawn_curve:
                self._drawn_curve = curve
                x, y = lr_curve(config, result.total_ranks, steps or ASSUMED_STEPS_PER_EPOCH, points)
                window = PlotWindow(0.0, float(config.run.epochs), x_name="epoch")
                series = Series(x, y)
                chart.draw([Curve("", BlockSeries(series, series), LR_STYLE)], window)
