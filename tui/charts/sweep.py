"""The charts of a sweep: the curves of its trials, and its values over those of one searched key.

`tui.screens.sweep` shows them with the other panels; `engine.jobs.sweeps.status` has the trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.base.ticks import log_ticks, tick_labels
from engine.runs.curves import BlockSeries, Series
from tui.charts.plot import Curve, PlotWindow
from tui.terminal.palette import SERIES, pale_style

if TYPE_CHECKING:
    from engine.jobs.sweeps.space import Space, Value
    from engine.jobs.sweeps.status import SweepStatus, TrialRow

# Each takes a millisecond; more cover each other.
MAX_CURVES = 60
MAX_LOG_TICKS = 6
# Share of the axis beside the first and the last choice.
CHOICE_MARGIN = 0.5
OUTSIDE = -1.0


def trial_curves(status: SweepStatus, selected: TrialRow) -> tuple[list[Curve], PlotWindow]:
    """Return the curves of the best trials, dashed and pale, and that of the selected one on top."""
    rows = [row for row in status.by_value()[:MAX_CURVES] if row != selected]
    curves = [_curve(status.curves[row.number], pale_style(SERIES[0]), is_dashed=True) for row in reversed(rows)]
    curves.append(_curve(status.curves[selected.number], SERIES[1]))
    steps = np.concatenate([curve.series.x for curve in curves])
    low, high = float(steps.min(initial=math.inf)), float(steps.max(initial=0.0))
    return curves, PlotWindow(min(low, high), max(high, 1.0), x_name=status.settings.step_name)


def param_curves(status: SweepStatus, key: str) -> tuple[list[Curve], PlotWindow]:
    """Return the values of the trials over those of a key, pale for trials without a final result, a star for the best
    one. The axis is as the key was searched: logarithmic, or one place a choice."""
    space = status.settings.spaces()[key]
    curves = []
    for style, is_final in ((pale_style(SERIES[0]), False), (SERIES[0], True)):
        rows = [row for row in status.trials if key in row.params and (row.state == "complete") is is_final]
        points = sorted((axis_position(space, row.params[key]), row.value) for row in rows if row.value is not None)
        curves.append(Curve("", _points(points), style))
    if status.best is not None and key in status.best.params:
        x = axis_position(space, status.best.params[key])
        curves.append(Curve("", _points([(x, status.best.value or 0.0)]), SERIES[1], star_x=x))
    return curves, _axis(space)


def axis_position(space: Space, value: Value) -> float:
    """Return the position of a value on the axis of its key."""
    from engine.jobs.sweeps.space import Choices, value_text

    if isinstance(space, Choices):
        text = value_text(value)
        return float(space.values.index(text)) if text in space.values else OUTSIDE
    return math.log10(float(value)) if space.log else float(value)


def _axis(space: Space) -> PlotWindow:
    from engine.jobs.sweeps.space import Choices

    if isinstance(space, Choices):
        places = tuple((float(index), value) for index, value in enumerate(space.values))
        return PlotWindow(-CHOICE_MARGIN, len(places) - 1 + CHOICE_MARGIN, x_ticks=places)
    if not space.log:
        return PlotWindow(space.low, space.high)
    values = log_ticks(space.low, space.high, MAX_LOG_TICKS)
    labels = zip(map(math.log10, values), tick_labels(values, log=True), strict=True)
    return PlotWindow(math.log10(space.low), math.log10(space.high), x_name="log", x_ticks=tuple(labels))


def _points(points: Sequence[tuple[float, float]]) -> BlockSeries:
    """Return points that no line connects."""
    x, y = (np.repeat(np.array([point[part] for point in points], np.float64), 2) for part in (0, 1))
    y[1::2] = np.nan
    return BlockSeries(series := Series(x, y), series)


def _curve(values: Mapping[int, float], style: str, *, is_dashed: bool = False) -> Curve:
    x, y = np.array(list(values), np.float64), np.array(list(values.values()), np.float64)
    order = np.argsort(x)
    series = Series(x[order], np.where(np.isfinite(y), y, np.nan)[order])
    return Curve("", BlockSeries(series, series, series.x[np.isnan(series.y)]), style, is_dashed)
