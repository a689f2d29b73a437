"""The chart of a learning rate range test: its smoothed loss over the learning rate, and what it suggests.

`tui.tables.lr_find` prints it.
"""

from __future__ import annotations

import math

import numpy as np

from engine.optim.lr_range import LossCurve
from engine.runs.series import Series
from tui.charts.plot import Curve, PlotWindow
from tui.palette import series_style

SUGGESTION_STYLE = series_style(3)
LOSS_STYLE = series_style(1)


def range_test_curves(curve: LossCurve, suggestion: float) -> tuple[list[Curve], PlotWindow]:
    """Return the smoothed loss below a vertical line at the suggestion, and the window that shows the whole range."""
    lr_range = curve.lr_range
    rates, losses = np.log10(curve.learning_rates), np.array(curve.smoothed, np.float64)
    series = Series(rates, np.where(np.isfinite(losses), losses, np.nan))
    curves = []
    if (limits := series.y_limits()) is not None:
        line = Series(np.full(2, math.log10(suggestion)), np.array(limits))
        curves.append(Curve("suggestion", line, "braille", SUGGESTION_STYLE))
    curves.append(Curve("loss", series, "braille", LOSS_STYLE))
    return curves, PlotWindow(math.log10(lr_range.low), math.log10(lr_range.high), x_name="lr", log_x=True)
