"""Sweeps for `gputrain sweep` and the screen: the list of sweeps, and the trials of one sweep as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from engine.base.text import pluralize, printable
from engine.base.units import UNKNOWN, format_age, format_duration, format_number, format_share
from engine.jobs.sweeps.folder import SweepFolder
from engine.report.table import Align, Column, FittedTable, Line, Shorten, fit, plain_lines
from engine.runs.folder import RunState
from engine.runs.metrics import format_metric
from tui.charts.meter import SQUARE
from tui.screens.phrases import MARK, state_symbol
from tui.terminal.palette import ACCENT, BAD, GOOD, MUTED, STRONG

if TYPE_CHECKING:
    from engine.jobs.sweeps.status import SweepStatus, TrialRow
    from engine.runs.metrics import Metric

STATES = ("complete", "running", "stopped", "pruned", "failed")
SYMBOLS = {
    "complete": state_symbol(RunState.FINISHED),
    "running": state_symbol(RunState.RUNNING),
    "stopped": state_symbol(RunState.STOPPED),
    "pruned": ("✂", MUTED),
    "failed": state_symbol(RunState.FAILED),
}
STATES_WITH_REASON = ("failed", "complete")
MIN_PARAM_COLUMNS, MAX_PARAM_COLUMNS, MIN_NOTE_COLUMNS = 7, 22, 5
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 6, 24
NARROW_COLUMNS, FULL_KEYS_MIN_WIDTH = 36, 120
NUMBER: Column[TrialRow] = Column("trial", "trial", lambda row: str(row.number), Align.RIGHT, priority=2)
RUN: Column[TrialRow] = Column("run", "run", lambda row: row.run)
STATE: Column[TrialRow] = Column(
    "state", "state", lambda row: row.state, priority=2,
    style=lambda row: SYMBOLS[row.state][1] if row.state in ("running", "failed") else "",
)  # fmt: skip
TIME: Column[TrialRow] = Column(
    "time", "time", lambda row: UNKNOWN if row.seconds is None else format_duration(max(row.seconds, 0.0)), Align.RIGHT
)
NOTE: Column[TrialRow] = Column(
    "note", "", lambda row: _note(row), width=MIN_NOTE_COLUMNS, flex=True, optional=True,
    style=lambda row: BAD if row.state in STATES_WITH_REASON and row.reason else MUTED,
)  # fmt: skip


def _note(row: TrialRow) -> str:
    """Return what marks a trial: that it failed or diverged, or is the config itself."""
    parts = ("the config itself" if row.preset else "", row.reason if row.state in STATES_WITH_REASON else "")
    return "; ".join(filter(None, parts))


def sweep_columns(now: float) -> list[Column[SweepStatus]]:
    """Return the columns of `gputrain sweep list`. `now` is the time in Unix seconds."""

    def best(row: SweepStatus) -> str:
        return format_value(row.settings.objective, None if row.best is None else row.best.value)

    def age(row: SweepStatus) -> str:
        return UNKNOWN if row.started_at is None else format_age(max(now - row.started_at, 0.0))

    return [
        Column("name", "name", lambda row: row.name),
        Column("state", "state", lambda row: row.state),
        Column("trials", "trials", lambda row: f"{row.done}/{row.settings.trials}", Align.RIGHT),
        Column("best", "best", best, Align.RIGHT),
        Column("metric", "metric", lambda row: row.settings.metric_name),
        Column("age", "age", age),
    ]


def value_column(status: SweepStatus) -> Column[TrialRow]:
    """Return the column of the metric that the sweep optimizes."""
    objective, best = status.settings.objective, status.best
    return Column(
        "value", objective.label, lambda row: format_value(objective, row.value), Align.RIGHT, priority=2,
        style=lambda row: GOOD if best is not None and row.number == best.number else "",
    )  # fmt: skip


def step_column(status: SweepStatus) -> Column[TrialRow]:
    """Return the column of the latest epoch, or step of a script's metric."""
    name = status.settings.step_name
    return Column("epoch", name, lambda row: str(row.epoch or UNKNOWN), Align.RIGHT, priority=2)


def param_columns(keys: Sequence[str]) -> list[Column[TrialRow]]:
    """Return the column of each searched key; unknown where trial 0 has a value outside of the space."""

    def column(key: str) -> Column[TrialRow]:
        return Column(
            key, key, lambda row: param_text(row, key), width=MIN_PARAM_COLUMNS, max_width=MAX_PARAM_COLUMNS,
            priority=1, flex=True, style=lambda row: MUTED if key not in row.params else "", shorten=Shorten.MIDDLE,
        )  # fmt: skip

    return [column(key) for key in keys]


def trial_table(
    status: SweepStatus, width: int, is_marked: Callable[[TrialRow], bool] = lambda row: False
) -> FittedTable[TrialRow]:
    """Return the table of the screen: trials as bars up to the best value, and their parameters."""
    metric = status.settings.objective
    merits = sorted(metric.merit(row.value) for row in status.trials if row.value is not None)
    # A few bad trials would make the bars of all others equal.
    low, high = (merits[len(merits) // 4], merits[-1]) if merits else (0.0, 0.0)
    columns = min(max(width // 8, MIN_BAR_COLUMNS), MAX_BAR_COLUMNS)

    def bar(row: TrialRow) -> Line:
        if row.value is None:
            return ()
        share = max(metric.merit(row.value) - low, 0.0) / (high - low) if high > low else 1.0
        filled = 1 + round(share * (columns - 1))
        return ((SQUARE * filled, GOOD if row.state == "complete" else MUTED),)

    sign: Column[TrialRow] = Column(
        "sign", "", lambda row: ((MARK if is_marked(row) else " ", ACCENT), SYMBOLS[row.state]), priority=2
    )
    bars = Column("bar", "", bar, width=columns, max_width=columns)
    state, step = replace(STATE, priority=0), replace(step_column(status), priority=0)
    value = replace(value_column(status), title=metric.label.removeprefix("best " if width < NARROW_COLUMNS else ""))
    params = param_columns(list(status.settings.space))
    names = [column.key.rpartition(".")[2] for column in params]
    # The panel of the parameters has their keys in full.
    if width < FULL_KEYS_MIN_WIDTH and len(set(names)) == len(names):
        params = [replace(column, title=name) for column, name in zip(params, names, strict=True)]
    return fit([sign, NUMBER, value, bars, state, step, *params, NOTE], status.trials, width)


def param_table(status: SweepStatus, selected: TrialRow | None, width: int) -> FittedTable[str]:
    """Return the table of the searched keys: what they decide, and their values in the selected and the best trial."""
    importances, best = status.importances, status.best

    def value(row: TrialRow | None) -> Callable[[str], str]:
        return lambda key: UNKNOWN if row is None else param_text(row, key)

    def bar(key: str) -> Line:
        return (((SQUARE * max(round(importances[key] * MIN_BAR_COLUMNS), 1)), ACCENT),) if key in importances else ()

    title = "trial" if selected is None else f"trial {selected.number}"
    columns: list[Column[str]] = [
        Column(
            "key", "", lambda key: key, max_width=max(width // 2, MIN_PARAM_COLUMNS), priority=2, shorten=Shorten.MIDDLE
        ),
        Column(
            "share", "", lambda key: format_share(importances[key]) if key in importances else "", Align.RIGHT,
            priority=1, optional=True,
        ),
        Column("bar", "", bar, width=MIN_BAR_COLUMNS, optional=True),
        Column("trial", title, value(selected), max_width=MAX_PARAM_COLUMNS, priority=2),
        Column("best", "best", value(best), max_width=MAX_PARAM_COLUMNS, priority=1, style=GOOD),
    ]  # fmt: skip
    return fit(columns, list(status.settings.space), width)


def sweep_lines(status: SweepStatus) -> Iterator[str]:
    """Yield the lines of `gputrain sweep show`."""
    settings, objective = status.settings, status.settings.objective
    state = with_message("running" if status.running else "not running", status)
    counts = ", ".join(state_counts(status))
    yield printable(
        f"{status.name}: {state}, {len(status.trials)} of {settings.trials} trials ({counts or 'none yet'})"
    )
    yield ""
    if status.trials:
        columns = [
            NUMBER,
            RUN,
            STATE,
            value_column(status),
            step_column(status),
            TIME,
            *param_columns(list(settings.space)),
            NOTE,
        ]
        yield from plain_lines(columns, status.by_value())
        yield ""
    if status.best is not None:
        from engine.jobs.sweeps.best import best_command

        best, name = status.best, settings.metric_name
        values = " ".join(f"{key}={format_param(value)}" for key, value in best.params.items())
        yield printable(f"best: trial {best.number}, {name} {format_value(objective, best.value)}, {values}")
        yield printable(best_command(SweepFolder(Path(status.folder)), settings, best.params))


def with_message(state: str, status: SweepStatus) -> str:
    """Return the state with what the jobs of a sweep say that has not ended."""
    return f"{state} ({status.message})" if status.message and status.state != "ended" else state


def state_counts(status: SweepStatus) -> list[str]:
    """Return the number of trials in each state that has any."""
    return [f"{status.counts[name]} {name}" for name in STATES if status.counts.get(name)]


def format_value(objective: Metric, value: float | None) -> str:
    """Format a value of the metric that the sweep optimizes."""
    return UNKNOWN if value is None else format_metric(objective, value)


def format_param(value: object) -> str:
    """Format a value of a key in few digits."""
    return format_number(value) if isinstance(value, float) else str(value)


def param_text(row: TrialRow, key: str) -> str:
    """Return the value of a key in a trial."""
    return format_param(row.params[key]) if key in row.params else UNKNOWN


def status_lines(status: SweepStatus) -> list[Text]:
    """Return what is above the panels: whether the sweep runs, its trials by state, and the best one, with the keys
    that go on with them."""
    sign, style = SYMBOLS[{"running": "running", "ended": "complete"}.get(status.state, "stopped")]
    counts = ", ".join(f"{SYMBOLS[count.partition(' ')[2]][0]} {count}" for count in state_counts(status))
    done = f"   {status.done} of {pluralize(status.settings.trials, 'trial')} done   "
    resume = ", u resumes it" if status.state == "not running" else ""
    state = printable(with_message(status.state, status))
    lines = [Text.assemble((f"{sign} ", style), (state, STRONG), (resume, MUTED), done, counts)]
    if (best := status.best) is not None:
        objective = status.settings.objective
        value = f"★ {objective.label} {format_value(objective, best.value)}"
        again = "a starts its command again" if status.settings.command else "a trains it longer"
        lines.append(Text.assemble((value, GOOD), f" in trial {best.number}   ", (again, MUTED)))
    return lines
