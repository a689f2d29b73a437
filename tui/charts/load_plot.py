"""A graph of the past of one reading with labels on its axes, for the GPU screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tui.charts.history import history_graph, time_axis
from tui.palette import MUTED

# From this size, a graph has labels on its y axis.
MIN_LABELED_COLUMNS, MIN_LABELED_ROWS = 32, 5


@dataclass(frozen=True)
class LoadPlot:
    """Size of a graph with its labels: `columns` and `rows` of Braille, `label_width` left of them, an axis below."""

    columns: int
    rows: int
    label_width: int
    has_axis: bool

    @classmethod
    def fit(cls, width: int, height: int) -> LoadPlot:
        """Return the largest plot in a panel of this size."""
        label_width = 5 if width >= MIN_LABELED_COLUMNS and height >= MIN_LABELED_ROWS else 0
        has_axis = height >= 2
        return cls(max(width - label_width, 1), max(height - has_axis, 1), label_width, has_axis)

    @property
    def values(self) -> int:
        """Number of values that the plot shows."""
        return 2 * self.columns

    def lines(self, values: Sequence[float | None], seconds: float, limit: str) -> list[Text]:
        """Return the graph of `values` (percent of the limit), and a time axis of `seconds` that ends now."""
        graph = list(history_graph(values, self.rows))
        if self.label_width:
            labels = {0: f"{limit:>3.3} ┤", self.rows - 1: "  0 ┤"}
            graph = [
                Text.assemble((labels.get(row, "    │"), MUTED), line, no_wrap=True, end="")
                for row, line in enumerate(graph)
            ]
        if self.has_axis:
            graph.append(Text.assemble(" " * self.label_width, time_axis(seconds, self.columns), no_wrap=True, end=""))
        return graph
