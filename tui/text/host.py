"""The host as text: the header line of the monitor, and graphs of CPU and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.gpus.snapshot import Snapshot
from engine.utils.text import printable
from tui.charts.history import DOTS_PER_COLUMN, LoadHistory, history_graph, shown_seconds, time_axis
from tui.charts.meter import load_meter
from tui.palette import MUTED, NOTICE, STRONG, WARNING
from tui.text.gpu_words import common_name
from tui.text.gpus import GIB

SEPARATOR = "   "
METER_COLUMNS, METERS_MIN_WIDTH = 8, 110
LOW_DISK_BYTES = 10 * GIB
GRAPH_GAP = 2
# From this height, the graphs are below each other.
STACKED_MIN_LINES = 14


@dataclass(frozen=True)
class HostLoad:
    """CPU utilization in percent, memory and the free disk space of the runs in bytes, network rates in bytes/s.

    None is unknown. The network rates are those of all interfaces except loopback.
    """

    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    disk_free_bytes: int | None = None
    sent_per_s: float | None = None
    received_per_s: float | None = None


@dataclass(frozen=True)
class Part:
    """A part of the header line. A line that is too long skips the parts of lowest priority."""

    text: Text
    priority: int
    at_right: bool = False


def header_line(
    snapshot: Snapshot | None, load: HostLoad | None, notice: str | None, interval_s: float, width: int
) -> Text:
    """Return host, GPUs and driver at the left, and the load of the host and the refresh rate at the right."""
    parts = []
    if snapshot is not None:
        parts.append(Part(Text(printable(snapshot.host), STRONG), 10))
        if snapshot.gpus:
            count, name = len(snapshot.gpus), common_name(snapshot)
            parts.append(Part(Text(f"{name} x {count}" if name is not None else f"{count} GPUs"), 8))
        for label, version, priority in (("driver", snapshot.driver.value, 3), ("CUDA", snapshot.cuda.value, 2)):
            if version is not None:
                parts.append(Part(_labeled(label, Text(printable(version))), priority))
    if notice is not None:
        parts.append(Part(Text(f" {notice} ", NOTICE), 11))
    if load is not None:
        parts += _load_parts(load, METER_COLUMNS if width >= METERS_MIN_WIDTH else 0)
    parts.append(Part(Text(f"{1 / interval_s:g} Hz", MUTED), 1, at_right=True))
    shown = sorted(parts, key=lambda part: -part.priority)
    while len(shown) > 1 and sum(part.text.cell_len + len(SEPARATOR) for part in shown) > width:
        shown.pop()
    left, right = (
        Text(SEPARATOR).join(part.text for part in parts if part in shown and part.at_right is at_right)
        for at_right in (False, True)
    )
    gap = " " * max(width - left.cell_len - right.cell_len - 1, 0)
    line = Text.assemble(left, gap, right, no_wrap=True, end="")
    line.truncate(width, overflow="ellipsis")
    return line


def _load_parts(load: HostLoad, columns: int) -> list[Part]:
    share = load.memory_used_bytes / max(load.memory_total_bytes, 1)
    cpu = Text.assemble(load_meter(load.cpu_percent / 100, columns), " " * bool(columns), f"{load.cpu_percent:.0f}%")
    used, total = load.memory_used_bytes / GIB, load.memory_total_bytes / GIB
    digits = 0 if total >= 10 else 1
    memory = Text.assemble(load_meter(share, columns), " " * bool(columns), f"{used:.{digits}f}/{total:.{digits}f} GiB")
    parts = [
        Part(_labeled("cpu", cpu), 7, at_right=True),
        Part(_labeled("ram", memory), 6, at_right=True),
    ]
    if load.disk_free_bytes is not None:
        low = load.disk_free_bytes < LOW_DISK_BYTES
        text = Text(f"{format_bytes(load.disk_free_bytes)} free", WARNING if low else "")
        parts.append(Part(_labeled("disk", text), 9 if low else 5, at_right=True))
    if load.received_per_s is not None and load.sent_per_s is not None:
        text = Text(f"↓{format_bytes(load.received_per_s)}/s ↑{format_bytes(load.sent_per_s)}/s")
        parts.append(Part(_labeled("net", text), 4, at_right=True))
    return parts


def _labeled(label: str, text: Text) -> Text:
    return Text.assemble((f"{label} ", MUTED), text)


def format_bytes(count: float) -> str:
    """Format a number of bytes in its unit with two or three digits: `1.2 TiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    unit = 0
    while count >= 1000 and unit < len(units) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.{1 if unit and count < 10 else 0}f} {units[unit]}"


def host_graphs(
    load: HostLoad | None, past: tuple[LoadHistory, LoadHistory], width: int, height: int, seconds: float
) -> list[Text]:
    """Return graphs of CPU and memory, whose histories are `past`, with their titles in `height` lines.

    They are below each other where both are tall enough.
    """
    if load is None or height < 2:
        return []
    used, total = load.memory_used_bytes / GIB, load.memory_total_bytes / GIB
    graphs = [
        ("cpu", f"{load.cpu_percent:.0f}%", past[0]),
        ("ram", f"{used:.1f}/{total:.1f} GiB", past[1]),
    ]
    if height < STACKED_MIN_LINES:
        each = (width - GRAPH_GAP) // 2
        blocks = [_graph(*graph, each, height, seconds) for graph in graphs]
        return [Text(" " * GRAPH_GAP).join(parts) for parts in zip(*blocks, strict=True)]
    first = height // 2
    return [
        *_graph(*graphs[0], width, first, seconds),
        *_graph(*graphs[1], width, height - first, seconds),
    ]


def _graph(label: str, value: str, history: LoadHistory, width: int, height: int, seconds: float) -> list[Text]:
    """Return a graph below a title with the current value and the time axis."""
    columns = max(width, 1)
    title = Text.assemble((f"{label} ", MUTED), (value, STRONG), "  ", no_wrap=True, end="")
    axis = time_axis(shown_seconds(seconds, columns * DOTS_PER_COLUMN), columns, title.cell_len)
    title.append_text(axis[title.cell_len :])
    values: Sequence[float | None] = history.columns(seconds, columns * DOTS_PER_COLUMN)
    lines = [title, *history_graph(values, height - 1)]
    for line in lines:
        line.truncate(columns, pad=True)
    return lines
