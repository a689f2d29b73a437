"""The curves of several runs on one chart."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.curves import Curves
from engine.runs.series import Series, mean_and_spread
from support.replace import replace
from support.runs.curves import curves_of
from support.runs.event_factories import make_epoch, make_run_started, make_step
from tui.charts.compare_view import CompareData, ComparedCurves


def make_curves(first: int) -> Curves:
    losses = [float(step % 7) for step in range(first, first + 50)]
    return curves_of(make_run_started(0.0), replace(make_step(50), losses=losses), make_epoch(5, 0.75))


def test_mean_and_spread_are_those_of_the_runs_that_got_so_far() -> None:
    x = np.array([1.0, 2.0, 3.0])
    mean, (low, high) = mean_and_spread([Series(x, np.array([1.0, 2.0, 3.0])), Series(x[:2], np.array([3.0, 2.0]))])
    assert mean.x.tolist() == [1, 2, 3]
    assert mean.y.tolist() == [2, 2, 3]
    assert low.y[:2].tolist() == pytest.approx([2 - 2**0.5, 2.0])
    assert high.y[:2].tolist() == pytest.approx([2 + 2**0.5, 2.0])
    assert np.isnan(low.y[2])


def test_compare_data_has_a_band_for_a_group() -> None:
    runs = [make_curves(first) for first in range(3)]
    entries = [ComparedCurves("A", "seeds", 1, tuple(runs[:2])), ComparedCurves("B", "other", 2, (runs[2],))]
    data = CompareData(entries)
    group, other = data.curves_for("train_loss", "step")
    assert group.band is not None
    assert (other.band, other.mark) == (None, "B")
    assert data.last_x("epoch") == 5.0
    assert [curve.star_x for curve in data.curves_for("best_val_accuracy", "epoch")] == [None, 5.0]
