"""The queue of runs that wait for GPUs, for `gputrain queue`, the monitor and the queue screen."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from engine.base.text import printable
from engine.base.units import UNKNOWN, format_bytes, format_date, format_duration
from engine.gpus.selection import CPU
from engine.gpus.snapshot import Gpu
from engine.jobs.queue.listing import QueueRow, RowState
from engine.report.table import Align, Column, Shorten, fit, pad
from engine.runs.folder import RunState
from tui.screens.keymap import KEYS
from tui.screens.phrases import idle_note, is_free, state_symbol
from tui.screens.tables import styled, wrap_text
from tui.terminal.palette import GOOD, MUTED, STRONG, WARNING

OTHERWISE_BLOCKED = ("…", MUTED)
STATE_STYLES = {
    RowState.WAITING: ("◌", WARNING),
    RowState.HELD: ("‖", MUTED),
    RowState.DEPENDENT: OTHERWISE_BLOCKED,
    RowState.SCHEDULED: OTHERWISE_BLOCKED,
    RowState.LIMITED: OTHERWISE_BLOCKED,
    RowState.INTERRUPTED: state_symbol(RunState.INTERRUPTED),
    RowState.PENDING: ("◌", WARNING),
}
# The command prints all cells in full.
PLAIN_COLUMNS: tuple[Column[QueueRow], ...] = (
    Column("place", "#", lambda row: place_cell(row), Align.RIGHT),
    Column("name", "name", lambda row: row.name, style=lambda row: STRONG if row.is_own else ""),
    Column("user", "user", lambda row: row.user or UNKNOWN, style=lambda row: GOOD if row.is_own else ""),
    Column("state", "state", lambda row: row.state, style=lambda row: STATE_STYLES[row.state][1]),
    Column("gpus", "gpus", lambda row: gpus_cell(row)),
    Column("priority", "priority", lambda row: str(row.priority), Align.RIGHT),
    Column("waits", "waits", lambda row: format_duration(row.waited_s), Align.RIGHT),
    Column("reason", "reason", lambda row: row.reason, style=MUTED),
)
FREE = "free"
# The keys of the screen that do what these commands do.
QUEUE_COMMAND = re.compile("`gputrain queue (release|resume)[^`]*`")
QUEUE_KEYS = {"release": KEYS["hold"].key, "resume": KEYS["resume"].key}


@dataclass(frozen=True)
class QueueDevice:
    """A GPU, or the CPU as the queue sees it: who holds it, and the seconds until they end; infinite if unknown."""

    name: str
    uuid: str
    holder: str
    free_in: float

    @property
    def is_free(self) -> bool:
        return self.holder == FREE


@dataclass(frozen=True)
class QueuedRun:
    """A run in the queue, and what stands in its way: the number of GPUs that it needs and of those that are free for
    it now, who holds the others, and in how many seconds it is expected to start; None if unknown.

    `kept` are the free GPUs that runs behind it do not get."""

    row: QueueRow
    need: int | None
    has: int | None
    blocked_by: str
    starts_in: float | None
    kept: Sequence[QueueDevice] = ()


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


SCREEN_COLUMNS: tuple[Column[QueuedRun], ...] = (
    Column("place", "#  ", lambda run: ((f"{place_cell(run.row)} ", MUTED), STATE_STYLES[run.row.state]), Align.RIGHT,
           priority=9),
    Column("name", "name", lambda run: run.row.name, width=12, max_width=20, priority=9, flex=True,
           style=lambda run: STRONG if run.row.is_own else "", shorten=Shorten.MIDDLE),
    Column("user", "user", lambda run: run.row.user or UNKNOWN, width=4, max_width=12, priority=5,
           style=lambda run: GOOD if run.row.is_own else ""),
    Column("need", "need", lambda run: _number(run.need), Align.RIGHT, priority=8),
    Column("has", "has", lambda run: _number(run.has), Align.RIGHT, priority=6),
    Column("blocked_by", "blocked by", lambda run: run.blocked_by or UNKNOWN, width=17, priority=9, flex=True),
    Column("starts_in", "starts in", lambda run: UNKNOWN if run.starts_in is None else "now" if not run.starts_in
           else format_duration(run.starts_in), Align.RIGHT, priority=8),
)  # fmt: skip


def queue_devices(
    gpus: Sequence[Gpu], cpu_holders: Collection[str] | None, etas: Mapping[str, float | None]
) -> list[QueueDevice]:
    """Return the GPUs, and the CPU unless nobody waits for it. `etas` has the seconds until running runs end, by name,
    None if that is unknown."""

    def free_in(runs: Iterable[str]) -> float:
        ends = [etas.get(run) for run in runs]
        return max((math.inf if end is None else end for end in ends), default=math.inf)

    found = [
        QueueDevice(str(gpu.index), gpu.uuid or "", _holder(gpu), 0.0 if is_free(gpu) else free_in(gpu.runs))
        for gpu in gpus
    ]
    if cpu_holders is not None:
        holder = printable(", ".join(cpu_holders)) or FREE
        found.append(QueueDevice(CPU.name, CPU.uuid, holder, free_in(cpu_holders) if cpu_holders else 0.0))
    return found


def queued_runs(
    rows: Sequence[QueueRow], devices: Sequence[QueueDevice], etas: Mapping[str, float | None]
) -> list[QueuedRun]:
    """Return the rows with what stands in their way.

    A run is expected to start when enough of its GPUs are free. When the runs before it give them back is unknown.
    """
    runs, taken, going = [], dict[str, QueueDevice](), {*etas, *(row.name for row in rows)}
    for row in rows:
        now = [taken.get(device.uuid, device) for device in devices]
        wanted = _wanted(row, now)
        kind, _, count = row.gpus.partition(":")
        need = int(count) if kind == "free" and count.isdecimal() else 1 if kind in ("free", "auto") else len(wanted)
        if row.state is not RowState.WAITING or not wanted:
            runs.append(QueuedRun(row, need or None, None, _blocker(row, going), None))
            continue
        first = sorted(wanted, key=lambda device: device.free_in)[:need]
        start = max(device.free_in for device in first) if len(first) == need else math.inf
        has = min(sum(device.is_free for device in wanted), need)
        # GPUs kept for runs before it come first: the holders of the others block every run.
        kept_before = {device.uuid for run in runs for device in run.kept}
        held = sorted((each for each in wanted if not each.is_free), key=lambda each: each.uuid not in kept_before)
        blocked_by = "" if has == need else holders_text(held)
        kept = [device for device in first if device.is_free]
        runs.append(QueuedRun(row, need, has, blocked_by, start if math.isfinite(start) else None, kept))
        # They are free for nobody behind it, and those that are held still have their holders.
        holder = printable(row.name)
        taken |= {
            device.uuid: replace(device, holder=holder if device.is_free else device.holder, free_in=math.inf)
            for device in first
        }
    return runs


def mark_kept(devices: Iterable[QueueDevice], runs: Iterable[QueuedRun]) -> list[QueueDevice]:
    """Return the devices, the free ones that are kept for waiting runs with the names of these."""
    names = {device.uuid: printable(run.row.name) for run in runs for device in run.kept}
    return [
        replace(device, holder=f"kept for {names[device.uuid]}") if device.uuid in names else device
        for device in devices
    ]


def _blocker(row: QueueRow, going: Collection[str]) -> str:
    """Return what a run waits for other than GPUs. The panel of the selected run has all of it, with what helps."""
    if row.state is RowState.DEPENDENT:
        return printable(", ".join(name for name in row.after if name in going) or "other runs")
    if row.state is RowState.SCHEDULED and row.begin:
        return f"until {format_date(row.begin)}"
    if row.state is RowState.PENDING:
        return printable(row.reason)
    return {RowState.WAITING: "", RowState.LIMITED: "your limit"}.get(row.state, str(row.state))


def _wanted(row: QueueRow, devices: Sequence[QueueDevice]) -> list[QueueDevice]:
    """Return the devices that a run may get; none if it names what is not here."""
    if row.gpus.partition(":")[0] in ("auto", "all", "free"):
        return [device for device in devices if device.uuid != CPU.uuid]
    names = [name.strip() for name in row.gpus.split(",")]
    found = [device for device in devices if device.name in names or device.uuid in names]
    return found if len(found) == len(names) else []


def _grouped(devices: Iterable[QueueDevice]) -> dict[str, list[QueueDevice]]:
    groups: dict[str, list[QueueDevice]] = {}
    for device in devices:
        groups.setdefault(device.holder, []).append(device)
    return groups


def _names(devices: Iterable[QueueDevice]) -> str:
    return ",".join(device.name for device in devices)


def holders_text(devices: Iterable[QueueDevice]) -> str:
    """Return who holds devices, those of the same holder at once: `0,1 nobody · 2 ana idle 42 min · 3 free`."""
    return " · ".join(f"{_names(held)} {holder}" for holder, held in _grouped(devices).items())


STRIP_COLUMNS: tuple[Column[Sequence[QueueDevice]], ...] = (
    Column("devices", "GPU", lambda held: _names(held)),
    Column("holder", "held by", lambda held: held[0].holder, width=8, flex=True,
           style=lambda held: GOOD if held[0].is_free else ""),
    Column("free_in", "free in", lambda held: _until(held), Align.RIGHT, optional=True),
)  # fmt: skip


def _until(held: Sequence[QueueDevice]) -> str:
    seconds = max(device.free_in for device in held)
    return format_duration(seconds) if 0 < seconds < math.inf else ""


def strip_lines(devices: Sequence[QueueDevice], width: int, *, is_wide: bool) -> list[Text]:
    """Return who holds each device, since when it is idle, and until when: a line a holder, or one after the other."""
    groups = list(_grouped(devices).values())
    if is_wide:
        table = fit(STRIP_COLUMNS, groups, width)
        return [styled(table.header(MUTED)), *(styled(table.line(held)) for held in groups)]
    notes = ((holders_text(held), until) for held in groups for until in (_until(held),))
    return wrap_text(Text(" · ".join(f"{held}, {until} left" if until else held for held, until in notes)), width)


def _holder(gpu: Gpu) -> str:
    if is_free(gpu):
        return FREE
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


def queue_title(rows: Sequence[QueueRow]) -> str:
    """Return how many runs wait, and how many of them are this user's, as markup."""
    waiting = [row for row in rows if row.state is RowState.WAITING]
    own = sum(row.is_own for row in rows)
    title = f"{len(waiting)} waiting, {own} yours"
    interrupted = sum(row.state is RowState.INTERRUPTED for row in rows)
    note = f", {interrupted} interrupted ({QUEUE_KEYS['resume']})"
    return f"{title}[$warning]{note}[/]" if interrupted else title


def describe_row(row: QueueRow) -> str:
    """Return everything that the line of a run may cut off: its reason, with keys for commands, and its order."""
    reason = QUEUE_COMMAND.sub(lambda match: QUEUE_KEYS[match[1]], row.reason)
    details = [f"waiting for {format_duration(row.waited_s)}", f"--gpus {row.gpus}" if row.gpus else ""]
    details += [f"priority {row.priority}" if row.is_own else ""]
    details += [f"up to {row.share} runs per GPU" if row.share > 1 else ""]
    details += [f"reserves {format_bytes(row.min_free)} per GPU" if row.min_free else ""]
    return printable(f"{row.name} ({row.user}): {reason}" + "".join(f"; {part}" for part in details if part))


def waiting_line(row: QueueRow, name_width: int) -> Text:
    """Return the line of a waiting run on the monitor, in a list whose names have this width."""
    name = pad(printable(row.name), name_width, mode=Shorten.MIDDLE)
    sign, style = STATE_STYLES[RowState.WAITING]
    return Text.assemble((f" {sign} ", style), f"{name}  ", (wait_message(row), MUTED), no_wrap=True, end="")


def wait_message(row: QueueRow) -> str:
    """Return why a run waits, with its user if that is not this one."""
    return printable(row.reason + ("" if row.is_own else f"  ({row.user})"))
