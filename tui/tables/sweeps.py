"""Sweeps for `gputrain sweep` and the screen: the list of sweeps, and of one sweep its trials as a table, the
importance of each key, and the best results so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from engine.runs.folder import RunState
from engine.runs.metrics import format_metric
from engine.show.table import Align, Column, FittedTable, Shorten, cell_width, fit, plain_lines, shorten
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN, format_age, format_duration, format_number, format_share
from tui.charts.meter import meter
from tui.palette import BAD, GOOD, MUTED, STRONG, series_style
from tui.phrases import state_symbol
from tui.tables import spans, styled

if TYPE_CHECKING:
    from engine.runs.metrics import Metric
    from engine.sweeps.status import SweepStatus, TrialRow

STATES = ("complete", "running", "stopped", "pruned", "failed")
SYMBOLS = {
    "complete": state_symbol(RunState.FINISHED),
    "running": state_symbol(RunState.RUNNING),
    "stopped": state_symbol(RunState.STOPPED),
    "pruned": ("✂", MUTED),
    "failed": state_symbol(RunState.FAILED),
}
STATES_WITH_REASON = ("failed", "complete")
METER_COLUMNS, METER_MIN_WIDTH = 10, 100
MIN_PARAM_COLUMNS, MAX_PARAM_COLUMNS, MIN_NOTE_COLUMNS = 7, 22, 5
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS, SHARE_COLUMNS = 5, 30, 4
SIGN: Column[TrialRow] = Column("sign", "", lambda row: (SYMBOLS[row.state],), priority=2)
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


def meter_column(status: SweepStatus) -> Column[TrialRow]:
    """Return the column of meters between the worst and the best value."""
    shares = value_shares(status)
    return Column("meter", "", lambda row: spans(meter(shares.get(row.number), METER_COLUMNS, series_style(1))))


def param_columns(keys: Sequence[str]) -> list[Column[TrialRow]]:
    """Return the column of each searched key; unknown where trial 0 has a value outside of the space."""

    def column(key: str) -> Column[TrialRow]:
        return Column(
            key, key, lambda row: param_text(row, key), width=MIN_PARAM_COLUMNS, max_width=MAX_PARAM_COLUMNS,
            priority=1, flex=True, style=lambda row: MUTED if key not in row.params else "", shorten=Shorten.MIDDLE,
        )  # fmt: skip

    return [column(key) for key in keys]


def trial_table(status: SweepStatus, width: int) -> FittedTable[TrialRow]:
    """Return the table of the screen, whose headings are those of `screen_title`."""
    columns = [
        *(SIGN, NUMBER, STATE, value_column(status)),
        *([meter_column(status)] if width >= METER_MIN_WIDTH else []),
        *(step_column(status), *param_columns(list(status.settings.space)), NOTE),
    ]
    return fit(columns, status.trials, width, screen_title)


def screen_title(column: Column[TrialRow]) -> str:
    """Return a heading of the screen, where keys are without their section.

    Of `optim.name` it is the section, which says more.
    """
    return short_key(column.key) if "." in column.key else column.title


def short_key(key: str) -> str:
    """Return a config key without its section; of `optim.name` the section, which says more."""
    section, _, name = key.partition(".")
    return section if name == "name" else name or key


def sweep_lines(status: SweepStatus) -> Iterator[str]:
    """Yield the lines of `gputrain sweep show`."""
    from engine.sweeps.settings import pruning_warnings

    settings, objective = status.settings, status.settings.objective
    state = "running" if status.running else "not running"
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
    if status.importances:
        shares = ", ".join(f"{key} {format_share(share)}" for key, share in status.importances.items())
        yield printable(f"importance of each key for {settings.metric_name}: {shares}")
    if status.best is not None:
        from pathlib import Path

        from engine.sweeps.best import best_command
        from engine.sweeps.folder import SweepFolder

        best, name = status.best, settings.metric_name
        values = " ".join(f"{key}={format_param(value)}" for key, value in best.params.items())
        yield printable(f"best: trial {best.number}, {name} {format_value(objective, best.value)}, {values}")
        yield printable(best_command(SweepFolder(Path(status.folder)), settings, best.params))
    yield from pruning_warnings(settings, status.counts)


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


def status_line(status: SweepStatus) -> Text:
    """Return the line below the title: whether the sweep runs, its trials by state, and the best value."""
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    sign, style = SYMBOLS["running"] if status.running else SYMBOLS["stopped"]
    line.append(f" {sign} ", style).append(status.state, STRONG)
    line.append(f"   {status.done} of {pluralize(status.settings.trials, 'trial')} done")
    line.append(f"   {', '.join(state_counts(status))}", MUTED)
    if status.best is not None:
        value = format_value(status.settings.objective, status.best.value)
        line.append("   best ").append(value, GOOD).append(f" in trial {status.best.number}")
    return line


def value_shares(status: SweepStatus) -> dict[int, float]:
    """Return where the value of each trial lies between the worst (0) and the best (1) of all, by trial number."""
    merit = status.settings.objective.merit
    merits = {row.number: merit(row.value) for row in status.trials if row.value is not None}
    worst, best = min(merits.values(), default=0.0), max(merits.values(), default=0.0)
    return {number: 1.0 if best == worst else (value - worst) / (best - worst) for number, value in merits.items()}


def importance_lines(status: SweepStatus, width: int) -> list[Text]:
    """Return a bar of its share for each key, the most important first."""
    if not status.importances:
        text = "Follows when four trials are complete" if status.trials else "No trial yet"
        return [Text(text, MUTED, no_wrap=True, end="")]
    names = min(max(map(cell_width, status.importances)), max(width // 2, 1))
    bar = min(width - names - SHARE_COLUMNS - 4, MAX_BAR_COLUMNS)
    columns: list[Column[tuple[str, float]]] = [
        Column("key", "", lambda row: shorten(row[0], names, Shorten.MIDDLE), style=STRONG),
        Column("meter", "", lambda row: spans(meter(row[1], bar, series_style(1)))),
        Column("share", "", lambda row: format_share(row[1]), Align.RIGHT),
    ]
    rows = list(status.importances.items())
    table = fit(columns if bar >= MIN_BAR_COLUMNS else [columns[0], columns[2]], rows, width)
    return [styled(table.line(row)) for row in rows]


def best_so_far(status: SweepStatus) -> list[TrialRow]:
    """Return the completed trials that were better than all of a lower number, the latest first."""
    metric = status.settings.objective
    leaders: list[TrialRow] = []
    for row in status.trials:
        if row.state != "complete" or row.value is None:
            continue
        if not leaders or row.rank(metric) > leaders[-1].rank(metric):
            leaders.append(row)
    return leaders[::-1]


def best_lines(status: SweepStatus) -> list[Text]:
    """Return the best results so far: each trial that was better than those before it, with its values."""
    lines: list[Text] = []
    for row in best_so_far(status):
        values = printable(" ".join(f"{short_key(key)}={param_text(row, key)}" for key in row.params))
        line = Text(no_wrap=True, end="")
        value = format_value(status.settings.objective, row.value)
        line.append(value, GOOD if not lines else "").append(f"  trial {row.number}", STRONG)
        lines.append(line.append(f"  {'the config itself' if row.preset else values}", MUTED))
    return lines or [Text("No trial is complete yet", MUTED, no_wrap=True, end="")]
