"""Runs of other programs as records and rows, so that filter, order, columns and marks work as for runs of gputrain.

A metric of the registry has its key there, whatever the run calls it; any other one is `metrics.NAME`. A row of a list
also has the bounds of all metrics by the names of the run, so that a filter may name a metric as the run does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from engine.base import codec
from engine.runs.metrics import HIGHEST_PREFIX, LOWEST_PREFIX, METRIC_PREFIX, METRICS, ODD_PREFIX, Better, registry_keys
from engine.runs.run_record import NO_RECORD, RunRecord, with_logged
from engine.runs.run_row import RunRow
from engine.watch.figures import Figures
from engine.watch.reading import EPOCH_NAMES, UNIX_TIMES, Scalar

if TYPE_CHECKING:
    # Lists of our own runs need no reader of foreign files.
    from engine.watch.folders import ForeignRun
    from engine.watch.run_list import ListedRun

# Metrics of the registry, the most important ones first. Metrics whose names contain one of the words follow them.
_FIRST_KEYS = ("val_loss", "val_accuracy", "train_loss", "train_accuracy")
_FIRST_WORDS = ("loss", "acc", "top1", "map", "f1", "ppl")


def metric_keys(values: Mapping[str, Figures]) -> dict[str, str]:
    """Return the key of each metric by its name in the run, sorted by name. The number of the epoch is no metric."""
    names = sorted(name for name in values if name.lower() not in EPOCH_NAMES)
    keys = {name: key for name, key in registry_keys(names).items() if _can_be(key, values[name])}
    return {name: keys.get(name, METRIC_PREFIX + name) for name in names}


def _can_be(key: str, values: Figures) -> bool:
    """Whether the values can be those of a metric of the registry, whose accuracies are shares and not percent."""
    return METRICS[key].better is not Better.HIGH or values.low is None or values.is_between(0, 1)


def by_importance(keys: Iterable[str]) -> list[str]:
    """Return keys of metrics, the most important ones first, and others in their order."""
    return sorted(keys, key=_rank)


def _rank(key: str) -> int:
    if key in _FIRST_KEYS:
        return _FIRST_KEYS.index(key)
    folded = key.removeprefix(METRIC_PREFIX).casefold()
    rank = next((rank for rank, word in enumerate(_FIRST_WORDS) if word in folded), len(_FIRST_WORDS))
    return len(_FIRST_KEYS) + rank


def with_metrics(record: RunRecord, values: Mapping[str, Figures]) -> RunRecord:
    """Return a record with the metrics of a run of another program, which are by its names for them."""
    keys = metric_keys(values)
    keyed = {key: values[name] for name, key in keys.items()}
    numbers = {key: part.last for key, part in keyed.items() if part.last is not None or key.startswith(METRIC_PREFIX)}
    if (step := last_step(values)) is not None:
        numbers["step"] = max(step, 0)
    if "val_loss" in keyed and (low := keyed["val_loss"].low) is not None:
        numbers["best_val_loss"] = low
    if "val_accuracy" in keyed and (high := keyed["val_accuracy"].high) is not None:
        numbers["best_val_accuracy"] = high
    numbers |= {ODD_PREFIX + key: part.odd_step for key, part in keyed.items() if part.odd_step is not None}
    numbers |= low_and_high({name: values[name] for name, key in keys.items() if key.startswith(METRIC_PREFIX)})
    return with_logged(record, numbers, {key: name for name, key in keys.items() if key in METRICS})


def known_keys(rows: Iterable[RunRow]) -> list[str]:
    """Return the keys of the metrics of rows, those of most rows first."""
    counts = Counter(key for row in rows for key in row.record.metric_keys.values())
    return [key for key, _ in counts.most_common()]


def last_step(values: Mapping[str, Figures]) -> int | None:
    """Return the highest last step of a metric, a Unix time only if there is nothing else; None without one."""
    steps = [part.step for part in values.values() if part.step is not None]
    return max((step for step in steps if step < UNIX_TIMES[0]), default=max(steps, default=None))


def low_and_high(values: Mapping[str, Figures]) -> dict[str, float | None]:
    """Return the lowest and the highest value of each metric by its name, as a record has them."""
    lowest: dict[str, float | None]
    lowest = {LOWEST_PREFIX + name: part.low for name, part in values.items() if part.low is not None}
    return lowest | {HIGHEST_PREFIX + name: part.high for name, part in values.items() if part.high is not None}


def make_foreign_row(listed: ListedRun) -> RunRow:
    """Return the row of a run of another program in a list."""
    record = codec.replace(NO_RECORD, updated_at=listed.changed_at or None)
    row = foreign_row(listed.run, record, listed.metrics, listed.parameters, listed.activity)
    record = codec.replace(row.record, values=row.record.values | low_and_high(listed.metrics))
    return row._replace(folder=listed.key, record=record, message=listed.note)


def foreign_row(
    run: ForeignRun, record: RunRecord, metrics: Mapping[str, Figures], parameters: Mapping[str, Scalar], state: str
) -> RunRow:
    """Return the row of a run of another program: what else is recorded of it, its metrics, parameters and state."""
    known = {key: _json_value(value) for key, value in parameters.items()}
    record = codec.replace(with_metrics(record, metrics), command_parameters=known)
    return RunRow(run.name, str(run.folder), state, record, formats=run.formats)


def _json_value(value: Scalar) -> Scalar:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
