"""The hosts of the monitor: a line for each host with what its GPUs are, and their lines below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from rich.text import Text

from engine.base.text import pluralize
from engine.base.units import format_age
from engine.gpus.snapshot import Gpu, GpuProcess
from engine.jobs.hosts.reading import HostReading, HostState
from engine.report.table import Column, Line, fit
from tui.screens.phrases import FOLD_SIGNS, MARK, gpu_key, idle_note, is_free, is_idle, is_mine, short_name
from tui.screens.tables import styled
from tui.screens.tables.gpu_blocks import LIMIT_METER_SHARE, LOAD_METER_SHARE, METERS_MIN_WIDTH
from tui.screens.tables.gpus import GpuRow, gpu_columns, silence
from tui.terminal.palette import ACCENT, BAD, FREE, MUTED, STRONG, WARNING

MAX_HOST_COLUMNS, MAX_MEASURED_GPUS = 24, 40
INDENT = "  "
MODEL = re.compile(r"(?:\w*TX )?\w*")
"""Beginning of the name of a GPU: `H100`, `RTX A6000`."""


@dataclass(frozen=True)
class HostGroup:
    """A host and its GPUs. `is_here` is this host, whose GPUs and runs the screen can open."""

    reading: HostReading
    is_here: bool = False

    @property
    def name(self) -> str:
        return self.reading.name

    @cached_property
    def gpus(self) -> Sequence[Gpu]:
        """The GPUs of a host that answers."""
        snapshot = self.reading.snapshot
        return snapshot.gpus if snapshot is not None and self.reading.state is HostState.OK else ()

    @cached_property
    def free(self) -> int:
        return sum(map(is_free, self.gpus))

    @cached_property
    def mine(self) -> int:
        return sum(map(is_mine, self.gpus))

    @cached_property
    def models(self) -> str:
        """Number and model of the GPUs: `8 x H100`, or `6 x A100, 2 x V100`."""
        names = [MODEL.match(name)[0] for name in map(short_name, self.gpus)]  # type: ignore[index]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

    @cached_property
    def idle(self) -> GpuProcess | None:
        """The process that has held a GPU for longest without computing."""
        held = [process for gpu in self.gpus for process in gpu.processes.value or () if is_idle(process)]
        return max(held, key=lambda process: process.idle.value or 0.0, default=None)

    @property
    def trouble(self) -> str:
        """Why the host does not answer, and since when, or why it has no GPUs; empty if it has some."""
        if self.is_here and self.reading.state is HostState.CONNECTING:
            return "loading …"
        text = state_text(self.reading, "enter logs in" if self.reading.must_ask else "")
        return "" if self.gpus else text or "no GPUs"

    def key_of(self, gpu: Gpu) -> str:
        """Return the key of a GPU in the list, that of the screen of GPUs on this host."""
        return gpu_key(gpu) if self.is_here else f"{self.name}/{gpu_key(gpu)}"

    @cached_property
    def keys(self) -> set[str]:
        """The keys of its lines."""
        return {self.key, *map(self.key_of, self.gpus)}

    @property
    def key(self) -> str:
        """The key of the line of the host."""
        return f"{self.name}/"


def state_text(reading: HostReading, advice: str = "") -> str:
    """Return why a host does not answer, and since when, or what it lacks; empty if it lacks nothing.

    With `advice`, it says that in place of the state. A long reason is last, so that it cuts off nothing."""
    if reading.state is HostState.CONNECTING:
        return reading.reason or "connecting …"
    parts = [] if reading.state is HostState.OK else [advice or str(reading.state)]
    parts += [] if reading.age_s is None else [f"last word {format_age(reading.age_s)} ago"]
    return ": ".join(filter(None, (", ".join(parts), reading.reason)))


def _note(group: HostGroup) -> Line:
    """Return what is to be known of a host that answers: who holds a GPU without using it, and what it lacks."""
    idle = group.idle
    notes = [] if idle is None else [(f"{idle_note(idle)} {idle.user.value or '?'}", WARNING)]
    notes += [(group.reading.reason, MUTED)] if group.reading.reason else []
    return tuple(part for text, style in notes for part in ((INDENT, ""), (text, style)))[1:]


HOST_COLUMNS: tuple[Column[HostGroup], ...] = (
    Column("host", "", lambda group: group.name, max_width=MAX_HOST_COLUMNS, priority=9, style=STRONG),
    Column("models", "", lambda group: group.models, max_width=MAX_HOST_COLUMNS, priority=8),
    Column("free", "", lambda group: f"{group.free} free" if group.gpus else "", priority=9, optional=True,
           style=lambda group: FREE if group.free else MUTED),
    Column("mine", "", lambda group: f"mine {group.mine}" if group.mine else "", priority=7, optional=True,
           style=ACCENT),
    Column("note", "", _note, priority=9, width=12, flex=True),
)  # fmt: skip


def host_lines(
    groups: Sequence[tuple[HostGroup, Sequence[Gpu]]], picked: Collection[str], width: int
) -> tuple[Text, dict[str, Callable[[], Text]]]:
    """Return a header, and by their keys what makes the lines of hosts, each with those of its GPUs that are shown."""
    table = fit(HOST_COLUMNS, [group for group, _ in groups], width - len(INDENT))
    known = [GpuRow(str(gpu.index), gpu) for _, gpus in groups for gpu in gpus]
    meters = (width // LOAD_METER_SHARE, width // LIMIT_METER_SHARE) if width >= METERS_MIN_WIDTH else (0, 0)
    answered = [row for row in known if row.gpu.state == "ok"][:MAX_MEASURED_GPUS]
    columns = gpu_columns(answered, width, meters)
    if all(len(set(map(short_name, group.gpus))) < 2 for group, _ in groups):
        # The lines of the hosts name the models.
        columns = [column for column in columns if column.key != "name"]
    gpu_table = fit(columns, answered, width - len(INDENT) - len(MARK))

    def host_text(group: HostGroup, *, is_open: bool) -> Text:
        style = {HostState.DOWN: BAD, HostState.STALE: WARNING}.get(group.reading.state, MUTED)
        trouble = ("models", ((group.trouble, style),))
        sign = FOLD_SIGNS[is_open] if group.gpus else " "
        return styled(((f"{sign} ", MUTED), *table.line(group, trouble if group.trouble else None)))

    def gpu_text(row: GpuRow, key: str) -> Text:
        mark = (f"{MARK}{INDENT}", ACCENT) if key in picked else (" " + INDENT, "")
        return styled((mark, *gpu_table.line(row, None if row.gpu.state == "ok" else silence(row.gpu))))

    lines: dict[str, Callable[[], Text]] = {}
    for group, gpus in groups:
        lines[group.key] = partial(host_text, group, is_open=bool(gpus))
        for gpu in gpus:
            key = group.key_of(gpu)
            lines[key] = partial(gpu_text, GpuRow(str(gpu.index), gpu), key)
    header = ((" " + INDENT, ""), *gpu_table.header(MUTED)) if known else ((INDENT, ""), ("host", MUTED))
    return styled(header), lines


def hosts_summary(groups: Sequence[HostGroup]) -> str:
    """Return the sums of all hosts: `4 hosts  24 GPUs  9 free  mine 2  1 down`. A laptop from which they are watched
    is none of them."""
    groups = [group for group in groups if group.gpus or not group.is_here]
    down = sum(group.reading.state in (HostState.STALE, HostState.DOWN) for group in groups)
    parts = [pluralize(len(groups), "host"), pluralize(sum(len(group.gpus) for group in groups), "GPU")]
    parts += [f"{sum(group.free for group in groups)} free"]
    parts += [f"mine {mine}"] if (mine := sum(group.mine for group in groups)) else []
    return INDENT.join([*parts, *([f"{down} down"] if down else [])])
