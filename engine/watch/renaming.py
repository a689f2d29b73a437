"""Rename, hide and plot over another metric what is read of a log, as the user chose (`engine.runs.metric_rules`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.watch.points import Points
from engine.watch.reading import Reading, to_step


@dataclass(frozen=True)
class Renaming:
    """The new names of metrics, empty for a hidden one, and the metric over which the others are plotted."""

    names: Mapping[str, str] = field(default_factory=dict)
    x: str = ""


AS_LOGGED = Renaming()


class RenamedLog:
    """Renames what is read of one log."""

    def __init__(self, renaming: Renaming) -> None:
        self._names, self._x = renaming.names, renaming.x
        self._x_of: dict[int, int] = {}
        """The x of each step, if another metric than the step is x."""

    def apply(self, reading: Reading) -> None:
        """Change the points of a reading, which are all that was found of their steps."""
        names, x_of = self._names, self._x_of
        if self._x:
            if reading.drop_from is not None and math.isfinite(reading.drop_from):
                reading.drop_from = min((x for step, x in x_of.items() if step >= reading.drop_from), default=None)
            points = list(reading.points)
            reading.restarts = tuple(x_of[int(step)] for step in reading.restarts if int(step) in x_of)
            found = ((point.step, to_step(point.value)) for point in points if point.name == self._x)
            x_of |= {step: x for step, x in found if x is not None}
            if x_of:
                others = [point for point in points if point.step in x_of and point.name != self._x]
                reading.points = Points(point._replace(step=x_of[point.step]) for point in others)
        if names:
            shown = reading.points.only(lambda name: names.get(name, name) != "")
            reading.points = shown.renamed(lambda name: names.get(name, name))
