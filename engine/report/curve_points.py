"""All points of the curves of a run, as they were recorded: `runs show --curves` and `watch --curves` print them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from engine.jobs.command.run_metrics import metrics_of_run
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder
from engine.runs.journal_source import journal_run
from engine.runs.metric_rules import renaming_of
from engine.watch.folders import ForeignRun, RunFollower
from engine.watch.points import Point, Points

POINT_FIELDS = ("metric", "step", "epoch", "time", "value")


def read_points(run: OpenedRun) -> Iterator[Point]:
    """Yield the points of a run, those of a metric in the order in which they were recorded.

    The time of a point is in Unix seconds, of a training in seconds of training.
    """
    if isinstance(run, RunFolder):
        run = metrics_of_run(run) or journal_run(run)
    for points in _read_logs(run):
        yield from points


def _read_logs(run: ForeignRun) -> list[Points]:
    follower, logs = RunFollower(run, renaming_of(run)), [Points() for _ in run.logs]
    num_read: list[int] = []
    while True:
        readings = follower.poll()
        for index, reading in enumerate(readings):
            if reading.drop_from is not None:
                logs[index] = logs[index].before(reading.drop_from)
            if reading.points:
                logs[index].add_columns(reading.points.columns())
        earlier, num_read = num_read, [reading.read_bytes for reading in readings]
        if num_read == earlier and not any(reading.points for reading in readings):
            return logs


def point_rows(points: Iterable[Point]) -> Iterator[dict[str, str | float | None]]:
    """Yield each point as an object of JSON; what is not finite or unknown is null."""
    for point in points:
        value = point.value if math.isfinite(point.value) else None
        yield dict(zip(POINT_FIELDS, (point.name, point.step, point.epoch, point.time, value), strict=True))
