"""The columns that the list of runs can have, with the values that the runs have in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.runs.fields import COMMAND_PREFIX, FOREIGN_FIELDS, NO_NAMES, Field, Names, as_text, field_names, find_field
from engine.runs.foreign_record import by_importance, known_keys
from engine.runs.metrics import METRICS, own_metrics, recorded_foreign_metrics, recorded_metrics
from engine.runs.run_config import default_values
from engine.runs.run_row import RunRow
from engine.utils.errors import UsageError
from engine.utils.text import printable

# Values of a key that are named.
MAX_NAMED_VALUES, MAX_VALUE_LENGTH = 4, 16
FIRST_COLUMNS = ("state", "age", "step")
MAX_METRIC_COLUMNS, MAX_PARAMETER_COLUMNS, MAX_ARGUMENT_COLUMNS, MAX_MEASURED_ROWS = 4, 8, 6, 500
MAX_TEXT_LENGTH = 24  # a longer value, such as a path, is no column that people compare
MAX_LISTED_METRICS = 2  # of commands in a list with few columns
# Not worth a column: a list has them in each line, or hides those that have them.
OMITTED_FIELDS = {"name", "archived", "folder"}


@dataclass(frozen=True)
class ColumnChoice:
    """A column to choose: its name, and what is known of its values."""

    name: str
    about: str = ""


def known_columns(columns: Iterable[str], names: Names = NO_NAMES) -> list[Field]:
    """Return the fields that are still known and printable: settings may be of another version, or damaged."""
    known: dict[str, Field] = {}
    for name in filter(str.isprintable, columns):
        with suppress(UsageError):
            field = find_field(name, names)
            known[field.name] = field
    return list(known.values())


def column_choices(rows: Sequence[RunRow], first: Iterable[str], *, is_foreign: bool = False) -> list[ColumnChoice]:
    """Return all columns: `first`, then the config keys or parameters that differ between the runs, their metrics,
    fields of every run, and other keys.

    Takes 10 ms for 10,000 runs. Imports the config schema, unless the runs are foreign.
    """
    prefix = "" if is_foreign else COMMAND_PREFIX
    parameters = value_texts(rows, lambda row: row.record.command_parameters)
    about = {prefix + key: _about(list(found)) for key, found in parameters.items()}
    if is_foreign:
        differing, rest = sorted(key for key, found in parameters.items() if len(found) > 1), sorted(parameters)
        metrics = [metric for key in by_importance(known_keys(rows)) for metric in recorded_foreign_metrics(key)]
        shared = [*(metric.key for metric in metrics), *FOREIGN_FIELDS]
    else:
        differing, rest = _config_keys(rows, about)
        metrics = recorded_metrics(own_metrics(row.record for row in rows))
        own = [metric.key for metric in metrics if metric.key not in METRICS]
        shared = [*own, *(COMMAND_PREFIX + key for key in sorted(parameters)), *field_names()]
    about |= {metric.key: printable(metric.description) for metric in metrics}
    names = dict.fromkeys([*first, *differing, *(name for name in shared if name not in OMITTED_FIELDS), *rest])
    return [ColumnChoice(name, about.get(name, "")) for name in names]


def _config_keys(rows: Sequence[RunRow], about: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the config keys that differ between runs, and all keys. Adds what is known of their values."""
    values = value_texts(rows, lambda row: row.record.config or {})
    defaults = default_values()
    for key, found in values.items():
        if key in defaults and any(key not in (row.record.config or ()) for row in rows):
            found[as_text(defaults[key])] = None
        about[key] = _about(list(found))
    # A run of another version may have other keys.
    differing = [key for key, found in values.items() if len(found) > 1 and key in defaults]
    return sorted(differing, key=list(defaults).index), list(defaults)


def value_texts(rows: Iterable[RunRow], values: Callable[[RunRow], Mapping[str, Any]]) -> dict[str, dict[str, None]]:
    """Return the different values of each key that the rows have, as text, in their order."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, value in values(row).items():
            found.setdefault(key, {})[as_text(value)] = None
    return found


def commands_metrics(rows: Iterable[RunRow]) -> list[str]:
    """Return the keys of the most important metric of commands without a validation accuracy, those of most first."""
    records = [row.record for row in rows if row.record.command and row.record.values.get("best_val_accuracy") is None]
    known = ([key for key in record.metric_keys.values() if key != "lr"] for record in records)
    counts = Counter(key for keys in known for key in by_importance(keys)[:1])
    return [key for key, _ in counts.most_common(MAX_LISTED_METRICS)]


def run_columns(rows: Sequence[RunRow], *, is_foreign: bool = False) -> tuple[str, ...]:
    """Return the columns for a list of commands or of foreign runs without chosen ones: state, metrics of most runs,
    and the parameters that differ."""
    measured = rows[:: max(len(rows) // MAX_MEASURED_ROWS, 1)]
    # A column `lr` is the parameter.
    metrics = by_importance(key for key in known_keys(measured) if key != "lr")[:MAX_METRIC_COLUMNS]
    counts = Counter(key for row in measured for key in row.record.command_parameters)
    values = value_texts(measured, lambda row: row.record.command_parameters)

    def differs(key: str) -> bool:
        # What only some commands were given differs, too.
        is_partial = not is_foreign and counts[key] < len(measured)
        is_short = max(map(len, values[key])) <= MAX_TEXT_LENGTH
        return is_short and (len(values[key]) > 1 or is_partial or (not is_foreign and len(measured) == 1))

    differing = sorted(filter(differs, values), key=lambda key: (-counts[key] * is_foreign, key))
    if is_foreign:
        return (*FIRST_COLUMNS, *metrics, *differing[:MAX_PARAMETER_COLUMNS], "format")
    arguments = (COMMAND_PREFIX + key for key in differing[:MAX_ARGUMENT_COLUMNS])
    return ("state", "step", "age", *metrics, *arguments, "seconds", "command", "tags")


def _about(values: Sequence[str]) -> str:
    """Return the first values of a key, and how many more there are."""
    named = [printable(value)[:MAX_VALUE_LENGTH] or "none" for value in sorted(values)[:MAX_NAMED_VALUES]]
    more = len(values) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
