"""A snapshot of the GPUs as lines of text: a table that fits 80 columns, and one of the processes on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.gpus.readings import Gpu, Process, Reading, Snapshot
from engine.gpus.selection import use_of
from engine.lines import printable

NONE = "–"
GIB = 2**30
GAP = "  "
NAME_COLUMNS = 12
# From so many columns on there is room for the whole name, clocks, fan and link.
WIDE_COLUMNS = 120
# Makers and brands that say nothing in a table.
BRANDS = ("NVIDIA ", "GeForce ", "Tesla ", "Quadro ")


@dataclass(frozen=True)
class Cell:
    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    title: str
    cell: Callable[[Gpu], Cell]
    right: bool = True


def _plain(gpu: Gpu, name: str) -> Cell:
    value = gpu.value(name)
    return Cell(NONE if value is None else f"{value:.0f}" if isinstance(value, float) else str(value))


def _percent(gpu: Gpu, name: str) -> Cell:
    value = gpu.value(name)
    if value is None:
        return Cell(NONE)
    style = "green" if value >= 70 else "yellow" if value >= 20 else "dim"
    return Cell(f"{value:.0f}%", style)


def _whole_name(gpu: Gpu) -> Cell:
    name = printable(gpu.value("name") or NONE)
    for brand in BRANDS:
        name = name.removeprefix(brand)
    return Cell(name)


def _name(gpu: Gpu) -> Cell:
    name = _whole_name(gpu).text
    return Cell(name if cell_len(name) <= NAME_COLUMNS else set_cell_size(name, NAME_COLUMNS - 1) + "…")


def _of(used: float | None, most: float | None, digits: int = 0) -> str:
    return f"{NONE if used is None else f'{used:.{digits}f}'}/{NONE if most is None else f'{most:.{digits}f}'}"


def _memory(gpu: Gpu) -> Cell:
    used, total = (
        None if (value := gpu.value(name)) is None else value / GIB for name in ("memory_used", "memory_total")
    )
    share = used / total if used is not None and total else 0.0
    return Cell(_of(used, total, 1), "red" if share >= 0.95 else "yellow" if share >= 0.8 else "")


def _power(gpu: Gpu) -> Cell:
    power, limit = gpu.value("power"), gpu.value("power_limit")
    near = power is not None and limit and power >= 0.97 * limit
    return Cell(_of(power, limit), "yellow" if near else "")


def _temperature(gpu: Gpu) -> Cell:
    value = gpu.value("temperature")
    if value is None:
        return Cell(NONE)
    return Cell(f"{value}°C", "red" if value >= 85 else "yellow" if value >= 75 else "")


def who_uses(gpu: Gpu) -> Cell:
    """The runs on a GPU, else the users of its processes, else that it is free."""
    processes = gpu.processes.value or ()
    runs = list(dict.fromkeys([*(one.run for one in processes if one.run), *gpu.runs]))
    others = [one for one in processes if one.run is None and one.kind == "compute"]
    names = dict.fromkeys(one.user.value or f"pid {one.pid}?" for one in others)
    if runs or names:
        return Cell(printable(", ".join([*runs, *names])))
    if (use := use_of(gpu)) is not None:
        return Cell("unknown" if gpu.processes.value is None else "in use" if "GiB" in use else use)
    return Cell("free", "dim")


def _note(gpu: Gpu) -> Cell:
    """What holds its clocks down or is wrong with it, then who uses it."""
    words = [word for word in gpu.value("throttle") or [] if word != "idle"]
    if gpu.value("ecc_uncorrected"):
        words.append(f"{gpu.value('ecc_uncorrected')} ECC errors")
    if gpu.divided:
        words.append(f"{len(gpu.instances)} MIG")
    user = who_uses(gpu)
    return Cell(", ".join([*words, user.text]), "yellow" if words else user.style)


COLUMNS = [
    Column("GPU", lambda gpu: Cell(str(gpu.index))),
    Column("NAME", _name, right=False),
    Column("BUSY", lambda gpu: _percent(gpu, "busy")),
    Column("SM", lambda gpu: _percent(gpu, "sm_active")),
    Column("TENSOR", lambda gpu: _percent(gpu, "tensor_active")),
    Column("MEMORY GiB", _memory),
    Column("POWER W", _power),
    Column("TEMP", _temperature),
]
WIDE = [
    Column("DRAM", lambda gpu: _percent(gpu, "dram_active")),
    Column("SM MHz", lambda gpu: Cell(_of(gpu.value("sm_clock"), gpu.value("max_sm_clock")))),
    Column("FAN", lambda gpu: _percent(gpu, "fan")),
    Column("STATE", lambda gpu: _plain(gpu, "performance_state")),
    Column("PCIe", lambda gpu: Cell(_link(gpu))),
]
NOTE = Column("USED BY", _note, right=False)


def _link(gpu: Gpu) -> str:
    generation, width = gpu.value("pcie_generation"), gpu.value("pcie_width")
    return NONE if generation is None or width is None else f"{generation}.0 x{width}"


def gpu_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """One line a GPU below a line of titles, none wider than `width`."""
    columns = [*COLUMNS, NOTE]
    if width >= WIDE_COLUMNS:
        columns = [COLUMNS[0], Column("NAME", _whole_name, right=False), *COLUMNS[2:], *WIDE, NOTE]
    rows = [_cells(gpu, columns) for gpu in snapshot.gpus]
    return _table(columns, rows, width)


def _cells(gpu: Gpu, columns: Sequence[Column]) -> list[Cell]:
    if gpu.state == "ok":
        return [column.cell(gpu) for column in columns]
    silent = f"stale, no answer for {gpu.age:.0f} s" if gpu.state == "stale" else str(gpu["busy"].reason)
    return [columns[0].cell(gpu), columns[1].cell(gpu), Cell(printable(silent), "red")]


def _table(columns: Sequence[Column], rows: Sequence[list[Cell]], width: int) -> list[Text]:
    whole = [row for row in rows if len(row) == len(columns)]
    titles = [Cell(column.title, "bold") for column in columns]
    widths = [max(cell_len(row[place].text) for row in [titles, *whole]) for place in range(len(columns))]
    for row in rows:
        widths[:2] = [max(widths[place], cell_len(row[place].text)) for place in (0, 1)]
    return [_line(columns, row, widths, width) for row in [titles, *rows]]


def _line(columns: Sequence[Column], row: list[Cell], widths: list[int], width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for place, cell in enumerate(row):
        last = place == len(row) - 1
        room = 0 if last else widths[place] - cell_len(cell.text)
        left, right = (room, 0) if columns[place].right and not last else (0, room)
        line.append(" " * left)
        line.append(cell.text, cell.style)
        line.append(" " * right + ("" if last else GAP))
    line.truncate(width, overflow="ellipsis")
    return line


def process_lines(snapshot: Snapshot, width: int) -> list[Text]:
    """One line a process, those with most GPU memory first on each GPU."""
    titles = ["GPU", "PID", "USER", "TYPE", "GPU MEM", "CPU", "HOST MEM", "COMMAND"]
    rows: list[list[str]] = []
    for gpu in snapshot.gpus:
        known = sorted(gpu.processes.value or (), key=lambda one: -(one.gpu_memory.value or 0))
        rows += [_process(gpu, one) for one in known]
        if gpu.processes.value is None:
            rows.append([str(gpu.index), NONE, NONE, NONE, NONE, NONE, NONE, f"not known: {gpu.processes.reason}"])
    columns = [Column(title, lambda _: Cell(""), right=title not in ("USER", "TYPE", "COMMAND")) for title in titles]
    return _table(columns, [[Cell(printable(part)) for part in row] for row in rows], width)


def _process(gpu: Gpu, one: Process) -> list[str]:
    what = one.command.value or f"? {one.command.reason}"
    ours = f"{one.run} rank {one.rank}: " if one.run is not None else ""
    return [
        str(gpu.index) if one.instance is None else f"{gpu.index}:{one.instance}",
        str(one.pid),
        one.user.value or "?",
        one.kind,
        _size(one.gpu_memory),
        NONE if one.cpu.value is None else f"{one.cpu.value:.0f}%",
        _size(one.memory),
        ours + what,
    ]


def _size(reading: Reading[int]) -> str:
    if reading.value is None:
        return NONE
    return f"{reading.value / GIB:.1f} GiB" if reading.value >= GIB else f"{reading.value / 2**20:.0f} MiB"


def title_line(snapshot: Snapshot) -> Text:
    """Host and versions, and in bold what must be known of where this comes from."""
    driver, cuda = (one.value or NONE for one in (snapshot.driver, snapshot.cuda))
    line = Text(f"{printable(snapshot.host)}   driver {printable(driver)}   CUDA {printable(cuda)}", no_wrap=True)
    if snapshot.source.notice is not None:
        line.append("   ")
        line.append(snapshot.source.notice, "bold reverse")
    return line
