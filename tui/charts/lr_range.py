"""The chart of a learning rate range test: its smoothed loss over the learning rate, and what it suggests.

`tui.tables.lr_find` prints it.
"""

from __future__ import annotations

import math

import numpy as np

from engine.optim.lr_range import LossCurve, LrSuggestion
from engine.runs.series import Series
from engine.utils.units import format_number
from tui.charts.plot import Curve, PlotWindow
from tui.palette import series_style

VALLEY, STEEPEST = "valley", "steepest"
SUGGESTION_STYLES = {VALLEY: series_style(3), STEEPEST: series_style(2)}
LOSS_STYLE = series_style(1)


def range_test_curves(curve: LossCurve, suggestion: LrSuggestion | None) -> tuple[list[Curve], PlotWindow]:
    """Return the smoothed loss below a vertical line for each suggestion, and the window that shows the whole range."""
    lr_range = curve.lr_range
    rates, losses = np.log10(curve.learning_rates), np.array(curve.smoothed, np.float64)
    series = Series(rates, np.where(np.isfinite(losses), losses, np.nan))
    curves, limits = [], series.y_limits()
    if suggestion is not None and limits is not None:
        # The one to use is drawn last: both may lie in the same column.
        for name, lr in reversed(suggested_rates(suggestion).items()):
            line = Series(np.full(2, math.log10(lr)), np.array(limits))
            curves.append(Curve(f"{name} {format_number(lr, 3)}", line, "braille", SUGGESTION_STYLES[name]))
    curves.append(Curve("loss", series, "braille", LOSS_STYLE))
    return curves, PlotWindow(math.log10(lr_range.low), math.log10(lr_range.high), x_name="lr", log_x=True)


def suggested_rates(suggestion: LrSuggestion) -> dict[str, float]:
    """Return the suggested learning rates by name, the one to use first."""
    return {VALLEY: suggestion.valley, STEEPEST: suggestion.steepest}
