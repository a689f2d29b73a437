"""The metric that the sweep of a script searches, read from the run of a trial while it goes on.

`engine.command` finds the metric files and the metrics in the output of the run, `engine.runs.curves` reads them.
"""

from __future__ import annotations

import time
from functools import lru_cache

from engine.command.metric_files import metric_key
from engine.command.run_metrics import MetricsFinder
from engine.foreign.reading import EPOCH_NAMES
from engine.runs.curve_reader import CurveReader
from engine.runs.curves import SELECTION_KEYS
from engine.runs.folder import RunFolder
from engine.runs.foreign_record import by_importance
from engine.runs.metrics import Metric, find_key, registry_keys
from engine.utils.codec import finite
from engine.utils.text import list_names

# What is read of a run at once, and for how long after its end.
MAX_POLL_SECONDS, MAX_LAST_SECONDS = 0.2, 10.0
MAX_SHOWN_NAMES = 8
# Optuna's journal gets a line for each value: 1,000 for a million steps.
STEP_GROWTH = 1.01
_NO_MATCH = 9


class MetricReader:
    """Follows one metric of a run. `metric` is its row for `foreign_metric`, under the name that the user typed."""

    def __init__(self, folder: RunFolder, metric: Metric) -> None:
        self._finder, self._metric = MetricsFinder(folder), metric
        self._reader = CurveReader(self._finder.find())
        self.by_step: dict[int, float | None] = {}
        """Values by their steps, None for one that is not finite. Later ones are some steps apart."""

    def poll(self, *, to_end: bool = False) -> float | None:
        """Read what is new, with `to_end` all there is. Return the best finite value, None if there is none."""
        found = self._finder.find()
        if found is not self._reader.run:
            self._reader, self.by_step = CurveReader(found), {}
        deadline = time.monotonic() + (MAX_LAST_SECONDS if to_end else MAX_POLL_SECONDS)
        self._reader.read(lambda: time.monotonic() > deadline)
        curves, wanted = self._reader.curves, self._metric.label
        name = min(curves.names, key=lambda name: (match_rank(wanted, name), name), default="")
        if match_rank(wanted, name) == _NO_MATCH:
            return None
        points, last = curves.over(name, "step").means, max(self.by_step, default=-1)
        is_new = points.x >= max(last + 1, int(last * STEP_GROWTH))
        for step, value in zip(points.x[is_new].astype(int).tolist(), points.y[is_new].tolist(), strict=True):
            if step >= max(last + 1, int(last * STEP_GROWTH)):
                self.by_step[step], last = finite(value), step
        extremes = curves.extremes(name)
        return max(extremes.low, extremes.high, key=self._metric.merit)

    @property
    def found_names(self) -> str:
        """The names of the metrics that the run has, as a text; empty without one."""
        names = by_importance(sorted(name for name in self._reader.curves.names if name.lower() not in EPOCH_NAMES))
        return list_names(names, MAX_SHOWN_NAMES)


@lru_cache(maxsize=4096)
def match_rank(wanted: str, name: str) -> int:
    """Return how well the name of a metric in a run fits the wanted one, 0 for the same name.

    `wanted` may also be the key or the label in the registry of metrics: `val_accuracy` and `val acc` are `val/acc`.
    """
    if name == wanted:
        return 0
    if metric_key(name) == metric_key(wanted):
        return 1
    key, wanted_key = registry_keys([name]).get(name), find_key(wanted) or ""
    return 2 if key is not None and key == SELECTION_KEYS.get(wanted_key, wanted_key) else _NO_MATCH
