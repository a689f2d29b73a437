"""Runs of other programs as rows of a list, so that filter, order, columns and marks work as for runs of gputrain.

The record of such a row is that of `foreign_record`, with the parameters of the run. It has the bounds of all
metrics by the names that the run has for them, so that a filter may name a metric as the run does.
"""

from __future__ import annotations

import math

from engine.foreign.run_list import ListedRun
from engine.runs.foreign_record import foreign_record, low_and_high, metric_keys
from engine.runs.run_row import RunRow
from engine.utils import codec


def make_foreign_row(listed: ListedRun) -> RunRow:
    """Return the row of a run of another program."""
    keys = metric_keys(listed.metrics)
    record = foreign_record(listed.metrics, keys, listed.changed_at or None)
    parameters = {key: _config_value(value) for key, value in listed.parameters.items()}
    return RunRow(
        name=listed.run.name,
        folder=listed.key,
        state=listed.activity,
        record=codec.replace(
            record, command_parameters=parameters, values=record.values | low_and_high(listed.metrics)
        ),
        message=listed.note,
        format=", ".join(listed.run.formats),
    )


def _config_value(value: bool | int | float | str | None) -> bool | int | float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
