"""GPU snapshots as text: a table of GPUs that fits 80 columns, and a table of their processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.gpus.current_use import find_current_use, processes_on
from engine.gpus.snapshot import INSTANCE_READINGS, UNITS, Gpu, GpuProcess, MigInstance, Missing, Reading, Snapshot
from engine.gpus.unmonitored import torch_may_see_gpus
from engine.utils.codec import replace
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from tui.palette import BAD, GOOD, MUTED, NOTICE, STRONG, WARNING
from tui.text.tables import UNKNOWN, shorten_middle

GIB = 2**30
GAP = "  "
MAX_NAME_WIDTH = 12
# From this width: full name, clocks, fan, performance state and PCIe link.
WIDE_MIN_WIDTH = 120
# From this width: process type and host memory.
FULL_PROCESS_MIN_WIDTH = 70
# Vendor and brand prefixes, removed from GPU names.
BRAND_PREFIXES = ("NVIDIA ", "GeForce ", "Tesla ", "Quadro ")


@dataclass(frozen=True)
class Cell:
    """Text of a table cell with its rich style."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column of the GPU table and how it is filled."""

    title: str
    make_cell: Callable[[Gpu], Cell]
    align_right: bool = True


def _number_cell(gpu: Gpu, name: str) -> Cell:
    value = gpu.value(name)
    return Cell(UNKNOWN if value is None else f"{value:.0f}" if isinstance(value, float) else str(value))


def _percent_cell(gpu: Gpu, name: str) -> Cell:
    value = gpu.value(name)
    if value is None:
        return Cell(UNKNOWN)
    style = GOOD if value >= 70 else "" if value >= 20 else MUTED
    return Cell(f"{value:.0f}%", style)


def _full_name_cell(gpu: Gpu) -> Cell:
    name = printable(gpu.value("name") or UNKNOWN)
    for brand in BRAND_PREFIXES:
        name = name.removeprefix(brand)
    return Cell(name)


def _short_name_cell(gpu: Gpu) -> Cell:
    name = _full_name_cell(gpu).text
    return Cell(name if cell_len(name) <= MAX_NAME_WIDTH else set_cell_size(name, MAX_NAME_WIDTH - 1) + "…")


def _format_ratio(used: float | None, limit: float | None, digits: int = 0) -> str:
    return f"{UNKNOWN if used is None else f'{used:.{digits}f}'}/{UNKNOWN if limit is None else f'{limit:.{digits}f}'}"


def _memory_cell(gpu: Gpu) -> Cell:
    used, total = (
        None if (value := gpu.value(name)) is None else value / GIB for name in ("memory_used", "memory_total")
    )
    share = used / total if used is not None and total else 0.0
    return Cell(_format_ratio(used, total, 1), BAD if share >= 0.95 else WARNING if share >= 0.8 else "")


def _power_cell(gpu: Gpu) -> Cell:
    power, limit = gpu.value("power"), gpu.value("power_limit")
    return Cell(_format_ratio(power, limit), _power_style(gpu))


def _power_style(gpu: Gpu) -> str:
    power, limit = gpu.value("power"), gpu.value("power_limit")
    return WARNING if power is not None and limit and power >= 0.97 * limit else ""


def _temperature_cell(gpu: Gpu) -> Cell:
    value = gpu.value("temperature")
    if value is None:
        return Cell(UNKNOWN)
    return Cell(f"{value}°C", BAD if value >= 85 else WARNING if value >= 75 else "")


def user_cell(gpu: Gpu) -> Cell:
    """Return the runs on a GPU and the users of its other compute processes, else `in use`, `unknown` or `free`."""
    processes = gpu.processes.value or ()
    runs = list(dict.fromkeys([*(process.run for process in processes if process.run), *gpu.runs]))
    others = [process for process in processes if process.run is None and process.kind == "compute"]
    names = dict.fromkeys(process.user.value or f"pid {process.pid}?" for process in others)
    if runs or names:
        return Cell(printable(", ".join([*runs, *names])))
    if gpu.processes.value is None and gpu["memory_used"].value is None:
        return Cell("unknown")
    if find_current_use(gpu) is not None:
        return Cell("unknown" if gpu.processes.value is None else "in use")
    return Cell("free", MUTED)


def _used_by_cell(gpu: Gpu) -> Cell:
    """Return throttle reasons, ECC errors and MIG instances of a GPU, then its runs and users."""
    notes = [note for note in gpu.value("throttle") or [] if note != "idle"]
    if gpu.value("ecc_uncorrected"):
        notes.append(f"{gpu.value('ecc_uncorrected')} ECC errors")
    if gpu.mig_enabled:
        notes.append(f"{len(gpu.instances)} MIG")
    user = user_cell(gpu)
    return Cell(", ".join([*notes, user.text]), WARNING if notes else user.style)


GPU_COLUMN = Column("GPU", lambda gpu: Cell(str(gpu.index)))
NAME_COLUMN = Column("NAME", _short_name_cell, align_right=False)
UTIL_COLUMN = Column("UTIL", lambda gpu: _percent_cell(gpu, "util"))
ACTIVITY_COLUMNS = [
    Column("SM", lambda gpu: _percent_cell(gpu, "sm_active")),
    Column("TENSOR", lambda gpu: _percent_cell(gpu, "tensor_active")),
]
LOAD_COLUMNS = [
    Column("MEMORY GiB", _memory_cell),
    Column("POWER W", _power_cell),
    Column("TEMP", _temperature_cell),
]
WIDE_COLUMNS = [
    Column("DRAM", lambda gpu: _percent_cell(gpu, "dram_active")),
    Column("SM MHz", lambda gpu: Cell(_format_ratio(gpu.value("sm_clock"), gpu.value("max_sm_clock")))),
    Column("FAN", lambda gpu: _percent_cell(gpu, "fan")),
    Column("STATE", lambda gpu: _number_cell(gpu, "performance_state")),
    Column("PCIe", lambda gpu: Cell(_format_pcie_link(gpu))),
]
USED_BY_COLUMN = Column("USED BY", _used_by_cell, align_right=False)


def _format_pcie_link(gpu: Gpu) -> str:
    generation, width = gpu.value("pcie_generation"), gpu.value("pcie_width")
    return UNKNOWN if generation is None or width is None else f"{generation}.0 x{width}"


def gpu_lines(snapshot: Snapshot, width: int, *, instances: bool = False) -> list[Text]:
    """Return a header and one line per GPU, none wider than `width` cells; with `instances` also one per MIG instance.

    An instance is named as in `0:2`, for GPU 0 and GPU instance ID 2.
    """
    wide = width >= WIDE_MIN_WIDTH
    columns = [
        GPU_COLUMN,
        Column("NAME", _full_name_cell, align_right=False) if wide else NAME_COLUMN,
        UTIL_COLUMN,
        *ACTIVITY_COLUMNS,
        *LOAD_COLUMNS,
        *(WIDE_COLUMNS if wide else []),
        USED_BY_COLUMN,
    ]
    rows = []
    for gpu in snapshot.gpus:
        rows.append(_cells(gpu, columns))
        if instances and gpu.mig_enabled and gpu.state == "ok":
            rows += [_instance_cells(gpu, instance, columns) for instance in gpu.instances]
    return _table(columns, rows, width)


def _cells(gpu: Gpu, columns: Sequence[Column]) -> list[Cell]:
    if gpu.state == "ok":
        return [column.make_cell(gpu) for column in columns]
    reason = f"stale: no answer for {gpu.age:.0f} s" if gpu.state == "stale" else str(gpu["util"].reason)
    first_reading = columns.index(UTIL_COLUMN)
    return [*(column.make_cell(gpu) for column in columns[:first_reading]), Cell(printable(reason), BAD)]


def _instance_cells(gpu: Gpu, instance: MigInstance, columns: Sequence[Column]) -> list[Cell]:
    """Return the line of a MIG instance: that of a GPU with its readings and its processes."""
    unknown: Reading[Any] = Reading(None, gpu.time or 0.0, Missing.NOT_SUPPORTED)
    known = {name: getattr(instance, name) for name in INSTANCE_READINGS}
    known["name"] = replace(instance.name, value=instance_name(instance))
    processes = gpu.processes
    if processes.value is not None:
        processes = replace(processes, value=tuple(processes_on(gpu, instance)))
    view = replace(
        gpu,
        processes=processes,
        instances=(),
        runs=(),
        **(dict.fromkeys(UNITS, unknown) | known),
    )
    return [Cell(f"{gpu.index}:{instance.gpu_instance}"), *(column.make_cell(view) for column in columns[1:])]


def instance_name(instance: MigInstance) -> str:
    """Return the profile of a MIG instance, as in `MIG 1g.10gb`, without the name of its GPU."""
    name = printable(instance.name.value or UNKNOWN)
    return name[max(name.rfind("MIG "), 0) :]


def _table(columns: Sequence[Column], rows: Sequence[list[Cell]], width: int) -> list[Text]:
    complete = [row for row in rows if len(row) == len(columns)]
    titles = [Cell(column.title, STRONG) for column in columns]
    widths = [max(cell_len(row[column].text) for row in [titles, *complete]) for column in range(len(columns))]
    for row in rows:
        leading = range(len(row) - 1)
        widths[: len(leading)] = [max(widths[column], cell_len(row[column].text)) for column in leading]
    return [_line(columns, row, widths, width) for row in [titles, *rows]]


def _line(columns: Sequence[Column], row: list[Cell], widths: list[int], width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for column, cell in enumerate(row):
        last = column == len(row) - 1
        padding = 0 if last else widths[column] - cell_len(cell.text)
        left, right = (padding, 0) if columns[column].align_right and not last else (0, padding)
        line.append(" " * left)
        line.append(cell.text, cell.style)
        line.append(" " * right + ("" if last else GAP))
    line.truncate(width, overflow="ellipsis")
    return line


def list_gpu_processes(snapshot: Snapshot) -> list[tuple[Gpu, GpuProcess | None]]:
    """Return (GPU, process) pairs, largest GPU memory first on each GPU; None if its processes are unknown."""
    pairs: list[tuple[Gpu, GpuProcess | None]] = []
    for gpu in snapshot.gpus:
        pairs += [
            (gpu, process)
            for process in sorted(gpu.processes.value or (), key=lambda process: -(process.gpu_memory.value or 0))
        ]
        if gpu.processes.value is None:
            pairs.append((gpu, None))
    return pairs


def rank_lines(ranks: Sequence[GpuProcess], width: int) -> list[Text]:
    """Return a header and one line per rank that trains on the CPU."""
    columns = [
        Column(title, lambda _: Cell(""), align_right=title not in ("RUN", "COMMAND"))
        for title in ("RUN", "RANK", "PID", "CPU", "HOST MEM", "COMMAND")
    ]
    rows = [
        (
            shorten_middle(rank.run or "", max(width // 3, 8)),
            str(rank.rank),
            str(rank.pid),
            UNKNOWN if rank.cpu.value is None else f"{rank.cpu.value:.0f}%",
            _format_size(rank.memory),
            rank.command.value or "",
        )
        for rank in ranks
    ]
    return _table(columns, [[Cell(printable(cell)) for cell in row] for row in rows], width)


def process_lines(processes: Sequence[tuple[Gpu, GpuProcess | None]], width: int) -> list[Text]:
    """Return a header and one line per process. The type is shown if some are not of compute."""
    titles = ["GPU", "PID", "USER", "TYPE", "GPU MEM", "CPU", "HOST MEM", "COMMAND"]
    shown = list(range(len(titles))) if width >= FULL_PROCESS_MIN_WIDTH else [0, 1, 2, 4, 5, 7]
    if 3 in shown and all(process is None or process.kind == "compute" for _, process in processes):
        shown.remove(3)
    rows = [
        [str(gpu.index), *[UNKNOWN] * 6, f"unknown: {gpu.processes.reason}"]
        if process is None
        else _process_row(gpu, process)
        for gpu, process in processes
    ]
    columns = [
        Column(titles[column], lambda _: Cell(""), align_right=titles[column] not in ("USER", "TYPE", "COMMAND"))
        for column in shown
    ]
    return _table(columns, [[Cell(printable(row[column])) for column in shown] for row in rows], width)


def _process_row(gpu: Gpu, process: GpuProcess) -> list[str]:
    command = process.command.value or f"? {process.command.reason}"
    run_prefix = f"{process.run} rank {process.rank}: " if process.run is not None else ""
    return [
        str(gpu.index) if process.instance is None else f"{gpu.index}:{process.instance}",
        str(process.pid),
        process.user.value or "?",
        process.kind,
        _format_size(process.gpu_memory),
        UNKNOWN if process.cpu.value is None else f"{process.cpu.value:.0f}%",
        _format_size(process.memory),
        run_prefix + command,
    ]


def _format_size(reading: Reading[int]) -> str:
    if reading.value is None:
        return UNKNOWN
    return f"{reading.value / GIB:.1f} GiB" if reading.value >= GIB else f"{reading.value / 2**20:.0f} MiB"


def host_title(snapshot: Snapshot) -> str:
    """Return host name, driver version and CUDA version."""
    driver, cuda = (reading.value or UNKNOWN for reading in (snapshot.driver, snapshot.cuda))
    return printable(f"{snapshot.host}   driver {driver}   CUDA {cuda}")


def host_title_line(snapshot: Snapshot) -> Text:
    """Return `host_title`, with a highlighted notice if the data is simulated or recorded."""
    line = Text(host_title(snapshot), no_wrap=True)
    if snapshot.source.notice is not None:
        line.append("   ")
        line.append(snapshot.source.notice, NOTICE)
    return line


def no_driver_problem(snapshot: Snapshot) -> Problem:
    """Return why there are no GPUs to show, and what a run would use instead."""
    from engine.utils.host import available_cores

    error, cores = printable(snapshot.error or ""), pluralize(available_cores(), "core")
    if snapshot.pending:
        reason = f"{snapshot.host}: {error}. A run waits longer for the driver; try again."
        return Problem("", reason, code="timed-out")
    used = f"the CPU, {cores}"
    if torch_may_see_gpus():
        used = f"the GPUs that torch sees, else {used}"
    return Problem(
        "", f"No NVIDIA driver on {snapshot.host} ({error}): training uses {used}.", code="driver-unavailable"
    )


def process_matches(filter_text: str, gpu: Gpu, process: GpuProcess) -> bool:
    """Whether a process or its GPU contains the text, which is in lower case."""
    fields = (process.pid, process.user.value or "", process.command.value or "", process.run or "", gpu.index)
    return any(filter_text in str(field).lower() for field in fields)
