"""Curves in blocks, and x axes over sessions."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.curves import CurveData
from engine.runs.events import StepEvent
from engine.runs.reduced_curves import MAX_BLOCKS, reduce_curves
from engine.runs.series import Series, mean_and_spread
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from tui.charts.compare_view import CompareData, ComparedCurves


def make_data(steps: int, first: int = 0) -> CurveData:
    """A run with a loss of every step and one step event, an epoch of 10 steps."""
    data = CurveData()
    data.add(make_run_started(0.0))
    losses = [float(step % 7) for step in range(first, first + steps)]
    data.add(StepEvent(time=3600.0, step=steps, epoch=1, losses=losses, lr=0.1, images_per_second=1.0, data_wait=0.0))
    data.add(replace(make_epoch(1, 0.75), step=steps, metrics={"val/f1 x": 0.5}))
    return data


def test_reduce_keeps_extremes_and_means_of_each_block() -> None:
    data = make_data(100_000)
    data._losses.set(54_321, [1e6])
    loss = reduce_curves(data).metrics["train_loss"]
    assert loss.is_reduced
    assert len(loss.points.x) == 2 * len(loss.means.x) == 2 * MAX_BLOCKS
    assert loss.points.y.max() == 1e6
    assert loss.points.y.min() == 0.0
    plain = reduce_curves(make_data(100_000)).metrics["train_loss"].means.y
    assert np.abs(plain - 3.0).max() < 0.1


def test_reduce_keeps_short_curves_and_copies_them() -> None:
    data = make_data(50)
    curves = reduce_curves(data)
    loss = curves.metrics["train_loss"]
    data._losses.set(0, [99.0])
    assert not loss.is_reduced
    assert (len(loss.points.x), loss.points.y[0], curves.block_steps) == (50, 0.0, 1)


def test_reduce_takes_the_validation_of_the_ema_weights() -> None:
    data = make_data(10)
    data.add(replace(make_epoch(2, 0.5), step=20, ema_val_accuracy=0.875, ema_val_loss=0.25))
    curves = reduce_curves(data)
    assert curves.metrics["best_val_accuracy"].points.y.tolist() == [0.75, 0.875]
    assert curves.metrics["best_val_loss"].points.y.tolist() == [1.1, 0.25]
    assert curves.metrics["val_loss"].points.y.tolist() == [1.1, 0.55]
    assert curves.best is not None
    assert curves.best.accuracy == 0.875


def test_images_axis_adds_up_sessions_with_other_batches() -> None:
    data = CurveData()
    data.add(replace(make_run_started(0.0), global_batch=64))
    data.add(replace(make_run_resumed(10, 100.0), global_batch=32))
    data.add(replace(make_run_resumed(20, 200.0), global_batch=128))
    steps = np.array([0.0, 5.0, 10.0, 15.0, 20.0, 21.0])
    assert data.x_positions(steps, "images").tolist() == [0, 320, 640, 800, 960, 1088]
    # A session that resumes before the last one replaces it.
    data.add(replace(make_run_resumed(5, 300.0), global_batch=10))
    assert data.x_positions(steps, "images").tolist() == [0, 320, 370, 420, 470, 480]


def test_reduced_axes_agree_with_the_data() -> None:
    data = CurveData()
    data.add(make_run_started(0.0))
    for step in range(10, 60_000, 10):
        data.add(
            StepEvent(
                time=step * 0.5, step=step, epoch=1, losses=[1.0] * 10, lr=0.1, images_per_second=1.0, data_wait=0.0
            )
        )
    curves, steps = reduce_curves(data), np.array([1.0, 777.0, 59_990.0])
    for axis in ("epoch", "step", "images", "hours"):
        assert np.allclose(curves.axes.positions(steps, axis), data.x_positions(steps, axis))
        assert curves.last_x(axis) == pytest.approx(data.last_x(axis))


def test_mean_and_spread_are_those_of_the_runs_that_got_so_far() -> None:
    x = np.array([1.0, 2.0, 3.0])
    mean, (low, high) = mean_and_spread([Series(x, np.array([1.0, 2.0, 3.0])), Series(x[:2], np.array([3.0, 2.0]))])
    assert mean.x.tolist() == [1, 2, 3]
    assert mean.y.tolist() == [2, 2, 3]
    assert low.y[:2].tolist() == pytest.approx([2 - 2**0.5, 2.0])
    assert high.y[:2].tolist() == pytest.approx([2 + 2**0.5, 2.0])
    assert np.isnan(low.y[2])


def test_compare_data_has_a_band_for_a_group() -> None:
    runs = [reduce_curves(make_data(50, first)) for first in range(3)]
    entries = [ComparedCurves("A", "seeds", 1, tuple(runs[:2])), ComparedCurves("B", "other", 2, (runs[2],))]
    data = CompareData(entries)
    group, other = data.curves_for("train_loss", "step")
    assert group.band is not None
    assert (other.band, other.mark) == (None, "B")
    assert data.last_x("epoch") == 5.0
