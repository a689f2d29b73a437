"""The queue of runs that wait for GPUs, for `gputrain queue`, the monitor and the queue screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.gpus.snapshot import Gpu
from engine.queue.listing import QueueRow, RowState
from engine.show.table import Align, Column, FittedTable, Shorten, fit, pad
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN, format_bytes, format_duration
from tui.palette import BAD, GOOD, MUTED, STRONG, WARNING
from tui.phrases import idle_note, is_free

STATE_STYLES = {
    RowState.WAITING: ("◌", WARNING),
    RowState.HELD: ("‖", MUTED),
    RowState.DEPENDENT: ("…", MUTED),
    RowState.SCHEDULED: ("…", MUTED),
    RowState.LIMITED: ("…", MUTED),
    RowState.INTERRUPTED: ("✗", BAD),
}
PLACE: Column[QueueRow] = Column("place", "#", lambda row: place_cell(row), Align.RIGHT)
COLUMNS: tuple[Column[QueueRow], ...] = (
    Column("name", "name", lambda row: row.name, width=12, max_width=32, priority=2, flex=True,
           style=lambda row: STRONG if row.is_own else "", shorten=Shorten.MIDDLE),
    Column("user", "user", lambda row: row.user or UNKNOWN, width=4, max_width=12,
           style=lambda row: GOOD if row.is_own else ""),
    Column("state", "state", lambda row: row.state, priority=2, style=lambda row: STATE_STYLES[row.state][1]),
    Column("gpus", "gpus", lambda row: gpus_cell(row)),
    Column("priority", "priority", lambda row: str(row.priority), Align.RIGHT),
    Column("waits", "waits", lambda row: format_duration(row.waited_s), Align.RIGHT, priority=1),
    Column("reason", "reason", lambda row: row.reason, width=16, priority=2, flex=True, style=MUTED),
)  # fmt: skip
# The command prints all cells in full.
PLAIN_COLUMNS = (PLACE, *COLUMNS)


@dataclass(frozen=True)
class QueuedRun:
    """A run in the queue, and what stands in its way: the number of GPUs that it needs and of those that are free for
    it now, who holds the others, and in how many seconds it is expected to start; None if unknown."""

    row: QueueRow
    need: int | None
    has: int | None
    blocked_by: str
    starts_in: float | None


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


SCREEN_COLUMNS: tuple[Column[QueuedRun], ...] = (
    Column("place", "#  ", lambda run: ((f"{place_cell(run.row)} ", MUTED), STATE_STYLES[run.row.state]), Align.RIGHT,
           priority=9),
    Column("name", "name", lambda run: run.row.name, width=12, max_width=32, priority=9, flex=True,
           style=lambda run: STRONG if run.row.is_own else "", shorten=Shorten.MIDDLE),
    Column("user", "user", lambda run: run.row.user or UNKNOWN, width=4, max_width=12, priority=5,
           style=lambda run: GOOD if run.row.is_own else ""),
    Column("need", "need", lambda run: _number(run.need), Align.RIGHT, priority=8),
    Column("has", "has", lambda run: _number(run.has), Align.RIGHT, priority=7),
    Column("blocked_by", "blocked by", lambda run: run.blocked_by, width=20, priority=9, flex=True),
    Column("priority", "priority", lambda run: str(run.row.priority) if run.row.priority else "", Align.RIGHT,
           priority=1, optional=True),
    Column("waits", "waits", lambda run: format_duration(run.row.waited_s), Align.RIGHT, priority=4),
    Column("starts_in", "starts in", lambda run: UNKNOWN if run.starts_in is None else format_duration(run.starts_in),
           Align.RIGHT, priority=6),
)  # fmt: skip


def queue_table(runs: Sequence[QueuedRun], width: int) -> FittedTable[QueuedRun]:
    """Return the table of the queue screen."""
    return fit(SCREEN_COLUMNS, runs, width)


def queued_runs(rows: Sequence[QueueRow], gpus: Sequence[Gpu], etas: Mapping[str, float]) -> list[QueuedRun]:
    """Return the rows with what stands in their way. `etas` has the seconds until running runs end, by name.

    A run is expected to start when enough of its GPUs are free. When the runs before it give them back is unknown.
    """
    free_in = {gpu.index: 0.0 if is_free(gpu) else max(map(_eta(etas), gpu.runs), default=math.inf) for gpu in gpus}
    runs, before = [], dict[int, str]()
    for row in rows:
        wanted = _wanted_gpus(row, gpus)
        kind, _, count = row.gpus.partition(":")
        need = int(count) if kind == "free" and count.isdecimal() else 1 if kind in ("free", "auto") else len(wanted)
        if row.state is not RowState.WAITING or not wanted:
            # The panel below the list has all of it, with what helps.
            reason = row.reason.partition(";")[0] if row.is_live else str(row.state)
            runs.append(QueuedRun(row, need or None, None, reason, None))
            continue
        taken = sorted(wanted, key=lambda gpu: free_in[gpu.index])[:need]
        start = max(free_in[gpu.index] for gpu in taken) if len(taken) == need else math.inf
        has = min(sum(free_in[gpu.index] == 0 for gpu in wanted), need)
        blocked_by = row.reason if has == need else holders_text((gpu for gpu in wanted if free_in[gpu.index]), before)
        runs.append(QueuedRun(row, need, has, blocked_by, start if math.isfinite(start) else None))
        before |= {gpu.index: printable(row.name) for gpu in taken if is_free(gpu)}
        free_in |= {gpu.index: math.inf for gpu in taken}
    return runs


def _eta(etas: Mapping[str, float]) -> Callable[[str], float]:
    return lambda name: etas.get(name, math.inf)


def _wanted_gpus(row: QueueRow, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that a run may get; none if it shares them by a rule of its own, or names what is not here."""
    if row.share > 1 or row.min_free:
        return []
    if row.gpus.partition(":")[0] in ("auto", "all", "free"):
        return list(gpus)
    names = [name.strip() for name in row.gpus.split(",")]
    found = [gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid in names]
    return found if len(found) == len(names) else []


def holders_text(gpus: Iterable[Gpu], before: Mapping[int, str] = {}) -> str:
    """Return who holds GPUs, those of the same holder at once: `0,1 nobody · 2 ana idle 42 min · 3 free`. `before` has
    the runs that get the free ones first, by index."""
    indices: dict[str, list[str]] = {}
    for gpu in gpus:
        indices.setdefault(before.get(gpu.index) or _holder(gpu), []).append(str(gpu.index))
    return " · ".join(f"{','.join(numbers)} {holder}" for holder, numbers in indices.items())


def _holder(gpu: Gpu) -> str:
    if is_free(gpu):
        return "free"
    processes = [process for process in gpu.processes.value or () if process.kind == "compute" and not process.run]
    names = dict.fromkeys([*gpu.runs, *(process.user.value or "?" for process in processes)])
    idle = next((note for process in processes if (note := idle_note(process))), "")
    unknown = "unknown" if gpu.processes.value is None else "nobody"
    return printable(" ".join(filter(None, (", ".join(names) or unknown, idle))))


def place_cell(row: QueueRow) -> str:
    """Return the place among the runs that wait for GPUs only."""
    return UNKNOWN if row.place is None else str(row.place)


def gpus_cell(row: QueueRow) -> str:
    """Return `device.gpus`, with the number of runs that may share them, and the memory that it reserves of each."""
    shared = f" /{row.share}" if row.share > 1 else ""
    shared += f" {format_bytes(row.min_free)}" if row.min_free else ""
    return f"{row.gpus}{shared}" if row.gpus and row.state is not RowState.INTERRUPTED else UNKNOWN


def gpus_line(gpus: Sequence[Gpu]) -> Text:
    """Return the GPUs of the host in one line: who holds which, and which are free."""
    return Text.assemble((" GPUs ", MUTED), holders_text(gpus), no_wrap=True, end="", overflow="ellipsis")


def queue_status_line(rows: Sequence[QueueRow]) -> Text:
    """Return how many runs wait, and how many of them are this user's."""
    waiting = [row for row in rows if row.state is RowState.WAITING]
    own = sum(row.is_own for row in rows)
    parts = [f"{pluralize(len(waiting), 'run')} waiting", f"{own} of yours listed"]
    interrupted = sum(not row.is_live for row in rows)
    parts += [f"{interrupted} interrupted (u starts {'it' if interrupted == 1 else 'them'})"] if interrupted else []
    return Text(" " + ", ".join(parts), WARNING if interrupted else MUTED, no_wrap=True, end="", overflow="ellipsis")


def describe_row(row: QueueRow) -> str:
    """Return everything that the line of a run may cut off: its reason, and how it is ordered."""
    details = [f"--gpus {row.gpus}" if row.gpus else "", f"priority {row.priority}" if row.is_own else ""]
    details += [f"up to {row.share} runs per GPU" if row.share > 1 else ""]
    details += [f"reserves {format_bytes(row.min_free)} per GPU" if row.min_free else ""]
    return printable(f"{row.name} ({row.user}): {row.reason}" + "".join(f"; {part}" for part in details if part))


def waiting_line(row: QueueRow, name_width: int) -> Text:
    """Return the line of a waiting run on the monitor, in a list whose names have this width."""
    name = pad(printable(row.name), name_width, mode=Shorten.MIDDLE)
    sign, style = STATE_STYLES[RowState.WAITING]
    return Text.assemble((f" {sign} ", style), f"{name}  ", (wait_message(row), MUTED), no_wrap=True, end="")


def wait_message(row: QueueRow) -> str:
    """Return why a run waits, with its user if that is not this one."""
    return printable(row.reason + ("" if row.is_own else f"  ({row.user})"))
