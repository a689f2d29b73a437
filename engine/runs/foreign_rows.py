"""Runs of other programs as rows of a list, so that filter, order, columns and marks work as for runs of gputrain.

The record of such a row is that of `with_metrics`, with the parameters of the run. It has the bounds of all
metrics by the names that the run has for them, so that a filter may name a metric as the run does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.foreign.figures import Figures
from engine.foreign.folders import ForeignRun
from engine.foreign.reading import Scalar
from engine.foreign.run_list import ListedRun
from engine.runs.foreign_record import low_and_high, with_metrics
from engine.runs.run_record import NO_RECORD, RunRecord
from engine.runs.run_row import RunRow
from engine.utils import codec


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
