"""The points of curves, one by one or as columns: what a poll of a log, or of a journal, found.

Readers of rows append single points. A reader that parses many records at once, such as `event_records`, adds columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Point(NamedTuple):
    """One value of one metric. `epoch` and `time` (Unix seconds) are None where the format does not have them."""

    name: str
    step: int
    value: float
    epoch: float | None = None
    time: float | None = None


@dataclass(frozen=True)
class StepAxes:
    """Where the steps of a training are on its x axes. The times of its points are seconds of training."""

    steps_per_epoch: int

    def positions(self, steps: NDArray[np.float64], axis: str) -> NDArray[np.float64]:
        """Return epochs or steps; steps where the axis is unknown."""
        return steps / self.steps_per_epoch if axis == "epoch" and self.steps_per_epoch > 0 else steps


@dataclass(frozen=True, eq=False, slots=True)
class PointColumns:
    """Points as arrays of shape (points,), in the order in which they were read. `epochs` and `times` are NaN where the
    format does not have them."""

    names: tuple[str, ...]
    """The metrics, each once."""
    name_index: NDArray[np.int16]
    """Which of `names` a point belongs to."""
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    epochs: NDArray[np.float64]
    times: NDArray[np.float64]

    @classmethod
    def of(cls, points: Iterable[Point]) -> Self:
        """Put points into columns."""
        import numpy as np

        names, steps, values, epochs, times = zip(*points, strict=True)
        indices = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return cls(
            tuple(indices),
            np.fromiter(map(indices.__getitem__, names), np.int16, len(names)),
            np.array(steps, np.int64),
            np.array(values, np.float64),
            np.array(epochs, np.float64),
            np.array(times, np.float64),
        )

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Return the points of all parts."""
        import numpy as np

        if len(parts) == 1:
            return parts[0]
        indices = {
            name: index for index, name in enumerate(dict.fromkeys(name for part in parts for name in part.names))
        }
        name_index = [np.array([indices[name] for name in part.names], np.int16)[part.name_index] for part in parts]
        columns = (
            np.concatenate([getattr(part, field) for part in parts]) for field in ("steps", "values", "epochs", "times")
        )
        return cls(tuple(indices), np.concatenate(name_index), *columns)

    def at(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> PointColumns:
        """Return some of the points, in the order of `rows`."""
        steps, values, epochs, times = (self.steps[rows], self.values[rows], self.epochs[rows], self.times[rows])
        return PointColumns(self.names, self.name_index[rows], steps, values, epochs, times)

    def only(self, is_kept: Callable[[str], bool]) -> PointColumns:
        """Return the points of some of the metrics."""
        import numpy as np

        kept = np.array([is_kept(name) for name in self.names], bool)
        columns = self.at(kept[self.name_index])
        names = tuple(name for name in self.names if is_kept(name))
        return replace(columns, names=names, name_index=(np.cumsum(kept) - 1).astype(np.int16)[columns.name_index])

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Point]:
        columns = (self.name_index, self.steps, self.values, self.epochs, self.times)
        for index, step, value, epoch, time in zip(*(column.tolist() for column in columns), strict=True):
            known_epoch, known_time = None if math.isnan(epoch) else epoch, None if math.isnan(time) else time
            yield Point(self.names[index], step, value, known_epoch, known_time)


class Points:
    """Points in the order in which they were read."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._parts: list[PointColumns] = []
        # Those after the last part.
        self._rows = list(points)

    def append(self, point: Point) -> None:
        """Add one point."""
        self._rows.append(point)

    def extend(self, points: Iterable[Point]) -> None:
        """Add points one by one."""
        self._rows.extend(points)

    def add_columns(self, columns: PointColumns) -> None:
        """Add many points."""
        if self._rows:
            self._parts.append(PointColumns.of(self._rows))
            self._rows = []
        if len(columns):
            self._parts.append(columns)

    def _all(self) -> list[PointColumns]:
        return [*self._parts, *([PointColumns.of(self._rows)] if self._rows else [])]

    def columns(self) -> PointColumns:
        """Return all points as columns. There must be one."""
        return PointColumns.joined(self._all())

    @property
    def names(self) -> set[str]:
        """The metrics that have points."""
        return {point.name for point in self._rows}.union(*(part.names for part in self._parts))

    def only(self, is_kept: Callable[[str], bool]) -> Points:
        """Return the points of some of the metrics."""
        kept = Points()
        for part in self._all():
            kept.add_columns(part.only(is_kept))
        return kept

    def renamed(self, name_of: Callable[[str], str]) -> Points:
        """Return the points under other names. Different metrics keep different names."""
        renamed = Points(point._replace(name=name_of(point.name)) for point in self._rows)
        renamed._parts = [replace(part, names=tuple(map(name_of, part.names))) for part in self._parts]
        return renamed

    def before(self, step: float) -> Points:
        """Return the points of lower steps."""
        kept = Points()
        for part in self._all():
            kept.add_columns(part.at(part.steps < step))
        return kept

    def __len__(self) -> int:
        return sum(map(len, self._parts)) + len(self._rows)

    def __iter__(self) -> Iterator[Point]:
        for part in self._parts:
            yield from part
        yield from self._rows

    def __getitem__(self, index: int) -> Point:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Points | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
