"""A sweep as text for `gputrain sweep show`: its trials by value, the best one, and what each key matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.runs.metrics import format_metric
from engine.utils.text import printable
from tui.text.runs import format_duration
from tui.text.tables import UNKNOWN, format_table

if TYPE_CHECKING:
    from engine.runs.metrics import Metric
    from engine.sweeps.status import SweepStatus, TrialRow

HEADER = ("TRIAL", "RUN", "STATE", "VALUE", "EPOCH", "TIME")
STATES = ("complete", "running", "stopped", "pruned", "failed")


def format_sweep(status: SweepStatus) -> str:
    """Return the text of `gputrain sweep show`."""
    return "\n".join(_lines(status))


def _lines(status: SweepStatus) -> Iterator[str]:
    settings, objective = status.settings, status.settings.objective
    state = "running" if status.running else "not running"
    counts = ", ".join(f"{status.counts[name]} {name}" for name in STATES if status.counts.get(name))
    yield printable(
        f"{status.name}: {state}, {len(status.trials)} of {settings.trials} trials ({counts or 'none yet'})"
    )
    yield ""
    if status.trials:
        keys = list(settings.space)
        rows = [
            (*HEADER, *keys),
            *((*row_cells(row, objective), *param_cells(row, keys)) for row in status.by_value()),
        ]
        yield from format_table(rows, right_aligned=(0, 3, 4, 5))
        yield ""
    for row in status.trials:
        if row.state == "failed":
            yield printable(f"trial {row.number} failed: {row.reason}")
    if status.importances:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in status.importances.items())
        yield printable(f"importance of each key for {objective.key}: {shares}")
    if status.best is not None:
        from pathlib import Path

        from engine.sweeps.controller import best_command
        from engine.sweeps.folder import SweepFolder

        best = status.best
        values = " ".join(f"{key}={format_param(value)}" for key, value in best.params.items())
        yield printable(f"best: trial {best.number}, {objective.key} {format_value(objective, best.value)}, {values}")
        yield printable(best_command(SweepFolder(Path(status.folder))))


def row_cells(row: TrialRow, objective: Metric) -> tuple[str, ...]:
    """Return the cells for `HEADER`."""
    name = f"{row.run} (config)" if row.preset else row.run
    seconds = UNKNOWN if row.seconds is None else format_duration(max(row.seconds, 0.0))
    return (str(row.number), name, row.state, format_value(objective, row.value), str(row.epoch or UNKNOWN), seconds)


def param_cells(row: TrialRow, keys: list[str]) -> tuple[str, ...]:
    """Return the cells of the searched keys; unknown where trial 0 has a value outside of the space."""
    return tuple(format_param(row.params[key]) if key in row.params else UNKNOWN for key in keys)


def format_value(objective: Metric, value: float | None) -> str:
    return UNKNOWN if value is None else format_metric(objective, value)


def format_param(value: object) -> str:
    """Return a value of a key in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
