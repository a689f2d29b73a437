"""The curves of a run have exact extremes, however they were read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runs import curves as curves_module
from engine.runs.curves import CurveReader, Curves, Extremes
from engine.watch.folders import find_runs
from engine.watch.points import Point, Points
from engine.watch.reading import Reading
from support.large_run import write_large_run

SMALL_LIMIT = 16
VALUES = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])
POINTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-5, 60), VALUES), max_size=120)
READINGS = st.lists(st.tuples(st.none() | st.just(-math.inf), POINTS), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Blocks after a few points, so that a short list has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves_module, "MIN_METRIC_COLUMNS", SMALL_LIMIT)
        yield


@pytest.fixture
def curves() -> Curves:
    return Curves(1)


def extremes_of(values: list[float]) -> Extremes:
    known = [value for value in values if math.isfinite(value)]
    last = values[-1] if values and math.isfinite(values[-1]) else None
    num_gaps = len(values) - len(known)
    low, high = min(known, default=None), max(known, default=None)
    return Extremes(None, last, low, high, count=len(values), not_finite=num_gaps)


def points(*values: float, name: str = "loss", start: int = 0) -> Points:
    return Points(Point(name, start + index, value) for index, value in enumerate(values))


@given(READINGS)
def test_curves_have_exact_extremes_after_any_polls(
    read: list[tuple[float | None, list[tuple[str, int, float]]]],
) -> None:
    raw: list[Point] = []
    for drop, found in read:
        raw = [point for point in raw if drop is None or point.step < drop] + [Point(*point) for point in found]
    curves = Curves(1, SMALL_LIMIT)
    for drop, found in read:
        curves.add([Reading(Points([Point(*point) for point in found]), drop_from=drop)])
    for name in "ab":
        found_extremes = replace(curves.extremes(name), step=None, odd_step=None)
        assert found_extremes == extremes_of([point.value for point in raw if point.name == name])


def test_curves_of_a_long_metric_have_extremes_and_means_of_blocks() -> None:
    curves = Curves(1, SMALL_LIMIT)
    values = [float(index % 7) for index in range(1000)]
    for start in range(0, 1000, 10):
        curves.add([Reading(points(*values[start : start + 10], start=start))])
    blocks = curves.over("loss", "step")
    assert len(blocks.means.x) <= SMALL_LIMIT
    assert (np.diff(blocks.points.x) >= 0).all()
    assert (blocks.points.y.min(), blocks.points.y.max()) == (0, 6)
    assert blocks.points.latest() == blocks.means.latest() == values[-1]
    assert curves.last_x("step") == 999


def test_value_that_is_not_finite_is_a_gap_and_marked(curves: Curves) -> None:
    curves.add([Reading(points(1.0, math.inf, 2.0))])
    assert np.isnan(curves.over("loss", "step").points.y).tolist() == [False, True, False]
    assert curves.over("loss", "step").odd.tolist() == [1] and curves.extremes("loss").odd_step is None
    curves.add([Reading(points(math.nan, math.inf, start=3))])
    assert curves.extremes("loss").odd_step == 3


def test_mark_of_a_value_that_is_not_finite_stays_in_blocks() -> None:
    curves = Curves(1, max_columns=256)
    curves.add([Reading(points(*[math.nan if step == 500 else 1.0 for step in range(4096)]))])
    [x] = curves.over("loss", "step").odd
    assert abs(x - 500) < curves.block_size("loss")


def test_steps_that_count_something_else_have_an_axis_of_their_own(curves: Curves) -> None:
    found = Points([*points(*[1.0] * 3000), *points(*[0.9] * 5, name="val/acc"), *points(0.1, 0.1, name="hp")])
    found.extend(points(*[2.0] * 9, name="clock", start=1_700_000_000))
    curves.add([Reading(found)])
    assert curves.last_x("step") == 2999
    limits = [curves.odd_limits([name], "step") for name in ("loss", "val/acc", "hp", "clock")]
    assert limits == [None, (0, 4), None, (1_700_000_000, 1_700_000_008)]
    assert curves.odd_limits(["clock"], "epoch") is None


def test_drop_concerns_the_metrics_of_its_own_log() -> None:
    curves = Curves(2)
    curves.add([Reading(points(1.0, 2.0, name="a")), Reading(points(1.0, 2.0, name="b"))])
    curves.add([Reading(drop_from=1), Reading()])
    assert (curves.extremes("a").count, curves.extremes("b").count) == (1, 2)


@pytest.mark.parametrize("is_one_reading", [True, False])
def test_restart_is_marked_on_the_curves_of_its_log(is_one_reading: bool) -> None:
    curves, reading = Curves(num_logs=2), Reading(points=points(3, 2, 1))
    other = Reading(points=points(3, 2, 1, name="accuracy"))
    if not is_one_reading:
        curves.add([reading, other])
        reading, other = Reading(), Reading()
    reading.void_from(1)
    reading.points.extend(points(4, 5, start=1))
    curves.add([reading, other])
    assert curves.restarts == [1]
    assert curves.over("loss", "step").restarts.tolist() == [1] and not len(curves.over("accuracy", "step").restarts)
    curves.add([Reading(drop_from=-math.inf), Reading()])
    assert curves.restarts == []


def test_axes_are_those_that_were_recorded(curves: Curves) -> None:
    curves.add([Reading(points(1.0, 2.0))])
    assert curves.axes == ("step",)
    found = [Point("acc", 4, 0.5, epoch=1.0, time=1.8e9), Point("acc", 8, 0.6, epoch=2.0, time=1.8e9 + 7200)]
    curves.add([Reading(Points(found))])
    assert curves.axes == ("step", "epoch", "hours")
    assert curves.over("acc", "epoch").points.x.tolist() == [1, 2]
    assert curves.over("acc", "hours").points.x.tolist() == [0, 2]


def test_metric_of_a_log_without_epochs_has_those_of_another_log() -> None:
    curves = Curves(2)
    epochs = Points(Point("acc", step, 0.5, epoch=step / 10) for step in (0, 10, 20))
    curves.add([Reading(points(1.0, 2.0, start=10)), Reading(epochs)])
    assert curves.over("loss", "epoch").points.x.tolist() == pytest.approx([1, 1.1])


def test_metric_named_epoch_is_the_axis_of_a_log_without_epochs(curves: Curves) -> None:
    curves.add([Reading(Points([Point("epoch", 0, 0.0), Point("epoch", 10, 2.0), Point("loss", 5, 0.3)]))])
    assert curves.axes == ("step", "epoch")
    assert curves.over("loss", "epoch").points.x.tolist() == [1]


def test_metrics_that_appear_later_take_columns_from_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module, "MAX_COLUMNS", 100 * 32)
    curves = Curves(1, 1600)
    names = ["first", *(f"metric-{number}" for number in range(99))]
    for name in names:
        curves.add([Reading(points(*map(float, range(300)), name=name))])
    assert sum(len(curves.over(name, "step").means.x) for name in names) <= 100 * 32
    assert curves.extremes("first") == Extremes(count=300, not_finite=0, step=299, last=299, low=0, high=299)


def test_number_of_metrics_of_a_run_is_bounded(curves: Curves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module, "MAX_RUN_METRICS", 2)
    for name in "abc":
        curves.add([Reading(points(1.0, name=name))])
    assert curves.names == ["a", "b"] and curves.is_limited


def test_reader_skips_images_and_has_exact_extremes(tmp_path: Path) -> None:
    known = write_large_run(tmp_path / "events.out.tfevents.1.host", num_events=40_000, num_bytes=20 << 20)
    reader = CurveReader(find_runs(tmp_path).runs[0], SMALL_LIMIT)
    while reader.read_slice():
        pass
    assert reader.share == 1
    for name, metric in known.items():
        found = replace(reader.curves.extremes(name), step=None)
        assert found == Extremes(None, metric.last, metric.low, metric.high, count=metric.count)


class ForgetfulReader(CurveReader):
    """A reader whose poller reads a slice right after each change of the parameters."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, None if name == "_parameters" else value)


def test_parameters_are_returned_while_the_poller_drops_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    assert ForgetfulReader(find_runs(tmp_path).runs[0]).parameters() == {"lr": 0.1}
