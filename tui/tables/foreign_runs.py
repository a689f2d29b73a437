"""The table of runs that other programs have recorded: `gputrain watch`."""

from __future__ import annotations

import time

from engine.foreign.summary import RunSummary
from engine.show.table import Align, Column
from engine.utils.units import UNKNOWN, format_age, format_count, format_number

MAX_SHOWN_METRICS = 4


def latest_values(run: RunSummary) -> str:
    """Return the last values of the first metrics, and how many more there are."""
    shown = [
        f"{name} {format_number(metric.values[-1])}" for name, metric in list(run.metrics.items())[:MAX_SHOWN_METRICS]
    ]
    more = len(run.metrics) - len(shown)
    return "  ".join([*shown, *([f"+{more}"] if more else [])])


FOREIGN_COLUMNS: list[Column[RunSummary]] = [
    Column("name", "name", lambda run: run.run.name),
    Column("format", "format", lambda run: ", ".join(run.run.formats)),
    Column(
        "step",
        "step",
        lambda run: UNKNOWN if run.last_step is None else format_count(run.last_step),
        Align.RIGHT,
    ),
    Column("changed", "changed", lambda run: f"{format_age(max(time.time() - run.run.changed_at(), 0))} ago"),
    Column("values", "last values", latest_values),
]
