"""Runs of other programs as rows of a list, so that filter, order, columns and marks work as for runs of gputrain.

The record of such a row is that of `foreign_record`, with the parameters as config values. It has the bounds of all
metrics by the names that the run has for them, so that a filter may name a metric as the run does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from engine.foreign.run_list import ListedRun
from engine.runs.columns import value_texts
from engine.runs.foreign_record import by_importance, foreign_record, known_keys, low_and_high, metric_keys
from engine.runs.run_row import RunRow
from engine.utils import codec

FIRST_COLUMNS = ("state", "age", "step")
MAX_METRIC_COLUMNS, MAX_PARAMETER_COLUMNS, MAX_MEASURED_ROWS = 4, 8, 500
MAX_VALUE_LENGTH = 24  # a longer value, such as a path, is no column that people compare


def make_foreign_row(listed: ListedRun) -> RunRow:
    """Return the row of a run of another program."""
    keys = metric_keys(listed.metrics)
    record = foreign_record(listed.metrics, keys, listed.changed_at or None)
    config = {key: _config_value(value) for key, value in listed.parameters.items()}
    return RunRow(
        name=listed.run.name,
        folder=listed.key,
        state=listed.activity,
        record=codec.replace(record, config=config, values=record.values | low_and_high(listed.metrics)),
        message=listed.note,
        format=", ".join(listed.run.formats),
    )


def _config_value(value: bool | int | float | str | None) -> bool | int | float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parameter_names(rows: Sequence[RunRow]) -> tuple[str, ...]:
    """Return the names of the parameters of the rows, those of most rows first."""
    counts = Counter(key for row in rows for key in row.record.config or ())
    return tuple(key for key, _ in counts.most_common())


def default_columns(rows: Sequence[RunRow]) -> tuple[str, ...]:
    """Return the columns for a list without chosen ones: state, losses and scores of most runs, and what differs."""
    measured = rows[:: max(len(rows) // MAX_MEASURED_ROWS, 1)]
    keys = known_keys(measured)
    # A column `lr` is the parameter.
    metrics = by_importance(key for key in keys if key != "lr")[:MAX_METRIC_COLUMNS]
    values = value_texts(measured, lambda row: row.record.config or {})
    differing = [key for key, found in values.items() if len(found) > 1 and max(map(len, found)) <= MAX_VALUE_LENGTH]
    differing.sort(key=lambda key: (-sum(key in (row.record.config or ()) for row in measured), key))
    return (*FIRST_COLUMNS, *metrics, *differing[:MAX_PARAMETER_COLUMNS], "format")
