"""The columns that the list of runs can have, with the values that the runs have in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.runs.fields import COMMAND_PREFIX, FOREIGN_FIELDS, Field, as_text, field_names, find_field
from engine.runs.foreign_record import by_importance, known_keys
from engine.runs.metrics import (
    METRIC_PREFIX,
    METRICS,
    NO_METRICS,
    Better,
    own_metrics,
    recorded_foreign_metrics,
    recorded_metrics,
)
from engine.runs.run_config import default_values
from engine.runs.run_record import RunRecord
from engine.runs.run_row import RunRow
from engine.utils.errors import UsageError
from engine.utils.text import printable

# Values of a key that are named.
MAX_NAMED_VALUES, MAX_VALUE_LENGTH = 4, 16
FIRST_METRICS = ("val_loss", "val_accuracy", "train_loss", "train_accuracy")
MAX_METRIC_COLUMNS, MAX_PARAMETER_COLUMNS, MAX_MEASURED_ROWS = 4, 6, 500
MAX_LISTED_METRICS = 2  # of commands in a list with few columns
# Not worth a column: a list has them in each line, or hides those that have them.
OMITTED_FIELDS = {"name", "archived", "folder"}


@dataclass(frozen=True)
class ColumnChoice:
    """A column to choose: its name, and what is known of its values."""

    name: str
    about: str = ""


def known_columns(
    names: Iterable[str], own: Mapping[str, Better] = NO_METRICS, parameters: Collection[str] | None = None
) -> list[Field]:
    """Return the fields that are still known and printable: settings may be of another version, or damaged."""
    known: dict[str, Field] = {}
    for name in filter(str.isprintable, names):
        with suppress(UsageError):
            field = find_field(name, own, parameters)
            known[field.name] = field
    return list(known.values())


def column_choices(rows: Sequence[RunRow], first: Iterable[str]) -> list[ColumnChoice]:
    """Return all columns: `first`, then the config keys that differ between the runs, the user's own metrics, fields
    of every run, and other keys.

    Takes 10 ms for 10,000 runs. Imports the config schema.
    """
    values = value_texts(rows, lambda row: row.record.config or {})
    counts = {key: sum(key in (row.record.config or ()) for row in rows) for key in values}
    defaults = default_values()
    about = {}
    for key, found in values.items():
        if counts[key] < len(rows) and key in defaults:
            found[as_text(defaults[key])] = None
        about[key] = _about(list(found))
    # A run of another version may have other keys.
    differing = [key for key, found in values.items() if len(found) > 1 and key in defaults]
    metrics = {metric.key: metric for metric in recorded_metrics(own_metrics(row.record for row in rows))}
    about |= {key: printable(metric.description) for key, metric in metrics.items()}
    own = [key for key in metrics if key not in METRICS]
    arguments = value_texts(rows, lambda row: row.record.command_parameters)
    about |= {COMMAND_PREFIX + key: _about(list(found)) for key, found in arguments.items()}
    own += [COMMAND_PREFIX + key for key in sorted(arguments)]
    shared = [name for name in (*own, *field_names()) if name not in OMITTED_FIELDS]
    names = dict.fromkeys([*first, *sorted(differing, key=list(defaults).index), *shared, *defaults])
    return [ColumnChoice(name, about.get(name, "")) for name in names]


def value_texts(rows: Iterable[RunRow], values: Callable[[RunRow], Mapping[str, Any]]) -> dict[str, dict[str, None]]:
    """Return the different values of each key that the rows have, as text, in their order."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, value in values(row).items():
            found.setdefault(key, {})[as_text(value)] = None
    return found


def commands_metrics(rows: Sequence[RunRow]) -> list[str]:
    """Return the keys of the most important metric of commands without a validation accuracy, those of most first."""
    records = [row.record for row in rows if row.record.command and row.record.values.get("best_val_accuracy") is None]
    counts = Counter(key for record in records for key in _known_metrics(record)[:1])
    return [key for key, _ in counts.most_common(MAX_LISTED_METRICS)]


def _known_metrics(record: RunRecord) -> list[str]:
    """Return the keys of the metrics that a command has, the most important ones first."""
    known = [key for key in FIRST_METRICS if record.values.get(key) is not None]
    return by_importance([*known, *(key for key in record.values if key.startswith(METRIC_PREFIX))])


def command_columns(rows: Sequence[RunRow]) -> tuple[str, ...]:
    """Return the columns for a list of commands without chosen ones: state, metrics of most runs, and what differs."""
    measured = rows[:: max(len(rows) // MAX_MEASURED_ROWS, 1)]
    metrics, values = Counter[str](), dict[str, set[str]]()
    for row in measured:
        record = row.record
        metrics.update(_known_metrics(record))
        for key in record.command_parameters.keys() | values.keys():
            values.setdefault(key, set()).add(as_text(record.command_parameters.get(key)))
    shown = by_importance(key for key, _ in metrics.most_common())[:MAX_METRIC_COLUMNS]
    differing = sorted(key for key, found in values.items() if len(found) > 1 or len(measured) == 1)
    arguments = (COMMAND_PREFIX + key for key in differing[:MAX_PARAMETER_COLUMNS])
    return ("state", "step", "age", *shown, *arguments, "seconds", "command", "tags")


def foreign_column_choices(rows: Sequence[RunRow], first: Iterable[str]) -> list[ColumnChoice]:
    """Return all columns of runs of other programs: `first`, then parameters that differ, metrics, and all else."""
    values = value_texts(rows, lambda row: row.record.config or {})
    about = {key: _about(list(found)) for key, found in values.items()}
    differing = sorted(key for key, found in values.items() if len(found) > 1)
    keys = by_importance(known_keys(rows))
    metrics = {metric.key: metric for key in keys for metric in recorded_foreign_metrics(key)}
    about |= {key: printable(metric.description) for key, metric in metrics.items()}
    shared = [name for name in FOREIGN_FIELDS if name not in OMITTED_FIELDS]
    names = dict.fromkeys([*first, *differing, *metrics, *shared, *sorted(values)])
    return [ColumnChoice(name, about.get(name, "")) for name in names]


def _about(values: Sequence[str]) -> str:
    """Return the first values of a key, and how many more there are."""
    named = [printable(value)[:MAX_VALUE_LENGTH] or "none" for value in sorted(values)[:MAX_NAMED_VALUES]]
    more = len(values) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
