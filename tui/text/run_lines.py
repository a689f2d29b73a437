"""Runs as lines of a screen."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.runs.folder import State
from engine.utils.text import printable
from tui.text.palette import BAD, GOOD, MUTED, WARNING
from tui.text.runs import RunRow, accuracy_in_words, clock, in_words
from tui.text.tables import NONE

# A sign and a style for each state; the state's own name stands beside it.
SIGNS = {
    State.STARTING: ("◌", WARNING),
    State.RUNNING: ("●", GOOD),
    State.PAUSED: ("‖", WARNING),
    State.STOPPING: ("◍", WARNING),
    State.FINISHED: ("○", ""),
    State.STOPPED: ("■", MUTED),
    State.FAILED: ("✗", BAD),
    State.CRASHED: ("✗", BAD),
}
SHORTEST_NAME, LONGEST_NAME = 10, 32


def sign_of(state: str) -> tuple[str, str]:
    return SIGNS[State(state)]


def name_columns(rows: list[RunRow], width: int) -> int:
    """Columns for the longest name, as far as there is room for it."""
    longest = max((cell_len(printable(row.name)) for row in rows), default=0)
    return min(max(longest, SHORTEST_NAME), LONGEST_NAME, max(width - 44, SHORTEST_NAME))


def run_line(row: RunRow, name_width: int) -> Text:
    """A sign, the name, how far it is, how well it does, and the time that is left or since when it is over."""
    sign, style = sign_of(row.state)
    line = Text(no_wrap=True, end="")
    line.append(f"{sign} ", style)
    line.append(fitted(printable(row.name), name_width))
    how_far = f"epoch {row.epoch}/{row.epochs or '?'}" if row.state == State.RUNNING else row.state
    line.append(f"  {how_far:<11}  acc {accuracy_in_words(row.best_val_accuracy):<6}  ")
    if row.live:
        line.append("" if row.eta_seconds is None else f"ETA {clock(row.eta_seconds)}")
    else:
        line.append(f"{in_words(row.age_seconds)} ago", MUTED)
    return line


TABLE_HEAD = "  {}  STATE     EPOCH      BEST ACC  VAL LOSS  IMAGES/S  ETA OR AGE"
LEAST_MESSAGE = 20


def table_head(name_width: int, width: int) -> Text:
    head = TABLE_HEAD.format(fitted("NAME", name_width))
    room = width - len(head) - 3
    return Text(f"{head}   MESSAGE" if room >= LEAST_MESSAGE else head, "bold", no_wrap=True, end="")


def table_line(row: RunRow, name_width: int, width: int) -> Text:
    """A row below `table_head`; what a run said at its end only where there is room for it."""
    sign, style = sign_of(row.state)
    loss = NONE if row.val_loss is None else f"{row.val_loss:.4f}"
    rate = NONE if row.images_per_second is None else f"{row.images_per_second:,.0f}"
    when = f"{in_words(row.age_seconds)} ago"
    if row.live:
        when = "" if row.eta_seconds is None else f"in {clock(row.eta_seconds)}"
    line = Text(no_wrap=True, end="")
    line.append(f"{sign} ", style)
    line.append(fitted(printable(row.name), name_width))
    epoch = f"{row.epoch}/{row.epochs or '?'}"
    line.append(f"  {row.state:<8}  {epoch:<9}  ")
    line.append(f"{accuracy_in_words(row.best_val_accuracy):>8}  {loss:>8}  {rate:>8}  {when:<11}  ")
    if width - line.cell_len >= LEAST_MESSAGE:
        line.append(printable(row.message), MUTED)
    return line


def fitted(text: str, width: int) -> str:
    """Exactly so many columns, with an ellipsis where it was longer."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
