"""Text plots: NaN, infinity and spikes of a single step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.runs.curves import BlockSeries
from engine.runs.series import FloatArray, Series, downsample_min_max, smooth
from support.replace import replace
from support.screen.plots import plain_rows
from tui.charts.plot import Curve, PlotWindow, mark_columns, plot
from tui.terminal.palette import series_style

WIDTH, HEIGHT = 60, 10


def series(values: list[float] | FloatArray) -> Series:
    y = np.asarray(values, np.float64)
    return Series(np.arange(len(y), dtype=np.float64), np.where(np.isfinite(y), y, np.nan))


def blocks(points: Series) -> BlockSeries:
    return BlockSeries(points, points)


def plot_lines(
    values: list[float] | FloatArray, *, log: bool = False, low: float = 0.0, high: float | None = None
) -> list[str]:
    curve = Curve("train", blocks(series(values)), series_style(1))
    window = PlotWindow(low, len(values) if high is None else high, log)
    return plain_rows(plot([curve], window, WIDTH, HEIGHT))


STRANGE = {
    "empty": [],
    "one point": [1.0],
    "constant": [2.0] * 9,
    "NaN": [math.nan] * 5,
    "NaN within": [1.0, math.nan, 2.0, math.nan, math.nan, 3.0],
    "infinity": [1.0, math.inf, -math.inf, 2.0],
    "zero": [0.0, 0.0],
    "negative": [-3.0, -1.0],
    "huge and tiny": [1e300, 1e-300],
    "NaN at every other place": [math.nan, 1.0] * 3000,
    "huge": [1.7e308, -1.7e308] * 500,
    "NaN at the ends": [math.nan, 1.0, 2.0, math.nan],
}


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize("values", STRANGE.values(), ids=STRANGE)
def test_plot_draws_or_explains_any_values(values: list[float], log: bool) -> None:
    lines = plot_lines(values, log=log)
    assert len(lines) in (1, HEIGHT)
    assert all(len(line) <= WIDTH for line in lines)
    if len(lines) == 1:
        assert lines[0].startswith("No ")


def test_plot_without_drawable_values_explains_why() -> None:
    assert plot_lines([]) == ["No data yet"]
    assert plot_lines([math.nan]) == ["No finite value"]
    assert plot_lines([0.0, -1.0], log=True) == ["No positive value for the log scale"]


def test_plot_leaves_gap_for_nan() -> None:
    values = [1.0] * 30 + [math.nan] * 30 + [1.0] * 30
    line = next(line for line in plot_lines(values) if "⠒" in line or "⠤" in line or "⠉" in line or "⣀" in line)
    body = line.split("┤")[-1]
    assert " " * 10 in body.strip()


@pytest.mark.parametrize(("sign", "places"), [("×", "odd"), ("↻", "restarts")])
def test_plot_marks_where_a_value_was_not_finite_or_a_run_went_on_from_an_earlier_step(sign: str, places: str) -> None:
    x = np.arange(91.0)
    points = Series(x, np.where(x == 45, np.nan, x))
    curve = Curve("", replace(BlockSeries(points, points), **{places: np.array([45.0])}), "")
    lines = plain_rows(plot([curve], PlotWindow(0, 90), 60, 12))
    left = lines[0].index("│") + 1
    assert lines[-3].index(sign) == left + round((60 - left - 1) / 2)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize(("outliers", "off_scale"), [([], (0, 0)), ([1e6], (1, 0)), ([1e-6, 1e6], (1, 1))])
def test_plot_leaves_outliers_off_scale_unless_the_whole_range_is_asked_for(
    outliers: list[float], off_scale: tuple[int, int], log: bool
) -> None:
    values = [*np.linspace(1000, 2000, 500), *outliers]
    curve = Curve("", blocks(series(values)), "")
    robust, whole = (
        plot([curve], PlotWindow(0, len(values), log, whole=is_whole), WIDTH, HEIGHT) for is_whole in (False, True)
    )
    assert robust.off_scale == off_scale
    assert whole.off_scale == (0, 0)


@pytest.mark.parametrize(("size", "share"), [(1_000, 1.0), (1_000_000, 1.0), (1_000_000, 0.3), (1_000_000, 0.001)])
def test_plot_shows_single_step_spike_at_every_zoom(size: int, share: float) -> None:
    values = np.ones(size)
    index = int(size * 0.77777)
    values[index] = 100.0
    low = max(index - share * size / 2, 0)
    top = plot_lines(values, low=low, high=low + max(share * size, 4))[:2]
    assert any(not line.split("│")[-1].split("┤")[-1].isspace() for line in top)


def test_downsample_min_max_keeps_minimum_and_maximum() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=10_000)
    pieces = downsample_min_max(series(values), 0, 10_000, 50)
    (piece,) = pieces
    columns = values.reshape(50, 200)
    assert np.array_equal(np.sort(piece.y.reshape(50, 2), 1), np.stack([columns.min(1), columns.max(1)], 1))


def test_smooth_averages_neighbors_within_gaps() -> None:
    assert np.allclose(smooth(series([1.0, 2.0, 3.0, 4.0, 5.0]), 0.4).y, [1.5, 2.0, 3.0, 4.0, 4.5])
    with_gap = smooth(series([1.0, math.nan, 3.0, 4.0, 5.0]), 0.4).y
    assert np.allclose(with_gap, [1.0, 2.0, 3.5, 4.0, 4.5])
    assert len(smooth(series(np.ones(100_000)), 0.1).y) <= 2048


@pytest.mark.parametrize("height", [4, 9, 19])
@pytest.mark.parametrize(("low", "high"), [(0.93, 0.989), (0.0, 12.0)])
def test_plot_draws_no_value_above_label_of_larger_value(height: int, low: float, high: float) -> None:
    curve = Curve("", blocks(series(np.linspace(low, high, 40))), series_style(1))
    lines = plain_rows(plot([curve], PlotWindow(0, 40), 36, height))
    labels = [(row, float(line.partition("┤")[0])) for row, line in enumerate(lines) if "┤" in line]
    highest = min(row for row, line in enumerate(lines) if any("\u2800" < character <= "\u28ff" for character in line))
    lowest = max(row for row, line in enumerate(lines) if any("\u2800" < character <= "\u28ff" for character in line))
    assert len(labels) >= 2 or height < 6
    for row, label in labels:
        assert row <= highest if label > high else row >= lowest if label < low else highest <= row <= lowest


def test_mark_columns_of_many_curves_are_disjoint() -> None:
    columns = [column for index in range(16) for column in mark_columns(index, 16, 150)]
    assert len(columns) == len(set(columns))


def test_plot_draws_array_that_has_changed_in_place() -> None:
    y = np.array([1.0, 5.0, 2.0])
    first = plot_lines(y)
    y[2] = 4.0
    assert plot_lines(y) != first
