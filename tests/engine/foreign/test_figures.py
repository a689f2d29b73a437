"""The figures of a log are those of the points that its restarts do not void, as the curves have them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.foreign import figures, run_list
from engine.foreign.figures import Figures, LogFigures
from engine.foreign.folders import find_runs
from engine.foreign.points import Point, Points
from engine.foreign.reading import Reading
from engine.foreign.run_list import FollowedRun
from engine.show.foreign_curves import CurveReader


def followed(path: Path) -> FollowedRun:
    """Return the only run below a path, read to its end."""
    (run,) = find_runs(path).runs
    found = FollowedRun(run)
    while found.has_unread:
        found.read()
    return found


def write_losses(path: Path, rows: list[tuple[int, float]]) -> None:
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in rows))


ATTEMPTS = {
    "begins again": [(0, 9.0), (1, 0.1), (2, 8.0), (0, 7.0), (1, 6.0)],
    "resumes in the middle": [(0, 0.2), (1, 9.0), (2, 0.1), (3, 8.0), (2, 7.0), (3, 6.0)],
    "resumes twice": [(0, 5.0), (1, 4.0), (2, 0.1), (1, 0.2), (2, 0.3), (2, 3.0), (3, 2.0)],
}


@pytest.mark.parametrize("rows", ATTEMPTS.values(), ids=ATTEMPTS.keys())
@pytest.mark.parametrize("poll_bytes", [12, 1 << 18])
def test_best_value_is_that_of_the_curve(
    tmp_path: Path, rows: list[tuple[int, float]], poll_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "ROW_POLL_BYTES", poll_bytes)
    write_losses(tmp_path / "metrics.csv", rows)
    loss = followed(tmp_path).listed.metrics["loss"]
    reader = CurveReader(find_runs(tmp_path).runs[0])
    while reader.read_slice():
        pass
    curve = reader.curves.extremes("loss")
    assert (loss.step, loss.last, loss.low, loss.high) == (curve.step, curve.last, curve.low, curve.high)


def test_values_stay_until_the_second_reading_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    write_losses(path, [(step, 100.0 - step) for step in range(50)])
    found = followed(tmp_path)
    monkeypatch.setattr(run_list, "ROW_POLL_BYTES", 64)
    with path.open("a") as file:
        file.write("".join(f"{step},{200.0 - step}\n" for step in range(40, 50)))
    os.utime(path, (2e9, 2e9))
    found.check(2e9, None)
    seen = set[float]()
    while found.has_unread:
        found.read()
        seen.add(found.listed.metrics["loss"].low)
    assert seen <= {51.0, 61.0} and found.listed.metrics["loss"] == Figures(49, 151.0, 61.0, 160.0)


def reading_of(steps: list[int], drop_from: float | None = None) -> Reading:
    return Reading(Points(Point("loss", step, 1.0 / (1 + step)) for step in steps), drop_from=drop_from)


def test_log_that_restarts_too_often_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_CUTS", 1)
    log = LogFigures()
    log.add(reading_of([0, 1, 2]))
    log.add(reading_of([2, 3], 2))
    assert log.needs_second_reading
    log.add(reading_of([1, 2], 1))
    assert not log.needs_second_reading and log.figures()["loss"].step == 2


def test_replaced_log_has_the_figures_of_the_new_one() -> None:
    log = LogFigures()
    log.add(reading_of([7, 8]))
    log.add(reading_of([0], -math.inf))
    assert log.figures() == {"loss": Figures(0, 1.0, 1.0, 1.0)} and not log.needs_second_reading


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 5), max_size=4)), max_size=5))
def test_figures_are_those_of_the_points_that_count(sessions: list[tuple[int, list[int]]]) -> None:
    kept: list[int] = []
    readings = [reading_of([start + step for step in steps], start) for start, steps in sessions]
    for (start, steps), _ in zip(sessions, readings, strict=True):
        kept = [step for step in kept if step < start] + [start + step for step in steps]
    log = LogFigures()
    while True:
        for reading in readings:
            log.add(reading)
        if not log.needs_second_reading:
            break
        log = log.begin_again()
    found = log.figures().get("loss")
    assert (found is None) is (not kept)
    assert found is None or (found.step, found.low, found.high) == (kept[-1], 1 / (1 + max(kept)), 1 / (1 + min(kept)))
