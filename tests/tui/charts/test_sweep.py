"""The charts of a sweep: axes as the keys were searched, and curves of trials with gaps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from engine.jobs.sweeps.status import SweepReader, SweepStatus
from support.replace import replace
from support.runs.sweeps import make_finished_trials
from support.screen.plots import plain_rows
from tui.charts.plot import plot
from tui.charts.sweep import MAX_CURVES, param_curves, trial_curves


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> SweepStatus:
    folder, _ = make_finished_trials(Path(tmp_path_factory.mktemp("sweep")))
    return SweepReader(folder).poll()


@pytest.mark.parametrize(
    ("key", "labels"),
    [
        ("optim.lr", ["0.001", "0.01", "0.1", "log"]),
        ("optim.name", ["sgd", "adamw"]),
        ("augment.crop_padding", ["0", "1", "2", "3", "4"]),
    ],
)
def test_axis_is_as_the_key_was_searched(status: SweepStatus, key: str, labels: list[str]) -> None:
    curves, window = param_curves(status, key)
    *rows, axis = plain_rows(plot(curves, window, 60, 12))
    assert axis.split() == labels
    text = "".join(rows)
    assert "•" in text and text.count("★") == 1


def test_axis_in_the_last_row_of_a_low_chart_cuts_no_label(status: SweepStatus) -> None:
    curves, window = param_curves(status, "optim.lr")
    assert plain_rows(plot(curves, window, 30, 6))[-1].lstrip().startswith("└0.001─")


def test_points_of_a_key_are_not_connected(status: SweepStatus) -> None:
    curves, _ = param_curves(status, "optim.lr")
    pruned, complete, best = curves
    assert [int(np.isfinite(curve.series.y).sum()) for curve in curves] == [3, 6, 1]
    assert all(np.isnan(curve.series.y[1::2]).all() for curve in (pruned, complete, best))


def test_curve_of_the_selected_trial_is_on_top_and_the_only_solid_one(status: SweepStatus) -> None:
    not_finite = {1: 0.5, 2: math.nan, 3: 0.7}
    selected = status.trials[4]
    curves, window = trial_curves(
        replace(status, curves=[*status.curves[:4], not_finite, *status.curves[5:]]), selected
    )
    assert [curve.is_dashed for curve in curves] == [True] * (len(curves) - 1) + [False]
    assert curves[-1].blocks.odd.tolist() == [2.0] and (window.low, window.high) == (1.0, 3.0)


def test_curves_of_trials_without_values_and_of_many_trials(status: SweepStatus) -> None:
    none = replace(status, curves=[{} for _ in status.curves])
    curves, window = trial_curves(none, none.trials[0])
    assert plain_rows(plot(curves, window, 40, 10))[0] == "No data yet"
    trials = tuple(replace(status.trials[0], number=number) for number in range(200))
    many = replace(status, trials=trials, curves=[{1: 0.5, 2: 0.6}] * 200)
    assert len(trial_curves(many, trials[199])[0]) == MAX_CURVES + 1
