"""The table of GPUs over `engine.report.readings`: `gputrain gpus`, the monitor, and the choice of GPUs in the form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from rich.text import Text

from engine.base.codec import replace
from engine.base.text import printable
from engine.base.units import UNKNOWN
from engine.gpus.current_use import processes_on
from engine.gpus.snapshot import INSTANCE_READINGS, UNITS, Gpu, Measurement, MigInstance, Missing, Snapshot
from engine.report.readings import READINGS, Level
from engine.report.table import Align, Cell, Column, Line, Shorten, fit, line_width, pad
from tui.charts.meter import load_meter
from tui.screens.phrases import (
    gpu_warnings,
    instance_name,
    is_free,
    kind_notes,
    pcie_link,
    reserved_text,
    short_name,
    silence_reason,
    users_text,
)
from tui.screens.tables import styled
from tui.terminal.palette import BAD, FREE, MUTED, NOTICE, STRONG, WARNING, load_style

LEVEL_STYLES = {Level.NORMAL: "", Level.WARNING: WARNING, Level.BAD: BAD}
FIRST_READING = "util"
"""Key of the column from which on words replace the readings of a GPU that does not answer."""
MIN_USED_BY_COLUMNS, MIN_WARNING_COLUMNS = 13, 14
# Who uses a GPU matters more than its rarer readings, up to these widths, as `fashion-17 rank 0`.
KEPT_USED_BY_COLUMNS, WIDE_KEPT_USED_BY_COLUMNS = 17, 32
WIDE_MIN_WIDTH, SHORT_NAME_COLUMNS, MAX_NAME_COLUMNS = 100, 12, 24

Row = TypeVar("Row")


@dataclass(frozen=True)
class GpuRow:
    """A GPU, or a MIG instance as a GPU of its own. `label` identifies it: `0`, or `0:2` for GPU instance ID 2."""

    label: str
    gpu: Gpu

    @cached_property
    def is_free(self) -> bool:
        """Whether nothing uses it, as far as is known."""
        return is_free(self.gpu)

    def value(self, key: str) -> Any:
        """Return the value of a reading; None if unknown."""
        return self.gpu.value(key)

    def limit(self, key: str) -> Any:
        """Return the value that bounds a reading; None if unknown, or if there is none."""
        limit = READINGS[key].limit
        return None if limit is None else self.gpu.value(limit)


AnyGpuRow = TypeVar("AnyGpuRow", bound=GpuRow)


def value_style(row: GpuRow, key: str) -> str:
    """Return the style of a value: that of its level, else muted if it is unknown or nothing uses the GPU."""
    value = row.value(key)
    level = READINGS[key].level(value, row.limit(key))
    return LEVEL_STYLES[level] or (MUTED if value is None or row.is_free else "")


def gpu_columns(
    rows: Sequence[AnyGpuRow], width: int, meters: tuple[int, int] = (0, 0), *, details: bool = False
) -> list[Column[AnyGpuRow]]:
    """Return the columns of a table of this width.

    `meters` are the cells of the meters of the load, and of memory and power; `details` adds rarer readings.
    """
    load, small = meters
    name_width = MAX_NAME_COLUMNS if width >= WIDE_MIN_WIDTH else SHORT_NAME_COLUMNS

    def reading(key: str, priority: int, meter: int = 0, width: int = 0) -> Column[AnyGpuRow]:
        return reading_column(
            key, rows, lambda row, name: row.value(name), meter, priority, width, lambda row: row.is_free
        )

    columns = [
        Column[AnyGpuRow]("gpu", "GPU", lambda row: row.label, Align.RIGHT, width=3, priority=9),
        Column[AnyGpuRow]("name", "name", row_name, max_width=name_width, priority=5, shorten=Shorten.MIDDLE),
        reading("util", 9, load),
        reading("sm_active", 4, width=4),
        reading("tensor_active", 3),
        reading("memory_used", 8, small),
        reading("power", 6, small, width=7),
        reading("temperature", 7, width=4),
    ]
    if details:
        columns += [reading(key, 1) for key in ("dram_active", "sm_clock", "fan", "performance_state")]
        columns.append(Column("pcie", "PCIe", lambda row: pcie_link(row.gpu), Align.RIGHT, priority=1))
    used_by = Column[AnyGpuRow]("used_by", "used by", used_by_cell, priority=9, flex=True, shorten=Shorten.MIDDLE)
    widest = max((line_width(used_by.spans(row)) for row in rows), default=0)
    kept = WIDE_KEPT_USED_BY_COLUMNS if details and width >= WIDE_MIN_WIDTH else KEPT_USED_BY_COLUMNS
    used_by = dataclasses.replace(used_by, width=max(min(widest, kept), MIN_USED_BY_COLUMNS))
    warning = Column[AnyGpuRow](
        "warning", "warning", lambda row: "  ".join(gpu_warnings(row.gpu)), width=MIN_WARNING_COLUMNS, priority=9,
        flex=True, optional=True, style=WARNING,
    )  # fmt: skip
    return [*columns, used_by, warning]


def choice_columns(rows: Sequence[GpuRow], *, with_names: bool) -> list[Column[GpuRow]]:
    """Return the columns of the choice of GPUs for a run: what is free of each, and in full who uses it."""

    def free_memory(row: GpuRow) -> str:
        used, total = row.value("memory_used"), row.value("memory_total")
        return UNKNOWN if used is None or total is None else READINGS["memory_used"].full_text(total - used, total)

    shown = {column.key: column for column in gpu_columns(rows, WIDE_MIN_WIDTH)}
    keys = ("gpu", "name", "used_by", "util", "warning") if with_names else ("gpu", "used_by", "util", "warning")
    columns = [dataclasses.replace(shown[key], max_width=0) for key in keys]
    columns.insert(-2, Column("free_memory", "free memory", free_memory, Align.RIGHT, priority=9))
    return columns


def reading_column(
    key: str,
    rows: Sequence[Row],
    value: Callable[[Row, str], Any],
    meter: int = 0,
    priority: int = 0,
    width: int = 0,
    is_muted: Callable[[Row], bool] = lambda row: False,
) -> Column[Row]:
    """Return the column of a reading, whose values and limits `value` returns by their keys.

    A `meter` of that many cells shows the share of the limit. Without one, a percentage has the color of the load. If
    no row knows the limit, it is not shown.
    """
    reading = READINGS[key]
    if reading.limit is not None and all(value(row, reading.limit) is None for row in rows):
        reading, meter = dataclasses.replace(reading, limit=None, warning=None, bad=None), 0

    def limited(row: Row) -> tuple[Any, Any]:
        return value(row, key), None if reading.limit is None else value(row, reading.limit)

    text_width = max((len(reading.cell_text(*limited(row))) for row in rows), default=0) if meter else 0

    def cell(row: Row) -> Line:
        measured, limit = limited(row)
        text = reading.cell_text(measured, limit)
        style = LEVEL_STYLES[reading.level(measured, limit)] or (MUTED if measured is None or is_muted(row) else "")
        if meter:
            bar = load_meter(reading.share(measured, limit), meter)
            return (*bar, (f" {pad(text, text_width, Align.RIGHT)}", style))
        if not style and reading.unit == "%":
            style = load_style(measured)
        return ((text, style),)

    align = Align.LEFT if meter else Align.RIGHT
    return Column(key, reading.title, cell, align, width, priority=priority)


def row_name(row: GpuRow) -> str:
    """Return the product name of a GPU without vendor and brand."""
    return short_name(row.gpu)


def used_by_cell(row: GpuRow) -> Cell:
    """Return what is unusual about a GPU, who uses it, and the memory that their runs reserve."""
    found, reserved = [(f"{note}  ", MUTED) for note in kind_notes(row.gpu)], reserved_text(row.gpu)
    user = (users_text(row.gpu), FREE if row.is_free else "")
    return (*found, user, *([(f", {reserved}", MUTED)] if reserved else []))


def gpu_lines(snapshot: Snapshot, width: int, *, instances: bool = False) -> list[Text]:
    """Return a header and one line per GPU, and with `instances` per MIG instance, none wider than `width` cells."""
    rows = []
    for gpu in snapshot.gpus:
        rows.append(GpuRow(str(gpu.index), gpu))
        if instances and gpu.mig_enabled and gpu.state == "ok":
            rows += [instance_row(gpu, instance) for instance in gpu.instances]
    answered = [row for row in rows if row.gpu.state == "ok"]
    table = fit(gpu_columns(answered, width, details=True), answered, width)
    lines = [table.line(row, None if row.gpu.state == "ok" else silence(row.gpu)) for row in rows]
    return [styled(line) for line in (table.header(STRONG), *lines)]


def silence(gpu: Gpu, last: Gpu | None = None) -> tuple[str, Line]:
    """Return what replaces the readings of a GPU that does not answer: why, and its last readings, if there are any."""
    reason = (silence_reason(gpu), BAD)
    if last is None:
        return FIRST_READING, (reason,)
    known = [
        f"{READINGS[key].text(value)} {READINGS[key].label}"
        for key in ("util", "memory_used")
        if (value := last.value(key)) is not None
    ]
    return FIRST_READING, (reason, (f": last seen {', '.join([users_text(last), *known])}", MUTED))


def instance_row(gpu: Gpu, instance: MigInstance) -> GpuRow:
    """Return the row of a MIG instance: a GPU with its readings and its processes."""
    unknown: Measurement[Any] = Measurement(None, gpu.time or 0.0, Missing.NOT_SUPPORTED)
    known = {name: getattr(instance, name) for name in INSTANCE_READINGS}
    known["name"] = replace(instance.name, value=instance_name(instance))
    processes = gpu.processes
    if processes.value is not None:
        processes = replace(processes, value=tuple(processes_on(gpu, instance)))
    view = replace(
        gpu, processes=processes, instances=(), runs=(), reserved_by_runs=0, **(dict.fromkeys(UNITS, unknown) | known)
    )
    return GpuRow(f"{gpu.index}:{instance.gpu_instance}", view)


def host_title_line(snapshot: Snapshot) -> Text:
    """Return host name, driver and CUDA version, with a highlighted notice if the data is simulated or recorded."""
    driver, cuda = (reading.value or UNKNOWN for reading in (snapshot.driver, snapshot.cuda))
    line = Text(printable(f"{snapshot.host}   driver {driver}   CUDA {cuda}"), no_wrap=True)
    if snapshot.source.notice is not None:
        line.append("   ").append(snapshot.source.notice, NOTICE)
    return line
