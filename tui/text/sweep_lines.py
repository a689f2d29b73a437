"""A sweep as lines for its screen: the trials as a table, the importance of each key, and the best results so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from engine.runs.folder import RunState
from engine.utils.text import pluralize, printable
from tui.charts.meter import meter
from tui.palette import BAD, GOOD, MUTED, STRONG, series_style
from tui.text.run_lines import state_symbol
from tui.text.sweeps import STATES, format_param, format_value
from tui.text.tables import UNKNOWN, shorten_middle

if TYPE_CHECKING:
    from engine.runs.metrics import Metric
    from engine.sweeps.status import SweepStatus, TrialRow

SYMBOLS = {
    "complete": state_symbol(RunState.FINISHED),
    "running": state_symbol(RunState.RUNNING),
    "stopped": state_symbol(RunState.STOPPED),
    "pruned": ("✂", MUTED),
    "failed": state_symbol(RunState.FAILED),
}
STATE_COLUMNS, VALUE_COLUMNS, EPOCH_COLUMNS = 8, 13, 5
MAX_PARAM_COLUMNS, MIN_PARAM_COLUMNS = 22, 7
METER_COLUMNS, METER_MIN_WIDTH = 10, 100
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 5, 30
GAP = "  "


def status_line(status: SweepStatus) -> Text:
    """Return the line below the title: whether the sweep runs, its trials by state, and the best value."""
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    sign, style = SYMBOLS["running"] if status.running else SYMBOLS["stopped"]
    done = sum(row.state not in ("running", "stopped") for row in status.trials)
    state = "running" if status.running else "ended" if done >= status.settings.trials else "not running"
    line.append(f" {sign} ", style).append(state, STRONG)
    line.append(f"   {done} of {pluralize(status.settings.trials, 'trial')} done")
    counts = [f"{status.counts[name]} {name}" for name in STATES if status.counts.get(name)]
    line.append(f"   {', '.join(counts)}", MUTED)
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


def param_widths(keys: Sequence[str], rows: Sequence[TrialRow], room: int) -> list[int]:
    """Return the width of the column of each key: its name and values, narrowed to fit `room` columns together."""
    widths = []
    for key in keys:
        texts = [short_key(key), *(param_text(row, key) for row in rows)]
        widths.append(min(max(map(cell_len, texts)), MAX_PARAM_COLUMNS))
    while sum(widths) + len(GAP) * len(widths) > room and max(widths, default=0) > MIN_PARAM_COLUMNS:
        widths[widths.index(max(widths))] -= 1
    return widths


def short_key(key: str) -> str:
    """Return a config key without its section; of `optim.name` the section, which says more."""
    section, _, name = key.partition(".")
    return section if name == "name" else name or key


def param_text(row: TrialRow, key: str) -> str:
    return printable(format_param(row.params[key])) if key in row.params else UNKNOWN


def header_line(keys: Sequence[str], widths: Sequence[int], width: int, metric: Metric) -> Text:
    """Return the header of the table of trials."""
    name = shorten_middle(printable(metric.short_label).upper(), VALUE_COLUMNS)
    line = Text(no_wrap=True, end="", style=MUTED)
    line.append(f"  {'TRIAL':>5}  {'STATE':<{STATE_COLUMNS}}  {name:>{VALUE_COLUMNS}}")
    line.append(GAP + " " * METER_COLUMNS if width >= METER_MIN_WIDTH else "")
    line.append(f"  {'EPOCH':>{EPOCH_COLUMNS}}")
    for key, columns in zip(keys, widths, strict=True):
        line.append(GAP + shorten_middle(short_key(key), columns).ljust(columns))
    return line


def fixed_columns(width: int) -> int:
    """Return the columns of a line of the table without those of the keys."""
    columns = 2 + 5 + 2 + STATE_COLUMNS + 2 + VALUE_COLUMNS + 2 + EPOCH_COLUMNS
    return columns + (len(GAP) + METER_COLUMNS if width >= METER_MIN_WIDTH else 0)


def trial_line(
    row: TrialRow,
    objective: Metric,
    keys: Sequence[str],
    widths: Sequence[int],
    width: int,
    share: float | None,
    *,
    is_best: bool,
) -> Text:
    """Return a trial as a line: state, value with a meter between the worst and the best, epoch, and its values."""
    sign, style = SYMBOLS[row.state]
    line = Text(no_wrap=True, end="")
    line.append(f"{sign} ", style).append(f"{row.number:>5}  ")
    line.append(f"{row.state:<{STATE_COLUMNS}}", style if row.state in ("running", "failed") else "")
    line.append(f"  {format_value(objective, row.value):>{VALUE_COLUMNS}}", GOOD if is_best else "")
    if width >= METER_MIN_WIDTH:
        line.append(GAP).append_text(meter(share, METER_COLUMNS, series_style(1)))
    line.append(f"  {row.epoch or UNKNOWN:>{EPOCH_COLUMNS}}")
    for key, columns in zip(keys, widths, strict=True):
        text = shorten_middle(param_text(row, key), columns)
        line.append(GAP + text + " " * (columns - cell_len(text)), MUTED if key not in row.params else "")
    note = "the config itself" if row.preset else row.reason if row.state == "failed" else ""
    room = width - line.cell_len - len(GAP)
    if note and room >= MIN_BAR_COLUMNS:
        line.append(GAP + printable(note)[:room], BAD if row.state == "failed" else MUTED)
    return line


def importance_lines(status: SweepStatus, width: int) -> list[Text]:
    """Return a bar of its share for each key, the most important first."""
    if not status.importances:
        text = "Follows when four trials are complete" if status.trials else "No trial yet"
        return [Text(text, MUTED, no_wrap=True, end="")]
    name_columns = min(max(cell_len(key) for key in status.importances), max(width // 2, 1))
    lines: list[Text] = []
    for key, share in status.importances.items():
        line = Text(no_wrap=True, end="")
        line.append(shorten_middle(key, name_columns).ljust(name_columns) + " ", STRONG)
        room = min(width - line.cell_len - 5, MAX_BAR_COLUMNS)
        if room >= MIN_BAR_COLUMNS:
            line.append_text(meter(share, room, series_style(1)))
        lines.append(line.append(f" {share:4.0%}"))
    return lines


def best_so_far(status: SweepStatus) -> list[TrialRow]:
    """Return the completed trials that were better than all of a lower number, the latest first."""
    merit = status.settings.objective.merit
    leaders: list[TrialRow] = []
    for row in status.trials:
        if row.state != "complete" or row.value is None:
            continue
        if not leaders or merit(row.value) > merit(leaders[-1].value):
            leaders.append(row)
    return leaders[::-1]


def best_lines(status: SweepStatus) -> list[Text]:
    """Return the best results so far: each trial that was better than those before it, with its values."""
    lines: list[Text] = []
    for row in best_so_far(status):
        values = " ".join(f"{short_key(key)}={param_text(row, key)}" for key in row.params)
        line = Text(no_wrap=True, end="")
        value = format_value(status.settings.objective, row.value)
        line.append(value, GOOD if not lines else "").append(f"  trial {row.number}", STRONG)
        lines.append(line.append(f"  {'the config itself' if row.preset else values}", MUTED))
    return lines or [Text("No trial is complete yet", MUTED, no_wrap=True, end="")]
