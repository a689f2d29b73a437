"""The curves of a foreign run on its charts. `tui.screens.foreign_run` draws them."""

from __future__ import annotations

import numpy as np

from engine.runs.curves import XAxis
from engine.show.charts import Chart, Source
from engine.show.foreign_charts import Kind, curve_labels, kind_of
from engine.show.foreign_curves import ForeignCurves
from engine.utils.units import format_number
from tui.charts.plot import Curve
from tui.palette import series_style

# Dashes tell the curves of a chart apart where colors cannot.
DASHED = (Source.VALIDATION, Source.TEST)
COLORS = 6


def curves_for(data: ForeignCurves, chart: Chart, axis: XAxis) -> list[Curve]:
    """Return the curves of a chart. A star marks the best value of the validation."""
    labels, curves = curve_labels(chart), list[Curve]()
    for index, (name, source) in enumerate(chart.metrics.items()):
        blocks = data.over(name, axis)
        marker = "dashed" if source in DASHED else "braille"
        style = series_style((chart.color - 1 + index) % COLORS + 1)
        means = blocks.means if blocks.is_reduced else None
        star_x = None
        if name == _scored_metric(chart) and np.isfinite(blocks.points.y).any():
            values = blocks.points.y
            star_x = float(blocks.points.x[np.nanargmin(values) if _is_low(chart) else np.nanargmax(values)])
        curves.append(Curve(labels[name], blocks.points, marker, style, star_x, means=means))
    return curves


def best_note(data: ForeignCurves, chart: Chart) -> str:
    """Return the best value of the validation, of a chart that has one."""
    name = _scored_metric(chart)
    extremes = data.extremes(name) if name is not None else None
    best = None if extremes is None else extremes.low if _is_low(chart) else extremes.high
    return "" if best is None else f"★ best {format_number(best)}"


def _scored_metric(chart: Chart) -> str | None:
    """Return the metric of a loss or an accuracy on the validation set; None without one."""
    if kind_of(chart.id) not in (Kind.LOSS, Kind.ACCURACY):
        return None
    return next((name for name, source in chart.metrics.items() if source is Source.VALIDATION), None)


def _is_low(chart: Chart) -> bool:
    return kind_of(chart.id) is Kind.LOSS


def data_notes(data: ForeignCurves, chart: Chart) -> list[str]:
    """Return how many values of a chart are not finite, and how many points are in one block."""
    not_finite = sum(data.extremes(name).not_finite for name in chart.metrics)
    block_size = max((data.block_size(name) for name in chart.metrics), default=1)
    return [
        *([f"{not_finite:,} not finite"] if not_finite else []),
        *([f"blocks of {block_size:,} points"] if block_size > 1 else []),
    ]
