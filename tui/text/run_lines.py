"""Runs as table lines for the monitor and the run list."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.runs.folder import RunState
from engine.runs.metrics import format_known
from engine.runs.run_row import RunRow
from engine.utils.text import printable
from tui.charts.meter import meter
from tui.palette import ACCENT, BAD, GOOD, MUTED, WARNING
from tui.text.runs import ENDED_BADLY, format_age, format_duration
from tui.text.tables import UNKNOWN, shorten_middle

# Symbol and style of each state; screens print the state's name next to them.
STATE_SYMBOLS = {
    RunState.WAITING: ("◌", MUTED),
    RunState.STARTING: ("◌", WARNING),
    RunState.RUNNING: ("●", GOOD),
    RunState.PAUSED: ("‖", WARNING),
    RunState.STOPPING: ("◍", WARNING),
    RunState.FINISHED: ("○", ""),
    RunState.STOPPED: ("■", MUTED),
    RunState.FAILED: ("✗", BAD),
    RunState.CRASHED: ("✗", BAD),
    RunState.INTERRUPTED: ("◌", BAD),
}
FOREIGN_SIGN, MARK, SWEEP_SIGN = "!", "◆", "▸"
MIN_NAME_COLUMNS, MAX_NAME_COLUMNS = 10, 32
STATE_COLUMNS, TIME_COLUMNS = 8, 10
# From this width, a line has a meter of the progress.
METER_MIN_WIDTH, METER_COLUMNS = 66, 8
MIN_NOTE_COLUMNS = 14
# Where the note of a run that failed would get less, it takes the place of the figures.
MIN_CAUSE_COLUMNS = 40
# A line without its name and note, in a width with a meter.
FIGURE_COLUMNS = 4 + METER_COLUMNS + STATE_COLUMNS + 2 + 6 + 12 + 2 + TIME_COLUMNS + 2


def state_symbol(state: str) -> tuple[str, str]:
    """Return the symbol and style of a run state."""
    return STATE_SYMBOLS[RunState(state)]


def name_columns(names: Sequence[str], width: int) -> int:
    """Return the width of the name column: the longest name within limits."""
    longest = max((cell_len(printable(name)) for name in names), default=0)
    return min(max(longest, MIN_NAME_COLUMNS), MAX_NAME_COLUMNS, max(width - 44, MIN_NAME_COLUMNS))


def run_line(row: RunRow, name_width: int, width: int, *, marked: bool = False) -> Text:
    """Return a line with state, name, progress, best validation accuracy, ETA or age, and what must be known of it."""
    sign, style = state_symbol(row.state)
    line = Text(no_wrap=True, end="")
    if marked or row.trials:
        line.append(sign, style).append(*((MARK, ACCENT) if marked else (SWEEP_SIGN, MUTED)))
    else:
        line.append(f"{sign} ", style)
    line.append(fit_middle(printable(row.name), name_width), MUTED if row.foreign else ACCENT if marked else "")
    line.append("  ")
    accuracy = format_known("best_val_accuracy", row.record.best_val_accuracy, UNKNOWN)
    if row.trials and row.live:
        return line.append(printable(row.message)).append("  best acc ", MUTED).append(accuracy)
    if (row.live or row.state == RunState.INTERRUPTED) and row.message:
        waiting = f"{row.state}  " if row.state in (RunState.WAITING, RunState.INTERRUPTED) else ""
        return line.append(waiting).append(printable(row.message), MUTED if waiting else WARNING)
    if row.state in ENDED_BADLY and row.message and width - name_width - FIGURE_COLUMNS < MIN_CAUSE_COLUMNS:
        return line.append(f"{row.state:<{STATE_COLUMNS}}  ", style).append(printable(row.message), MUTED)
    line.append_text(_progress(row, METER_COLUMNS if width >= METER_MIN_WIDTH else 0)).append("  ")
    line.append(f"{row.record.epochs}/{row.record.total_epochs or '?'}".ljust(6))
    if width - line.cell_len >= len("  acc 0.1234  ") + TIME_COLUMNS:
        line.append("  acc ", MUTED).append(f"{accuracy:<6}")
    line.append("  ")
    if row.live:
        eta_s = row.record.eta_seconds
        line.append(f"{'' if eta_s is None else f'ETA {format_duration(eta_s)}':<{TIME_COLUMNS}}")
    else:
        line.append(f"{format_age(row.age_seconds)} ago".ljust(TIME_COLUMNS), MUTED)
    for note, note_style in ((row.foreign, WARNING), ("" if row.live else row.message, MUTED)):
        if note and width - line.cell_len >= MIN_NOTE_COLUMNS:
            line.append("  ").append(printable(note), note_style)
    return line


def _progress(row: RunRow, meter_columns: int) -> Text:
    """Return how far a run that trains is, with a meter of `meter_columns`, else its state, in the same width."""
    columns = meter_columns + STATE_COLUMNS
    if row.state != RunState.RUNNING or not row.record.steps:
        return Text(f"{row.state:<{columns}}", state_symbol(row.state)[1] if row.state in ENDED_BADLY else "")
    share = row.record.step / row.record.steps
    percent = f"{int(100 * share)}%"
    bar = meter(share, meter_columns, GOOD)
    return Text.assemble(bar, f" {percent:<{STATE_COLUMNS - 1}}" if meter_columns else f"{percent:<{STATE_COLUMNS}}")


def note(row: RunRow) -> str:
    """Return why other users can change the run, how it ended, and why it trained on the CPU, as far as known."""
    parts = (f"This run {row.foreign}" if row.foreign else "", row.message, row.record.cpu_fallback)
    return printable("; ".join(part for part in parts if part))


def fit_middle(text: str, width: int) -> str:
    """Pad or shorten in the middle to `width` terminal cells."""
    return set_cell_size(shorten_middle(text, width), width)


def fit_cells(text: str, width: int) -> str:
    """Pad or truncate to exactly `width` terminal cells, with an ellipsis if truncated."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
