"""What is known about a foreign run: how many values each metric has, the last one, and the parameters.

`gputrain watch` prints it. The points stay in two arrays for each metric, 16 bytes a point.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.foreign.folders import ForeignRun, RunFollower
from engine.foreign.parameters import Parameters, read_parameters
from engine.foreign.reading import Reading

# The points of a poll take 20 times the memory of their text.
SUMMARY_POLL_BYTES = 1 << 20


@dataclass
class MetricValues:
    """Steps and values of a metric, in the order in which they were written."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def drop_from(self, step: float) -> None:
        """Forget the values from a step on."""
        kept = [index for index, own in enumerate(self.steps) if own < step]
        self.steps = array("q", (self.steps[index] for index in kept))
        self.values = array("d", (self.values[index] for index in kept))


@dataclass(frozen=True)
class RunSummary:
    """A run as it was when its logs were read. `problems` say what of them cannot be read."""

    run: ForeignRun
    metrics: dict[str, MetricValues]
    parameters: Parameters
    problems: tuple[str, ...]

    @property
    def last_step(self) -> int | None:
        """The highest step of any metric, None without one."""
        return max((max(metric.steps) for metric in self.metrics.values() if metric.steps), default=None)


def summarize(run: ForeignRun) -> RunSummary:
    """Read all logs of a run."""
    follower = RunFollower(run)
    # By log, because a reading voids points of its own log only.
    logs: list[dict[str, MetricValues]] = [{} for _ in run.logs]
    parameters, problems = read_parameters(run.folder), dict[str, None]()
    for readings in _readings(follower):
        for metrics, reading in zip(logs, readings, strict=True):
            _add(reading, metrics)
            parameters = parameters | reading.parameters
            problems |= {reading.problem: None} if reading.problem else {}
    found = {name: values for metrics in logs for name, values in metrics.items() if values.steps}
    return RunSummary(run, dict(sorted(found.items())), parameters, tuple(problems))


def _readings(follower: RunFollower) -> Iterator[list[Reading]]:
    """Yield what each poll finds, until one finds nothing new in any log."""
    before: list[int] | None = None
    while True:
        readings = follower.poll(SUMMARY_POLL_BYTES)
        yield readings
        read = [reading.read_bytes for reading in readings]
        if read == before and not any(reading.points for reading in readings):
            return
        before = read


def _add(reading: Reading, metrics: dict[str, MetricValues]) -> None:
    if reading.drop_from is not None:
        for metric in metrics.values():
            metric.drop_from(reading.drop_from)
    for point in reading.points:
        metric = metrics.setdefault(point.name, MetricValues())
        metric.steps.append(point.step)
        metric.values.append(point.value)
