"""The values of a foreign run as a record, under the keys that they have in lists, comparisons and reports.

A metric of the registry has its key there, whatever the run calls it; any other one is `metrics.NAME`. `foreign_rows`
makes rows of a list with it, `engine.show.foreign_run` what comparisons need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from engine.foreign.figures import Figures
from engine.foreign.reading import EPOCH_NAMES
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better, registry_keys
from engine.runs.run_record import NO_RECORD, RunRecord
from engine.utils import codec

if TYPE_CHECKING:
    from engine.runs.run_row import RunRow

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
    if METRICS[key].better is not Better.HIGH or values.low is None or values.high is None:
        return True
    return 0 <= values.low <= values.high <= 1


def by_importance(keys: Iterable[str]) -> list[str]:
    """Return keys of metrics, the most important ones first, and others in their order."""
    return sorted(keys, key=_rank)


def _rank(key: str) -> int:
    if key in _FIRST_KEYS:
        return _FIRST_KEYS.index(key)
    folded = key.removeprefix(METRIC_PREFIX).casefold()
    rank = next((rank for rank, word in enumerate(_FIRST_WORDS) if word in folded), len(_FIRST_WORDS))
    return len(_FIRST_KEYS) + rank


def foreign_record(values: Mapping[str, Figures], keys: Mapping[str, str], updated_at: float | None) -> RunRecord:
    """Return the values of a run as a record. `values` and `keys` (see `metric_keys`) are by the names in the run."""
    return codec.replace(with_metrics(NO_RECORD, values, keys), updated_at=updated_at)


def with_metrics(record: RunRecord, values: Mapping[str, Figures], keys: Mapping[str, str]) -> RunRecord:
    """Return a record with the values of a run as its metrics, all of `METRIC_FIELDS`."""
    keyed = {key: values[name] for name, key in keys.items()}
    own = {key.removeprefix(METRIC_PREFIX): part for key, part in keyed.items() if key.startswith(METRIC_PREFIX)}
    last = {key: part.last for key, part in keyed.items()}
    val_loss, val_accuracy = keyed.get("val_loss"), keyed.get("val_accuracy")
    return codec.replace(
        record,
        step=max(last_step(values) or 0, 0),
        train_loss=last.get("train_loss"),
        train_accuracy=last.get("train_accuracy"),
        val_loss=last.get("val_loss"),
        val_accuracy=last.get("val_accuracy"),
        best_val_loss=None if val_loss is None else val_loss.low,
        best_val_accuracy=None if val_accuracy is None else val_accuracy.high,
        last_values={"lr": last["lr"]} if "lr" in last else {},
        metrics={name: part.last for name, part in own.items()},
        metric_names={key: name for name, key in keys.items() if key in METRICS},
        **low_and_high(own),
    )


def known_keys(rows: Iterable[RunRow]) -> list[str]:
    """Return the keys of the metrics of rows, those of most rows first."""
    counts = Counter(key for row in rows for key in row.metric_keys.values())
    return [key for key, _ in counts.most_common()]


def last_step(values: Mapping[str, Figures]) -> int | None:
    """Return the highest last step of a metric; None without one."""
    return max((part.step for part in values.values() if part.step is not None), default=None)


def low_and_high(values: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the fields of a record with the lowest and the highest value of each metric by its name."""
    return {
        "lowest_metrics": {name: part.low for name, part in values.items() if part.low is not None},
        "highest_metrics": {name: part.high for name, part in values.items() if part.high is not None},
    }
