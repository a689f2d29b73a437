"""The header line of the monitor: host, GPUs, and the load of the host."""

from __future__ import annotations

from rich.text import Text

from engine.base.text import printable
from engine.base.units import format_bytes, format_percent
from engine.gpus.snapshot import Snapshot
from engine.report.readings import READINGS
from tui.charts.meter import load_meter
from tui.screens.phrases import common_name
from tui.screens.pollers.host import HostLoad
from tui.screens.tables import styled
from tui.terminal.palette import MUTED, NOTICE, STRONG, WARNING

SEPARATOR = "  "
METER_COLUMNS, METERS_MIN_WIDTH = 8, 110
LOW_DISK_BYTES = 10 << 30

Part = tuple[int, Text]
"""A part of the header line, and its priority: a line that is too long skips those of the lowest."""


def header_line(
    snapshot: Snapshot | None, load: HostLoad | None, notice: str | None, interval_s: float, width: int, sums: str = ""
) -> Text:
    """Return host, GPUs and driver at the left, and the load of the host and the refresh rate at the right.

    With other hosts, their `sums` stand in place of its GPUs."""
    left: list[Part] = []
    if snapshot is not None:
        left.append((10, Text(printable(snapshot.host), STRONG)))
        if sums:
            left.append((8, Text(sums)))
        elif snapshot.gpus:
            count, name = len(snapshot.gpus), common_name(snapshot)
            left.append((8, Text(f"{name} x {count}" if name is not None else f"{count} GPUs")))
        for label, version, priority in (("driver", snapshot.driver.value, 3), ("CUDA", snapshot.cuda.value, 2)):
            if version is not None:
                left.append((priority, _labeled(label, Text(printable(version)))))
    if notice is not None:
        left.append((11, Text(f" {notice} ", NOTICE)))
    right = [] if load is None else _load_parts(load, METER_COLUMNS if width >= METERS_MIN_WIDTH else 0)
    right.append((1, Text(f"{1 / interval_s:g} Hz", MUTED)))
    while len(parts := [*left, *right]) > 1 and sum(part.cell_len + len(SEPARATOR) for _, part in parts) > width:
        lowest = min(parts, key=lambda part: part[0])
        (left if lowest in left else right).remove(lowest)
    texts = [Text(SEPARATOR).join(part for _, part in parts) for parts in (left, right)]
    gap = " " * max(width - texts[0].cell_len - texts[1].cell_len - 1, 0)
    line = Text.assemble(texts[0], gap, texts[1], no_wrap=True, end="")
    line.truncate(width, overflow="ellipsis")
    return line


def load_text(load: HostLoad | None) -> str:
    """Return the load of the host in a few words; empty while it is unknown."""
    return "" if load is None else f"host cpu {format_percent(load.cpu_percent)}  ram {_memory_text(load)}"


def _memory_text(load: HostLoad) -> str:
    return READINGS["memory_used"].full_text(load.memory_used_bytes, load.memory_total_bytes)


def _load_parts(load: HostLoad, columns: int) -> list[Part]:
    share = load.memory_used_bytes / max(load.memory_total_bytes, 1)
    parts = [
        (7, _labeled("cpu", _metered(load.cpu_percent / 100, columns, format_percent(load.cpu_percent)))),
        (6, _labeled("ram", _metered(share, columns, _memory_text(load)))),
    ]
    if load.disk_free_bytes is not None:
        low = load.disk_free_bytes < LOW_DISK_BYTES
        text = Text(f"{format_bytes(load.disk_free_bytes)} free", WARNING if low else "")
        parts.append((9 if low else 5, _labeled("disk", text)))
    return parts


def _metered(share: float, columns: int, text: str) -> Text:
    return styled((*load_meter(share, columns), (" " * bool(columns) + text, "")))


def _labeled(label: str, text: Text) -> Text:
    return Text.assemble((f"{label} ", MUTED), text)
