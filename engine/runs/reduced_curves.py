"""Curves of a run in blocks: small enough to keep for many runs, with the extremes of every block.

`tui.pollers.compare` reads them, `tui.charts.compare_view` and `engine.report` draw them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.runs.curves import BestEpoch, CurveData, StepAxes, XAxis
from engine.runs.metrics import METRIC_PREFIX
from engine.runs.series import Series, block_extremes, block_means, block_starts

# A terminal has 500 columns of two dots at most, so that four times as many zooms in without a loss.
MAX_BLOCKS = 2048
# Metrics with a value for each step or each `step` event; all others have one for each epoch.
STEP_CURVES = ("train_loss", "lr", "grad_norm")


@dataclass(frozen=True, eq=False)
class BlockSeries:
    """A curve over steps. `points` has the extremes of each block, `means` the mean; the same object without blocks."""

    points: Series
    means: Series

    @property
    def is_reduced(self) -> bool:
        return self.points is not self.means


_NO_SERIES = Series(np.empty(0), np.empty(0))
NO_BLOCKS = BlockSeries(_NO_SERIES, _NO_SERIES)


@dataclass(frozen=True, eq=False)
class RunCurves:
    """The curves of one run. Nothing in it changes, so threads can share it."""

    metrics: Mapping[str, BlockSeries]
    """Those of `STEP_CURVES`, and those of `CurveData.epoch_metrics`."""
    axes: StepAxes
    last_step: int
    nonfinite_count: int
    """Number of losses and epoch metrics that are NaN or infinite."""
    best: BestEpoch | None

    def knows(self, axis: XAxis) -> bool:
        """Whether steps have positions on an axis."""
        return self.axes.knows(axis)

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest step; 0 before the first step."""
        return float(self.axes.positions(np.array([float(self.last_step)]), axis)[0])

    def has(self, metric: str) -> bool:
        """Whether a curve has a finite value."""
        return bool(np.isfinite(self.metrics.get(metric, NO_BLOCKS).points.y).any())

    @property
    def own_names(self) -> list[str]:
        """The names of the metrics that are not in the registry."""
        return [key.removeprefix(METRIC_PREFIX) for key in self.metrics if key.startswith(METRIC_PREFIX)]

    def over(self, metric: str, axis: XAxis) -> BlockSeries:
        """Return a curve over an x axis; an empty one of a metric that the run does not have."""
        block = self.metrics.get(metric, NO_BLOCKS)
        points = self._moved(block.points, axis)
        return BlockSeries(points, self._moved(block.means, axis) if block.is_reduced else points)

    def best_x(self, axis: XAxis) -> float | None:
        """Return the x position of the best epoch; None without a validation accuracy."""
        return None if self.best is None else float(self.axes.positions(np.array([self.best.step]), axis)[0])

    def _moved(self, series: Series, axis: XAxis) -> Series:
        return Series(self.axes.positions(series.x, axis), series.y)

    @property
    def block_steps(self) -> int:
        """Steps in one block of the training loss; 1 if every step is there."""
        block = self.metrics["train_loss"]
        return max(round(self.last_step / max(len(block.means.x), 1)), 1) if block.is_reduced else 1


def reduce_curves(data: CurveData, max_blocks: int = MAX_BLOCKS) -> RunCurves:
    """Return the curves of a run in at most `max_blocks` blocks each."""
    metrics = data.epoch_metrics("step") | {
        "train_loss": data.train_loss("step"),
        "lr": data.step_metric("lr", "step"),
        "grad_norm": data.step_metric("grad_norm", "step"),
    }
    axes = data.axes
    return RunCurves(
        {name: _reduce(series, max_blocks) for name, series in metrics.items()},
        StepAxes(axes.steps_per_epoch, _thin(axes.times), axes.sessions),
        data.last_step,
        data.nonfinite_count,
        data.best,
    )


def _reduce(series: Series, max_blocks: int) -> BlockSeries:
    if len(series.x) <= 2 * max_blocks:
        # The arrays of the data change with the next event.
        kept = Series(series.x.copy(), series.y.copy())
        return BlockSeries(kept, kept)
    starts = block_starts(len(series.x), max_blocks)
    return BlockSeries(block_extremes(series, starts), block_means(series, starts)[0])


def _thin(series: Series) -> Series:
    """Return the last and some other points. Between them, training time is all but linear."""
    kept = block_starts(len(series.x), 2 * MAX_BLOCKS)
    if len(kept):
        kept[-1] = len(series.x) - 1
    return Series(series.x[kept], series.y[kept])
