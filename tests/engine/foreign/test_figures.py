"""The figures of a log: its last, lowest and highest values, without metrics that a restart voids."""

from __future__ import annotations

import math

from engine.foreign.figures import Figures, LogFigures
from engine.foreign.points import Point, Points
from engine.foreign.reading import Reading


def reading_of(steps: list[int], drop_from: float | None = None) -> Reading:
    return Reading(Points(Point("loss", step, 1.0 / (1 + step)) for step in steps), drop_from=drop_from)


def test_figures_are_the_last_lowest_and_highest_value() -> None:
    log = LogFigures()
    log.add(Reading(Points(Point("loss", step, value) for step, value in enumerate((3.0, 1.0, math.nan)))))
    assert log.figures() == {"loss": Figures(2, None, 1.0, 3.0)} and log.not_finite == {"loss": 2}


def test_log_that_begins_again_has_the_figures_of_the_new_values() -> None:
    log = LogFigures()
    log.add(reading_of([0, 7, 8]))
    log.add(reading_of([0, 1], 0))
    assert log.figures() == {"loss": Figures(1, 0.5, 0.5, 1.0)}
    log.add(reading_of([3], -math.inf))
    assert log.figures() == {"loss": Figures(3, 0.25, 0.25, 0.25)}
