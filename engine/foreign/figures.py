"""The last, lowest and highest value of each metric of a log, in memory that does not grow with its points.

A run that is resumed or started again voids the points from a step on. Like curves, the figures are then those of the
points that still count. `engine.foreign.run_list` keeps them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.foreign.reading import Reading

# Each restart may need one more reading of the log.
MAX_CUTS = 64


class Figures(NamedTuple):
    """What is known of a metric: its last step and value, and its lowest and highest value.

    `last` is None if it is not finite, and `low` and `high` if no value was.
    """

    step: int
    last: float | None
    low: float | None
    high: float | None


@dataclass(slots=True)
class _Part:
    """The points of a metric between two cuts: their lowest and highest step and finite value, the point that was read
    last, and its number."""

    number: int = 0
    step: int = 0
    value: float = math.nan
    first_step: float = math.inf
    last_step: float = -math.inf
    low: float = math.inf
    high: float = -math.inf

    def add(self, points: Sequence[tuple[int, int, float]]) -> None:
        """Add points in the order of reading: number, step and value."""
        self.number, self.step, self.value = points[-1]
        steps, finite = [step for _, step, _ in points], [value for *_, value in points if math.isfinite(value)]
        self.first_step, self.last_step = min(self.first_step, *steps), max(self.last_step, *steps)
        self.low, self.high = min(self.low, *finite, math.inf), max(self.high, *finite, -math.inf)


@dataclass
class LogFigures:
    """The figures of the metrics of one log. `cuts` are sorted steps from which points are voided, as far as they are
    known from an earlier reading."""

    cuts: list[int] = field(default_factory=list)
    _parts: dict[str, dict[int, _Part]] = field(default_factory=dict, init=False)
    """The parts of each metric, by the number of cuts at or below their steps."""
    _num_points: int = field(default=0, init=False)
    _missed: set[int] = field(default_factory=set, init=False)
    """Steps from which points were voided that are in a part with others."""

    @property
    def needs_second_reading(self) -> bool:
        """Whether a part has voided points beside others, so that the log is to be read again with one more cut."""
        return bool(self._missed) and len(self._missed) + len(self.cuts) <= MAX_CUTS

    def begin_again(self) -> LogFigures:
        """Return the figures for another reading of the log."""
        return LogFigures(sorted({*self.cuts, *self._missed}))

    def add(self, reading: Reading) -> None:
        """Add the points of a reading, without those that it voids."""
        if reading.drop_from is not None:
            self._drop(reading.drop_from)
        found: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
        for number, (name, step, value, _, _) in enumerate(reading.points, self._num_points):
            side = bisect_right(self.cuts, step) if self.cuts else 0
            found.setdefault((name, side), []).append((number, step, value))
        for (name, side), points in found.items():
            self._parts.setdefault(name, {}).setdefault(side, _Part()).add(points)
        self._num_points += len(reading.points)

    def _drop(self, step: float) -> None:
        """Forget the points from a step on."""
        for name, parts in [*self._parts.items()]:
            kept = {side: part for side, part in parts.items() if part.first_step < step}
            if any(part.last_step >= step for part in kept.values()):
                self._missed.add(int(step))
            self._parts[name] = kept
            if not kept:
                del self._parts[name]

    def figures(self) -> dict[str, Figures]:
        """Return the figures of the metrics."""
        found: dict[str, Figures] = {}
        for name, parts in self._parts.items():
            last = max(parts.values(), key=lambda part: part.number)
            low, high = min(part.low for part in parts.values()), max(part.high for part in parts.values())
            values = (last.value, low, high)
            found[name] = Figures(last.step, *(value if math.isfinite(value) else None for value in values))
        return found

    @property
    def not_finite(self) -> dict[str, int]:
        """Step of each metric whose latest value is NaN or infinite."""
        latest = {name: max(parts.values(), key=lambda part: part.number) for name, parts in self._parts.items()}
        return {name: part.step for name, part in latest.items() if not math.isfinite(part.value)}
