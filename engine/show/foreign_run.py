"""A foreign run in the form of our own: a description for comparisons, and curves with the keys of the registry.

`engine.foreign` reads the points, `foreign_curves` keeps them. Comparisons, reports and their screens take a foreign
run through this module. Metrics that the registry does not have are `metrics.NAME`, like the user's own ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from engine.foreign.activity import Activity, judge
from engine.foreign.folders import ForeignRun
from engine.foreign.parameters import Parameters, read_parameters
from engine.foreign.reading import EPOCH_NAMES
from engine.runs.comparison import ComparedRun, describe_foreign_run
from engine.runs.comparison import read_run as read_own_run
from engine.runs.curves import XAxis
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better, registry_keys
from engine.runs.reduced_curves import MAX_BLOCKS, BlockSeries, Curves
from engine.runs.run_record import NO_RECORD, RunRecord
from engine.runs.series import block_extremes, block_means, block_starts
from engine.show.foreign_charts import group_metrics
from engine.show.foreign_curves import CurveReader, Extremes, ForeignCurves

# A curve of fewer points has values of epochs rather than of steps, and is not averaged.
MIN_SMOOTHED_POINTS = 100
# A metric of the validation is a curve of the best epochs, too, which is chosen by it.
SELECTION_KEYS = {"best_val_loss": "val_loss", "best_val_accuracy": "val_accuracy"}


class KeyedCurves:
    """The curves of a foreign run by the keys of the registry, as `reduced_curves.Curves`.

    They follow what is read later, except for new metrics.
    """

    def __init__(self, store: ForeignCurves, max_blocks: int = MAX_BLOCKS) -> None:
        self._store, self._max_blocks = store, max_blocks
        self.names = [name for name in sorted(store.names) if name.lower() not in EPOCH_NAMES]
        """The names that the run has for its metrics, without that of the epoch."""
        self._extremes = {name: store.extremes(name) for name in self.names}
        keys = {name: key for name, key in registry_keys(self.names).items() if _can_be(key, self._extremes[name])}
        self.keys: Mapping[str, str] = {name: keys.get(name, METRIC_PREFIX + name) for name in self.names}
        """The key of each metric."""
        self._name_of = {key: name for name, key in self.keys.items()}

    @property
    def nonfinite_count(self) -> int:
        """Number of values that are NaN or infinite."""
        return sum(extremes.not_finite for extremes in self._extremes.values())

    @property
    def own_names(self) -> list[str]:
        return [key.removeprefix(METRIC_PREFIX) for key in self._name_of if key.startswith(METRIC_PREFIX)]

    @property
    def block_steps(self) -> int:
        return self._store.block_size(self._name_of.get("train_loss", ""))

    def knows(self, axis: XAxis) -> bool:
        return axis in self._store.axes

    def last_x(self, axis: XAxis) -> float:
        return self._store.last_x(self._known(axis))

    def has(self, metric: str) -> bool:
        return self.extremes(metric).low is not None

    def extremes(self, metric: str) -> Extremes:
        """Return the extremes of a metric by its key."""
        return self._store.extremes(self._name(metric))

    def is_long(self, metric: str) -> bool:
        """Whether a curve has so many points that it is averaged."""
        return self.extremes(metric).count >= MIN_SMOOTHED_POINTS

    def over(self, metric: str, axis: XAxis) -> BlockSeries:
        blocks = self._store.over(self._name(metric), self._known(axis))
        starts = block_starts(len(blocks.means.x), self._max_blocks)
        if len(starts) == len(blocks.means.x):
            return blocks
        points = block_extremes(blocks.points, block_starts(len(blocks.points.x), self._max_blocks))
        return BlockSeries(points, block_means(blocks.means, starts)[0])

    @property
    def has_whole_epochs_only(self) -> bool:
        """Whether a metric has several values in one epoch, which would be above each other."""
        positions = (self._store.over(name, "epoch").means.x for name in self.names)
        return any(len(x) > 1 and bool((np.diff(x) == 0).any()) for x in positions)

    def best_x(self, axis: XAxis) -> float | None:
        return None

    def _name(self, metric: str) -> str:
        return self._name_of.get(SELECTION_KEYS.get(metric, metric), "")

    def _known(self, axis: XAxis) -> XAxis:
        """Return an axis if the run has it, else the steps."""
        return axis if self.knows(axis) else "step"


def further_keys(runs: Sequence[KeyedCurves], shown: Container[str]) -> list[str]:
    """Return the keys of the metrics that have no curve in `shown`, the most important ones first."""
    charts = group_metrics(name for curves in runs for name in curves.names)
    names = [name for chart in charts for name in chart.metrics]
    keys = dict.fromkeys(curves.keys[name] for name in names for curves in runs if name in curves.keys)
    selection = {key for best, key in SELECTION_KEYS.items() if best in shown}
    return [key for key in keys if key not in shown and key not in selection]


def default_axis(runs: Iterable[Curves]) -> XAxis:
    """Return epochs as the x axis if all runs have them, and not the same epoch for many steps; else steps."""
    is_usable = all(
        run.knows("epoch") and not (isinstance(run, KeyedCurves) and run.has_whole_epochs_only) for run in runs
    )
    return "epoch" if is_usable else "step"


def _can_be(key: str, extremes: Extremes) -> bool:
    """Whether the values can be those of a metric of the registry, whose accuracies are shares and not percent."""
    if METRICS[key].better is not Better.HIGH or extremes.low is None or extremes.high is None:
        return True
    return 0 <= extremes.low <= extremes.high <= 1


class ForeignData:
    """The points and parameters of a foreign run, as far as they have been read."""

    def __init__(self, run: ForeignRun) -> None:
        self.run = run
        self._reader = CurveReader(run)
        self._parameters: Parameters | None = None
        self._read_state: tuple[ForeignCurves | None, int] = (None, 0)

    def read(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read all that is new, unless `stopped`; return whether there was any point."""
        while not stopped() and self._reader.read_slice():
            pass
        before, self._read_state = self._read_state, (self._reader.curves, self._reader.curves.version)
        if has_news := self._read_state != before:
            self._parameters = None
        return has_news

    def describe(self) -> ComparedRun:
        """Return what a comparison needs of the run."""
        if self._parameters is None:
            self._parameters = read_parameters(self.run.folder) | self._reader.logged_parameters
        problem = "; ".join(self._reader.problems) or None
        return describe_foreign_run(self.run, self.record(), self._parameters, self.activity(), problem)

    def activity(self) -> Activity:
        """Return whether the run goes on."""
        return judge(self.run.changed_at(), time.time(), has_ended=self._reader.has_ended)

    def record(self) -> RunRecord:
        """Return the last, lowest and highest value of each metric as a record of a run."""
        curves = self.curves()
        found = {key: curves.extremes(key) for key in curves.keys.values()}
        own = {key.removeprefix(METRIC_PREFIX): part for key, part in found.items() if key.startswith(METRIC_PREFIX)}
        last = {key: found[key].last for key in found.keys() - own.keys()}
        return RunRecord(
            state=NO_RECORD.state,
            step=max(int(self._reader.curves.last_x("step")), 0) if found else 0,
            updated_at=self.run.changed_at(),
            train_loss=last.get("train_loss"),
            train_accuracy=last.get("train_accuracy"),
            val_loss=last.get("val_loss"),
            val_accuracy=last.get("val_accuracy"),
            best_val_loss=curves.extremes("val_loss").low,
            best_val_accuracy=curves.extremes("val_accuracy").high,
            metrics={name: part.last for name, part in own.items()},
            lowest_metrics={name: part.low for name, part in own.items() if part.low is not None},
            highest_metrics={name: part.high for name, part in own.items() if part.high is not None},
        )

    def curves(self, max_blocks: int = MAX_BLOCKS) -> KeyedCurves:
        """Return the curves in at most `max_blocks` blocks each."""
        return KeyedCurves(self._reader.curves, max_blocks)


def read_run(run: OpenedRun) -> ComparedRun:
    """Read one run for a comparison: its config and its record, or all of a foreign run."""
    if isinstance(run, RunFolder):
        return read_own_run(run)
    data = ForeignData(run)
    data.read()
    return data.describe()
