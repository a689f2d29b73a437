"""Notice that a resumed run repeats steps in a file of rows, which has no mark where a session begins.

Keras' `CSVLogger(append=True)`, ultralytics and trainers with JSON lines append the steps since the last checkpoint
once more. TensorBoard drops the earlier ones, and so do the readers of this package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from engine.foreign.points import Point
from engine.foreign.reading import Reading

# Each restart voids points that were read. A run that is resumed more often shows both values of a step.
MAX_RESTARTS = 100
MAX_NAMED_RESTARTS = 5


class Restarts:
    """The steps that each metric of a file has had so far."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[int, int]] = {}
        self._num_restarts = 0
        self._is_expected = self._has_repeated_steps = False

    def expect(self) -> None:
        """Take the next row for the first one of a resumed run, because a heading is before it."""
        self._is_expected = True

    def add_points(self, points: Sequence[Point], reading: Reading) -> None:
        """Add points of any steps to a reading, as one row for each step."""
        for _, row in groupby(points, lambda point: point.step):
            self.add_row(list(row), reading)

    def add_row(self, points: Sequence[Point], reading: Reading) -> None:
        """Add the points of a row, which have one step, to a reading. A row of a resumed run voids those before it."""
        if not points:
            return
        step = points[0].step
        if self._is_restart(points, step):
            self._num_restarts += 1
            reading.void_from(step)
            # Below the step: the other rows of this step follow.
            kept = {name: steps for name, steps in self._ranges.items() if steps[0] < step}
            self._ranges = {name: (low, min(high, step - 1)) for name, (low, high) in kept.items()}
        self._is_expected = False
        for point in points:
            low, high = self._ranges.get(point.name, (step, step))
            self._ranges[point.name] = (low, max(high, step))
        reading.points.extend(points)

    def _is_restart(self, points: Sequence[Point], step: int) -> bool:
        if self._num_restarts == MAX_RESTARTS:
            return False
        if self._is_expected:
            return step <= max((high for _, high in self._ranges.values()), default=-math.inf)
        # MMEngine numbers rows of validation by epochs and other rows by iterations: only some metrics go back.
        ranges = [self._ranges.get(point.name, (-math.inf, -math.inf)) for point in points]
        latest = min(high for _, high in ranges)
        if step != latest:
            return step < latest
        if all(low == high for low, high in ranges):
            self._has_repeated_steps = True  # several rows per step from the beginning on, such as one per batch
        return not self._has_repeated_steps


def restart_note(restarts: Sequence[float]) -> list[str]:
    """Return a clause on the values that restarts have voided, if there are any."""
    steps = ", ".join(f"{int(step):,}" for step in restarts[-MAX_NAMED_RESTARTS:])
    return [f"repeats steps from {steps} on, which void the earlier ones"] if steps else []
