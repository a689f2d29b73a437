"""Runs of other programs as rows of a list, so that filter, order, columns and marks work as for runs of gputrain.

The record of such a row is that of `foreign_record`, with the parameters of the run. It has the bounds of all
metrics by the names that the run has for them, so that a filter may name a metric as the run does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.foreign.folders import ForeignRun
from engine.foreign.reading import Scalar
from engine.foreign.run_list import ListedRun
from engine.runs.foreign_record import foreign_record, low_and_high, metric_keys
from engine.runs.run_record import RunRecord
from engine.runs.run_row import RunRow
from engine.utils import codec


def make_foreign_row(listed: ListedRun) -> RunRow:
    """Return the row of a run of another program in a list."""
    record = foreign_record(listed.metrics, metric_keys(listed.metrics), listed.changed_at or None)
    record = codec.replace(record, values=record.values | low_and_high(listed.metrics))
    return foreign_row(listed.run, record, listed.parameters, listed.activity)._replace(
        folder=listed.key, message=listed.note
    )


def foreign_row(run: ForeignRun, record: RunRecord, parameters: Mapping[str, Scalar], state: str) -> RunRow:
    """Return the row of a run of another program with this record, parameters and state."""
    known = {key: _json_value(value) for key, value in parameters.items()}
    record = codec.replace(record, command_parameters=known)
    return RunRow(run.name, str(run.folder), state, record, formats=run.formats)


def _json_value(value: Scalar) -> Scalar:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
