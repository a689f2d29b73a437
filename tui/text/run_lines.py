"""Runs as table lines for the monitor and the run list."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.runs.folder import RunState
from engine.utils.text import printable
from tui.palette import BAD, GOOD, MUTED, WARNING
from tui.text.runs import RunRow, format_accuracy, format_age, format_duration
from tui.text.tables import UNKNOWN

# Symbol and style of each state; screens print the state's name next to them.
STATE_SYMBOLS = {
    RunState.STARTING: ("◌", WARNING),
    RunState.RUNNING: ("●", GOOD),
    RunState.PAUSED: ("‖", WARNING),
    RunState.STOPPING: ("◍", WARNING),
    RunState.FINISHED: ("○", ""),
    RunState.STOPPED: ("■", MUTED),
    RunState.FAILED: ("✗", BAD),
    RunState.CRASHED: ("✗", BAD),
}
MIN_NAME_COLUMNS, MAX_NAME_COLUMNS = 10, 32


def state_symbol(state: str) -> tuple[str, str]:
    """Return the symbol and style of a run state."""
    return STATE_SYMBOLS[RunState(state)]


def name_columns(rows: list[RunRow], width: int) -> int:
    """Return the width of the name column: the longest name within limits."""
    longest = max((cell_len(printable(row.name)) for row in rows), default=0)
    return min(max(longest, MIN_NAME_COLUMNS), MAX_NAME_COLUMNS, max(width - 44, MIN_NAME_COLUMNS))


def run_line(row: RunRow, name_width: int) -> Text:
    """Return a line with state symbol, name, progress, best validation accuracy, ETA or age, and why it is foreign."""
    sign, style = state_symbol(row.state)
    line = Text(no_wrap=True, end="")
    line.append(f"{sign} ", style)
    line.append(fit_cells(printable(row.name), name_width), MUTED if row.foreign else "")
    how_far = f"epoch {row.epoch}/{row.epochs or '?'}" if row.state == RunState.RUNNING else row.state
    line.append(f"  {how_far:<11}  acc {format_accuracy(row.best_val_accuracy):<6}  ")
    if row.live:
        line.append("" if row.eta_seconds is None else f"ETA {format_duration(row.eta_seconds)}")
    else:
        line.append(f"{format_age(row.age_seconds)} ago", MUTED)
    if row.foreign:
        line.append(f"  {printable(row.foreign)}", WARNING)
    return line


TABLE_HEADER_FORMAT = "  {}  STATE     EPOCH      BEST ACC  VAL LOSS  IMAGES/S  ETA OR AGE"
MIN_MESSAGE_COLUMNS = 20


def table_header(name_width: int, width: int) -> Text:
    """Return the header for `table_line`."""
    head = TABLE_HEADER_FORMAT.format(fit_cells("NAME", name_width))
    room = width - len(head) - 3
    return Text(f"{head}   MESSAGE" if room >= MIN_MESSAGE_COLUMNS else head, "bold", no_wrap=True, end="")


def table_line(row: RunRow, name_width: int, width: int) -> Text:
    """Return a row for `table_header`; why the run is foreign and its final message are added only if they fit."""
    sign, style = state_symbol(row.state)
    loss = UNKNOWN if row.val_loss is None else f"{row.val_loss:.4f}"
    rate = UNKNOWN if row.images_per_second is None else f"{row.images_per_second:,.0f}"
    when = f"{format_age(row.age_seconds)} ago"
    if row.live:
        when = "" if row.eta_seconds is None else f"in {format_duration(row.eta_seconds)}"
    line = Text(no_wrap=True, end="")
    line.append(f"{sign} ", style)
    line.append(fit_cells(printable(row.name), name_width), MUTED if row.foreign else "")
    epoch = f"{row.epoch}/{row.epochs or '?'}"
    line.append(f"  {row.state:<8}  {epoch:<9}  ")
    line.append(f"{format_accuracy(row.best_val_accuracy):>8}  {loss:>8}  {rate:>8}  {when:<11}  ")
    if width - line.cell_len >= MIN_MESSAGE_COLUMNS:
        note = "; ".join(part for part in (row.foreign, row.message, row.cpu_fallback) if part)
        line.append(printable(note), WARNING if row.foreign else MUTED)
    return line


def fit_cells(text: str, width: int) -> str:
    """Pad or truncate to exactly `width` terminal cells, with an ellipsis if truncated."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
