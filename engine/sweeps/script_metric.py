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
from engine.foreign.reading import EPOCH_NAMES
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
class MetricValues:
    """The values of one metric: its best finite one, and those at steps, None for one that is not finite.

    Of a metric that has a value at each step, later ones are some steps apart.
    """

    best: float | None = None
    by_step: dict[int, float | None] = field(default_factory=dict)
    next_step: int = 0


class MetricReader:
    """Follows one metric of a run. `metric` is its row for `foreign_metric`, under the name that the user typed."""

    def __init__(self, folder: RunFolder, metric: Metric) -> None:
        self._finder, self._metric = MetricsFinder(folder), metric
        self._found: CommandMetrics | None = None
        self._ranks: dict[str, int] = {}
        """How well each metric of the run fits the wanted one."""
        self._values: dict[str, MetricValues] = {}

    def poll(self, *, to_end: bool = False) -> MetricValues:
        """Return the values so far, none if the run has no metric of the name. `to_end` reads all there is."""
        found = self._finder.find()
        if found is not self._found:
            self._found, self._follower = found, RunFollower(found)
            self._values, self._ranks = {}, {}
        deadline = time.monotonic() + (MAX_LAST_SECONDS if to_end else MAX_POLL_SECONDS)
        has_more = True
        while has_more and time.monotonic() < deadline:
            points = [reading.points for reading in self._follower.poll()]
            has_more = any(map(len, points))
            for each in points:
                self._ranks |= {name: match_rank(self._metric.label, name) for name in each.names - self._ranks.keys()}
                for point in each.only(lambda name: self._ranks[name] < _NO_MATCH):
                    self._add(point.name, point.step, point.value)
        name = min(self._values, key=lambda name: (self._ranks[name], name), default=None)
        return MetricValues() if name is None else self._values[name]

    def _add(self, name: str, step: int, value: float) -> None:
        values, finite = self._values.setdefault(name, MetricValues()), value if math.isfinite(value) else None
        if step >= values.next_step:
            values.by_step[step] = finite
            values.next_step = max(step + 1, int(step * STEP_GROWTH))
        values.best = max(values.best, finite, key=self._metric.merit)

    @property
    def found_names(self) -> str:
        """The names of the metrics that the run has, as a text; empty without one."""
        names = by_importance(sorted(name for name in self._ranks if name.lower() not in EPOCH_NAMES))
        return list_names(names, MAX_SHOWN_NAMES)


def match_rank(wanted: str, name: str) -> int:
    """Return how well the name of a metric in a run fits the wanted one, 0 for the same name.

    `wanted` may also be the key or the label in the registry of metrics: `val_accuracy` and `val acc` are `val/acc`.
    """
    if name == wanted:
        return 0
    if metric_key(name) == metric_key(wanted):
        return 1
    key, wanted_key = registry_keys([name]).get(name), find_key(wanted) or ""
    return 2 if key is not None and key == _SELECTION_KEYS.get(wanted_key, wanted_key) else _NO_MATCH
