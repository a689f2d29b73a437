"""Compare runs: the config keys that differ, metrics, and groups of runs that differ in the seed alone.

`gputrain compare` prints a `Comparison`, and `tui.screens.compare` shows it beside the curves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.base.codec import to_builtins
from engine.base.errors import Problem, UsageError
from engine.config.differences import (
    SEED_KEY,
    KeyDifference,
    changes_results,
    differing_keys,
    seed_group_key,
)
from engine.runs.folder import RunState
from engine.runs.metrics import (
    METRICS,
    NO_METRICS,
    Better,
    Metric,
    foreign_metrics,
    format_metric,
    own_metrics,
    recorded_metrics,
)
from engine.runs.monitor import record_monitor
from engine.runs.run_row import RunRow

MAX_RUNS = 200
MAX_REPORTED_RUNS = 16
"""Of a page or a figure, where each run has a color or a letter of its own."""
DATASETS_WITHOUT_FILES = {"digits", "fake"}
# Tables show all other metrics of the registry.
OMITTED_KEYS = {
    *("val_accuracy", "val_loss", "train_accuracy", "total_epochs", "step", "steps", "eta_seconds", "rate_now"),
    *("data_wait", "mfu", "grad_norm", "parameters", "queue_place"),
}


@dataclass(frozen=True)
class Spread:
    """Mean of the known values of a group, their sample standard deviation (n - 1; None for one value), and number."""

    mean: float
    deviation: float | None
    count: int


RunGroup = tuple[int, ...]
"""What a table shows side by side: one run, or runs that differ in the seed alone, as indices into `Comparison.runs`.
"""


@dataclass(frozen=True)
class Comparison:
    """Runs, the metrics of their records, the config keys that differ, the groups that differ in the seed alone, what
    the reader should know, and the metric by which all runs of gputrain choose their best epoch, None if they differ.
    """

    runs: tuple[RunRow, ...]
    metrics: tuple[Metric, ...]
    differences: tuple[KeyDifference, ...]
    seed_groups: tuple[RunGroup, ...]
    notes: tuple[Problem, ...]
    monitor: Metric | None = None

    def columns(self, *, grouped: bool) -> list[RunGroup]:
        """Return a column for each run, or for each group and each other run, in the order of their first runs."""
        groups = {group[0]: group for group in self.seed_groups} if grouped else {}
        members = {run for group in groups.values() for run in group}
        return [groups.get(run, (run,)) for run in range(len(self.runs)) if run in groups or run not in members]

    @property
    def shown_metrics(self) -> list[Metric]:
        """The metrics with a value in at least one run, that of the best epoch first, except for `OMITTED_KEYS`, and
        for the GPUs if only other programs without any are compared."""
        without_gpus = all(run.formats and not run.record.values.get("gpus") for run in self.runs)
        first = () if self.monitor is None else (self.monitor,)
        omitted = {*OMITTED_KEYS, *(("gpus",) if without_gpus else ()), *(metric.key for metric in first)}
        shown = [*first, *(metric for metric in self.metrics if metric.key not in omitted)]
        return [metric for metric in shown if any(metric.of_run(run.record) is not None for run in self.runs)]

    def value(self, column: RunGroup, metric: Metric) -> Spread | None:
        """Return the mean and spread of a metric over the runs of a column; None if it is unknown."""
        return spread(metric.of_run(self.runs[run].record) for run in column)

    def best_columns(self, columns: Sequence[RunGroup], metric: Metric) -> set[int]:
        """Return the indices of the columns with the best value. Empty if all look the same, or fewer than two are
        known.

        Durations compare only between runs that have finished.
        """
        values: dict[int, float] = {}
        for index, column in enumerate(columns):
            finished = all(self.runs[run].state == RunState.FINISHED for run in column)
            value = self.value(column, metric)
            if value is not None and (finished or metric.key != "seconds"):
                values[index] = value.mean
        if metric.better is Better.NEITHER or not values:
            return set()
        # Of two values with the same digits, no reader sees which one is better.
        shown = {index: format_metric(metric, value) for index, value in values.items()}
        best = shown[max(values, key=lambda index: metric.merit(values[index]))]
        return {index for index, text in shown.items() if text == best} if len(set(shown.values())) > 1 else set()

    def to_dict(self, baseline: int | None = None) -> dict[str, Any]:
        """Return the comparison as JSON values, with differences from the run `baseline` if there is one."""
        columns = self.columns(grouped=False)
        metrics = [{metric.key: metric.of_run(run.record) for metric in self.metrics} for run in self.runs]
        best = {metric.key: sorted(self.best_columns(columns, metric)) for metric in self.metrics if metric.better}
        runs: list[dict[str, object]] = []
        for run, values in zip(self.runs, metrics, strict=True):
            entry: dict[str, object] = {"name": run.name, "folder": run.folder, "state": run.state}
            entry |= {"formats": list(run.formats)} if run.formats else {}
            entry |= {"figures": values, "problem": run.problem}
            entry |= {} if run.record.code is None else {"code": to_builtins(run.record.code)}
            if baseline is not None:
                entry["difference"] = {
                    key: None if value is None or reference is None else value - reference
                    for (key, value), reference in zip(values.items(), metrics[baseline].values(), strict=True)
                }
            runs.append(entry)
        return {
            "runs": runs,
            "baseline": None if baseline is None else self.runs[baseline].name,
            "config": {difference.key: list(difference.values) for difference in self.differences},
            "best": best,
            "seed_groups": [{"runs": list(group), "figures": self._group_metrics(group)} for group in self.seed_groups],
            "notes": list(map(str, self.notes)),
        }

    def _group_metrics(self, group: RunGroup) -> dict[str, object]:
        values = {metric.key: self.value(group, metric) for metric in self.metrics}
        return {name: None if value is None else asdict(value) for name, value in values.items()}


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the mean and spread of the known values; None if there is none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), deviation, len(known))


def spread_text(metric: Metric, value: Spread) -> str:
    """Format a metric; of a group the mean and the standard deviation."""
    text = format_metric(metric, value.mean)
    return text if not value.deviation else f"{text} ±{format_metric(metric, value.deviation)}"


def compare_runs(runs: Sequence[RunRow], directions: Mapping[str, Better] = NO_METRICS) -> Comparison:
    """Compare runs that have been read. `directions` are the stored directions of the user's own metrics.

    Raises UsageError as `require_comparable` does.
    """
    require_comparable(len(runs))
    own = own_metrics((run.record for run in runs if not run.formats), directions)
    metrics = recorded_metrics(own)
    foreign = own_metrics(run.record for run in runs if run.formats)
    for name in sorted(foreign.keys() - own.keys()):
        metrics += foreign_metrics(name, directions.get(name))
    differing = _differences(runs)
    notes = [Problem(run.name, run.problem, code="damaged") for run in runs if run.problem is not None]
    if _datasets_differ(runs, {difference.key for difference in differing}):
        reason = "The runs train on different datasets, so their accuracies and losses do not compare"
        notes.insert(0, Problem("", reason, code="not-comparable"))
    differences = tuple(difference for difference in differing if changes_results(difference))
    monitors = {each.label: each for each in (record_monitor(run.record) for run in runs if not run.formats)}
    monitor = next(iter(monitors.values())) if len(monitors) == 1 else None
    if len(monitors) > 1:
        reason = f"The runs choose their best epochs by different metrics: {', '.join(monitors)}"
        notes.append(Problem("", reason, code="not-comparable"))
    if monitor is not None and monitor.key not in METRICS:
        # The best value of an own metric by itself is the same number.
        metrics = [*(metric for metric in metrics if metric.label != monitor.label), monitor]
    return Comparison(tuple(runs), tuple(metrics), differences, _seed_groups(runs), tuple(notes), monitor)


def _differences(runs: Sequence[RunRow]) -> list[KeyDifference]:
    """Return the config keys in which runs differ, then the parameters of foreign runs.

    A parameter that only some of the foreign runs have differs, too. A run of gputrain has all keys of the schema, so
    what it lacks says nothing.
    """
    own = differing_keys([None if run.formats else run.config for run in runs])
    differences = {difference.key: difference for difference in own}
    foreign = [run.config for run in runs if run.formats and run.config is not None]
    for key in sorted({key for config in foreign for key in config}):
        values = [None if run.config is None else run.config.get(key) for run in runs]
        known = [value for run, value in zip(runs, values, strict=True) if has_key(run, key)]
        # True equals 1 in Python.
        is_equal = all(value == known[0] and (value is True) == (known[0] is True) for value in known)
        if not is_equal or any(key not in config for config in foreign):
            differences[key] = KeyDifference(key, tuple(values))
    return list(differences.values())


def _datasets_differ(runs: Sequence[RunRow], keys: set[str]) -> bool:
    own = [run.config for run in runs if run.config is not None and not run.formats]
    names = {str(config["data.dataset"]) for config in own}
    sizes = {size for run in runs if (size := _dataset(run))}
    paths_differ = not keys.isdisjoint(("data.path", "data.val_path"))
    return len(names) > 1 or len(sizes) > 1 or (paths_differ and not names <= DATASETS_WITHOUT_FILES)


def has_key(run: RunRow, key: str) -> bool:
    """Whether the config has a value of a key. A foreign run has no key of the schema."""
    return run.config is not None and key in run.config


def _dataset(run: RunRow) -> tuple[int | None, ...]:
    """Return training images, validation images and classes; nothing before the start."""
    record = run.record
    return () if record.train_images is None else (record.train_images, record.val_images, record.classes)


def require_comparable(count: int, limit: int = MAX_RUNS) -> None:
    """Raise UsageError if this number of runs cannot be compared."""
    if count > limit:
        raise UsageError.one("compare", f"takes at most {limit} runs, not {count}; choose fewer", code="too-many")
    if count == 0:
        raise UsageError.one("compare", "needs at least one run", code="missing-value")


def _seed_groups(runs: Sequence[RunRow]) -> tuple[tuple[int, ...], ...]:
    """Return the runs, by index, that differ in the seed alone. A group has at least two seeds."""
    alike: dict[object, list[int]] = {}
    for index, run in enumerate(runs):
        if run.config is not None and not run.formats:
            size = (*map(run.record.values.get, ("ranks", "global_batch")), _dataset(run))
            alike.setdefault((seed_group_key(run.config), size), []).append(index)
    seeds = [None if run.config is None else str(run.config.get(SEED_KEY)) for run in runs]
    return tuple(tuple(group) for group in alike.values() if len({seeds[run] for run in group}) > 1)
