"""A foreign run in the form of our own: a description for comparisons, and curves with the keys of the registry.

`engine.foreign` reads the points, `foreign_curves` keeps them. Comparisons, reports and their screens take a foreign
run through this module. Metrics that the registry does not have are `metrics.NAME`, like the user's own ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.command.metric_files import CommandMetrics
from engine.command.run_metrics import metrics_of_run
from engine.foreign.activity import Activity, judge
from engine.foreign.folders import ForeignRun
from engine.foreign.parameters import Parameters
from engine.runs.comparison import ComparedRun, describe_foreign_run
from engine.runs.comparison import read_run as read_own_run
from engine.runs.curves import XAxis
from engine.runs.find import OpenedRun
from engine.runs.folder import RunFolder, RunState
from engine.runs.foreign_record import foreign_record, metric_keys, with_metrics
from engine.runs.metrics import METRIC_PREFIX
from engine.runs.reduced_curves import MAX_BLOCKS, BlockSeries, RunCurves
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record
from engine.runs.series import block_extremes, block_means, block_starts
from engine.show.foreign_charts import group_metrics
from engine.show.foreign_curves import CurveReader, Extremes, ForeignCurves

# A curve of fewer points has values of epochs rather than of steps, and is not averaged.
MIN_SMOOTHED_POINTS = 100
# A metric of the validation is a curve of the best epochs, too, which is chosen by it.
SELECTION_KEYS = {"best_val_loss": "val_loss", "best_val_accuracy": "val_accuracy"}


class KeyedCurves:
    """The curves of a foreign run by the keys of the registry, as `RunCurves` has those of a run of gputrain.

    They follow what is read later, except for new metrics.
    """

    def __init__(self, store: ForeignCurves, max_blocks: int = MAX_BLOCKS) -> None:
        self._store, self._max_blocks = store, max_blocks
        self.values = {name: store.extremes(name) for name in store.names}
        self.keys: Mapping[str, str] = metric_keys(self.values)
        """The key of each metric."""
        self.names = list(self.keys)
        """The names that the run has for its metrics, without that of the epoch."""
        self._name_of = {key: name for name, key in self.keys.items()}

    @property
    def nonfinite_count(self) -> int:
        """Number of values that are NaN or infinite."""
        return sum(self.values[name].not_finite for name in self.names)

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
        """Whether a curve has enough points to be averaged over them."""
        return self.extremes(metric).count >= MIN_SMOOTHED_POINTS

    def over(self, metric: str, axis: XAxis) -> BlockSeries:
        blocks = self._store.over(self._name(metric), self._known(axis))
        starts = block_starts(len(blocks.means.x), self._max_blocks)
        if len(starts) == len(blocks.means.x):
            return blocks
        points = block_extremes(blocks.points, block_starts(len(blocks.points.x), self._max_blocks))
        return BlockSeries(points, block_means(blocks.means, starts)[0])

    @cached_property
    def has_whole_epochs_only(self) -> bool:
        """Whether a metric has several values in one epoch, which would be above each other. Takes 0.7 s for 2,000
        metrics, once."""
        positions = (self._store.over(name, "epoch").means.x for name in self.names)
        return any(len(x) > 1 and bool((np.diff(x) == 0).any()) for x in positions)

    def best_x(self, axis: XAxis) -> float | None:
        return None

    def _name(self, metric: str) -> str:
        return self._name_of.get(SELECTION_KEYS.get(metric, metric), "")

    def _known(self, axis: XAxis) -> XAxis:
        """Return an axis if the run has it, else the steps."""
        return axis if self.knows(axis) else "step"


Curves = RunCurves | KeyedCurves
"""The curves of one run, of gputrain or foreign, by the keys of `engine.runs.metrics`."""


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


OnRead = Callable[[ForeignRun, float], object]
"""What is called while a run is read, with the part of it that has been read, from 0 to 1."""


@dataclass(frozen=True)
class RunSummary:
    """A run as it was when its logs were read: its metrics by the names that it has for them, and its parameters.

    `problems` say what of the logs cannot be read.
    """

    run: ForeignRun
    metrics: Mapping[str, Extremes]
    parameters: Parameters
    activity: Activity
    problems: tuple[str, ...]

    @property
    def keys(self) -> dict[str, str]:
        """The key of each metric by its name in the run."""
        return metric_keys(self.metrics)


def describe(reader: CurveReader) -> ComparedRun:
    """Return what a comparison needs of a run, as far as it has been read: of a command, with all else that is recorded
    of its run."""
    run, curves = reader.run, KeyedCurves(reader.curves)
    if isinstance(run, CommandMetrics):
        record = with_metrics(_stored_record(run), curves.values, curves.keys)
    else:
        record = foreign_record(curves.values, curves.keys, run.changed_at())
    problem = "; ".join(reader.problems) or None
    return describe_foreign_run(run, record, reader.parameters(), find_state(reader), problem)


def find_state(reader: CurveReader) -> Activity | RunState:
    """Return whether a run goes on; of a command, the state of its run."""
    run = reader.run
    if isinstance(run, CommandMetrics):
        return RunFolder(run.folder).state(_stored_record(run).state)
    return judge(run.changed_at(), time.time(), has_ended=reader.has_ended)


def _stored_record(run: CommandMetrics) -> RunRecord:
    return read_run_record(RunFolder(run.folder)) or NO_RECORD


def as_foreign(run: OpenedRun) -> OpenedRun:
    """Return the metrics of a run of a command, which are read as those of a foreign run; any other run as it is."""
    return (metrics_of_run(run) or run) if isinstance(run, RunFolder) else run


def read_run(run: OpenedRun, on_read: OnRead | None = None) -> ComparedRun:
    """Read one run for a comparison: its config and its record, or all of a foreign run."""
    if isinstance(run, RunFolder):
        return read_own_run(run)
    return describe(read_whole(run, on_read))


def summarize(run: ForeignRun, on_read: OnRead | None = None) -> RunSummary:
    """Read all logs of a run."""
    reader = read_whole(run, on_read)
    metrics = {name: reader.curves.extremes(name) for name in sorted(reader.curves.names)}
    activity = judge(run.changed_at(), time.time(), has_ended=reader.has_ended)
    return RunSummary(run, metrics, reader.parameters(), activity, reader.problems)


def read_whole(run: ForeignRun, on_read: OnRead | None = None) -> CurveReader:
    """Read all points and parameters of a run."""
    reader = CurveReader(run)

    def report() -> bool:
        if on_read is not None:
            on_read(run, reader.share)
        return False

    reader.read(stopped=report)
    return reader
