"""The last, lowest and highest value of each metric of a log, in memory that does not grow with its points.

A run that is resumed voids the points from a step on. A metric that began at that step or later begins again; the
lowest and highest value of any other one may be those of a step that the run has repeated since.
`engine.watch.run_list` keeps the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.watch.reading import Reading


@dataclass(frozen=True)
class Figures:
    """What is known of a metric: its last step and value, and its lowest and highest value.

    `step` is None without a value, `last` if it is not finite, and `low` and `high` if no value was. `odd_step` is the
    first step of those up to the last one that have no finite value; None if the last one has.
    """

    step: int | None
    last: float | None
    low: float | None
    high: float | None
    odd_step: int | None = None

    def is_between(self, lowest: float, highest: float) -> bool:
        """Whether there are values, and all lie within limits."""
        return self.low is not None and self.high is not None and lowest <= self.low <= self.high <= highest


@dataclass(slots=True)
class _MetricFigures:
    """The first and the last step of a metric, its last value, its lowest and highest finite one, and `odd_step` as in
    `Figures`."""

    first_step: int
    step: int = 0
    value: float = math.nan
    low: float = math.inf
    high: float = -math.inf
    odd_step: int | None = None

    def add(self, step: int, value: float) -> None:
        self.first_step, self.step, self.value = min(self.first_step, step), step, value
        if math.isfinite(value):
            self.low, self.high, self.odd_step = min(self.low, value), max(self.high, value), None
        elif self.odd_step is None:
            self.odd_step = step


class LogFigures:
    """The figures of the metrics of one log."""

    def __init__(self) -> None:
        self._metrics: dict[str, _MetricFigures] = {}

    def add(self, reading: Reading) -> None:
        """Add the points of a reading, without the metrics that it voids."""
        if (cut := reading.drop_from) is not None:
            self._metrics = {name: metric for name, metric in self._metrics.items() if metric.first_step < cut}
        for name, step, value, _, _ in reading.points:
            if (metric := self._metrics.get(name)) is None:
                metric = self._metrics[name] = _MetricFigures(step)
            metric.add(step, value)

    def figures(self) -> dict[str, Figures]:
        """Return the figures of the metrics."""
        found: dict[str, Figures] = {}
        for name, metric in self._metrics.items():
            values = (metric.value, metric.low, metric.high)
            last, low, high = (value if math.isfinite(value) else None for value in values)
            found[name] = Figures(metric.step, last, low, high, metric.odd_step)
        return found
