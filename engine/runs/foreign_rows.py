"""Runs of other programs as rows of a list, so that filter, order, columns and marks work as for runs of gputrain.

The record of such a row has the parameters as config values, and each metric as one of the user's own metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from engine.foreign.run_list import ListedRun
from engine.runs.fields import as_text
from engine.runs.metrics import METRIC_PREFIX
from engine.runs.run_record import NO_RECORD
from engine.runs.run_row import RunRow
from engine.utils import codec

FIRST_COLUMNS = ("state", "age", "step")
MAX_METRIC_COLUMNS, MAX_PARAMETER_COLUMNS, MAX_MEASURED_ROWS = 4, 8, 500
MAX_VALUE_LENGTH = 24  # a longer value, such as a path, is no column that people compare
# Metrics whose names contain these are the first columns.
SHOWN_WORDS = ("loss", "acc", "top1", "map", "f1", "ppl")


def make_foreign_row(listed: ListedRun) -> RunRow:
    """Return the row of a run of another program."""
    metrics = listed.metrics
    record = codec.replace(
        NO_RECORD,
        step=max(listed.step or 0, 0),
        metrics={name: figures.last for name, figures in metrics.items()},
        lowest_metrics={name: figures.lowest for name, figures in metrics.items()},
        highest_metrics={name: figures.highest for name, figures in metrics.items()},
        updated_at=listed.changed_at or None,
        config={key: _config_value(value) for key, value in listed.parameters.items()},
    )
    return RunRow(
        name=listed.run.name,
        folder=listed.key,
        state=listed.activity,
        record=record,
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
    counts = Counter(name for row in measured for name in row.record.metrics)
    metrics = sorted(counts, key=lambda name: (_rank(name), -counts[name], name))[:MAX_METRIC_COLUMNS]
    values: dict[str, set[str]] = {}
    for row in measured:
        for key, value in (row.record.config or {}).items():
            values.setdefault(key, set()).add(as_text(value))
    differing = [key for key, found in values.items() if len(found) > 1 and max(map(len, found)) <= MAX_VALUE_LENGTH]
    differing.sort(key=lambda key: (-sum(key in (row.record.config or ()) for row in measured), key))
    shown = [METRIC_PREFIX + name for name in metrics]
    return (*FIRST_COLUMNS, *shown, *differing[:MAX_PARAMETER_COLUMNS], "format")


def _rank(name: str) -> int:
    folded = name.casefold()
    return next((rank for rank, word in enumerate(SHOWN_WORDS) if word in folded), len(SHOWN_WORDS))
