"""The metric that the sweep of a script searches, read from the run of a trial while it goes on.

`engine.command` finds the metric files and the metrics in the output of the run, `engine.foreign` reads them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from engine.command.metric_files import CommandMetrics, metric_key
from engine.command.run_metrics import MetricsFinder
from engine.foreign.folders import RunFollower
from engine.foreign.reading import EPOCH_NAMES, Reading
from engine.runs.folder import RunFolder
from engine.runs.foreign_record import by_importance
from engine.runs.metrics import Metric, find_key, registry_keys
from engine.utils.text import list_names

# What is read of a run at once, and for how long after its end.
MAX_POLL_SECONDS, MAX_LAST_SECONDS = 0.2, 10.0
MAX_SHOWN_NAMES = 8
# Optuna's journal gets a line for each value: 1,000 for a million steps.
STEP_GROWTH = 1.01
# The values of these metrics of a training are those of its best epoch, which a sweep takes of any metric.
_SELECTION_KEYS = {"best_val_loss": "val_loss", "best_val_accuracy": "val_accuracy"}
_NO_MATCH = 9


@dataclass
class _Values:
    """What is known of one metric that may be the wanted one: its best value, and values that were not returned yet."""

    best: float | None = None
    new: list[tuple[int, float | None]] = field(default_factory=list)
    next_step: int = 0


class MetricReader:
    """Follows one metric of a run. `metric` is its row for `foreign_metric`, under the name that the user typed."""

    def __init__(self, folder: RunFolder, metric: Metric) -> None:
        self._finder, self._metric = MetricsFinder(folder), metric
        self._found: CommandMetrics | None = None
        self._follower: RunFollower | None = None
        self._values: dict[str, _Values] = {}
        self._names: set[str] = set()
        """The names of all metrics of the run."""
        self._ranks: dict[str, int] = {}

    def poll(self, *, to_end: bool = False) -> list[tuple[int, float | None]]:
        """Return new values with their steps, None for one that is not finite. `to_end` reads all there is.

        Of a metric that has a value at each step, later ones are some steps apart.
        """
        found = self._finder.find()
        if found is not self._found:
            self._found, self._follower = found, RunFollower(found)
            self._values, self._names = {}, set()
        deadline = time.monotonic() + (MAX_LAST_SECONDS if to_end else MAX_POLL_SECONDS)
        while self._follower is not None and time.monotonic() < deadline:
            readings = self._follower.poll()
            for reading in readings:
                self._add(reading)
            if not any(len(reading.points) for reading in readings):
                break
        new = self._values[self._name].new if self._name is not None else []
        for values in self._values.values():
            values.new = []
        return new

    def _add(self, reading: Reading) -> None:
        for name in reading.points.names - self._names:
            self._names.add(name)
            self._ranks[name] = match_rank(self._metric.label, name)
        wanted = {name for name in reading.points.names if self._ranks[name] < _NO_MATCH}
        for point in reading.points.only(wanted.__contains__) if wanted else ():
            values = self._values.setdefault(point.name, _Values())
            value = point.value if math.isfinite(point.value) else None
            if point.step >= values.next_step:
                values.new.append((point.step, value))
                values.next_step = max(point.step + 1, int(point.step * STEP_GROWTH))
            values.best = max(values.best, value, key=self._metric.merit)

    @property
    def _name(self) -> str | None:
        """What the run calls the metric; None if it has none of the name."""
        return min(self._values, key=lambda name: (self._ranks[name], name), default=None)

    @property
    def has_values(self) -> bool:
        """Whether the metric has any value, finite or not."""
        return self._name is not None

    @property
    def best(self) -> float | None:
        """The best finite value so far."""
        return self._values[self._name].best if self._name is not None else None

    @property
    def found_names(self) -> str:
        """The names of the metrics that the run has, as a text; empty without one."""
        names = by_importance(sorted(name for name in self._names if name.lower() not in EPOCH_NAMES))
        return list_names(names, MAX_SHOWN_NAMES)


def match_rank(wanted: str, name: str) -> int:
    """Return how well the name of a metric in a run fits the wanted one, 0 for the same name.

    `wanted` may also be the key or the label in the registry of metrics: `val_accuracy` and `val acc` are `val/acc`.
    """
    if name == wanted:
        return 0
    if metric_key(name) == metric_key(wanted):
        return 1
    key = registry_keys([name]).get(name)
    return 2 if key is not None and key == _registry_key(wanted) else _NO_MATCH


def _registry_key(wanted: str) -> str | None:
    key = find_key(wanted)
    return _SELECTION_KEYS.get(key, key) if key is not None else None
