"""The figures of a log: its last, lowest and highest values, without metrics that a restart voids."""

from __future__ import annotations

import math

from engine.watch.figures import Figures, LogFigures
from engine.watch.points import Point, Points
from engine.watch.reading import Reading


def test_figures_are_the_last_lowest_and_highest_value() -> None:
    log = LogFigures()
    log.add(Reading(Points(Point("loss", step, value) for step, value in enumerate((3.0, 1.0, math.nan)))))
    assert log.figures() == {"loss": Figures(2, None, 1.0, 3.0, odd_step=2)}
