"""Notice that a resumed run repeats steps in a file of rows, which has no mark where a session begins.

Keras' `CSVLogger(append=True)`, ultralytics and trainers with JSON lines append the steps since the last checkpoint
once more. TensorBoard drops the earlier ones, and so do the readers of this package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from engine.watch.points import Point
from engine.watch.reading import Reading

# Each restart voids points that were read. A run that is resumed more often shows both values of a step.
MAX_RESTARTS = 100
MAX_NAMED_RESTARTS = 5


class Restarts:
    """The lowest and the highest step that each metric of a file has had so far."""

    def __init__(self) -> None:
        self._lowest: dict[str, int] = {}
        self._highest: dict[str, int] = {}
        self._num_restarts = 0
        self._is_expected = self._has_repeated_steps = False

    def expect(self) -> None:
        """Take the next row for the first one of a resumed run, because a heading is before it."""
        self._is_expected = True

    def add_points(self, points: Sequence[Point], reading: Reading) -> None:
        """Add points of any steps to a reading, as one row for each step."""
        if len({point.step for point in points}) < 2:
            self.add_row(points, reading)
            return
        for _, row in groupby(points, attrgetter("step")):
            self.add_row(list(row), reading)

    def add_row(self, points: Sequence[Point], reading: Reading) -> None:
        """Add the points of a row, which have one step, to a reading. A row of a resumed run voids those before it."""
        if not points:
            return
        step = points[0].step
        if (self._is_expected or step <= self._highest.get(points[0].name, -math.inf)) and self._is_restart(
            points, step
        ):
            self._num_restarts += 1
            reading.void_from(step)
            # Below the step: the other rows of this step follow.
            self._lowest = {name: low for name, low in self._lowest.items() if low < step}
            self._highest = {name: min(self._highest[name], step - 1) for name in self._lowest}
        self._is_expected = False
        for point in points:
            highest = self._highest.get(point.name)
            if highest is None:
                self._lowest[point.name] = step
            if highest is None or step > highest:
                self._highest[point.name] = step
        reading.points.extend(points)

    def _is_restart(self, points: Sequence[Point], step: int) -> bool:
        if self._num_restarts == MAX_RESTARTS:
            return False
        if self._is_expected:
            return step <= max(self._highest.values(), default=-math.inf)
        # MMEngine numbers rows of validation by epochs and other rows by iterations: only some metrics go back.
        latest = min(self._highest.get(point.name, -math.inf) for point in points)
        if step != latest:
            return step < latest
        if all(self._lowest[point.name] == self._highest[point.name] for point in points):
            self._has_repeated_steps = True  # several rows per step from the beginning on, such as one per batch
        return not self._has_repeated_steps


def restart_note(restarts: Sequence[float]) -> list[str]:
    """Return a clause on the values that restarts have voided, if there are any."""
    steps = ", ".join(f"{int(step):,}" for step in restarts[-MAX_NAMED_RESTARTS:])
    return [f"repeats steps from {steps} on, which void the earlier ones"] if steps else []
