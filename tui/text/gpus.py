"""A snapshot of the GPUs as lines of text: a table that fits 80 columns, and one of the processes on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from engine.gpus.selection import use_of
from engine.gpus.snapshot import Gpu, Process, Reading, Snapshot
from engine.utils.text import counted, printable
from tui.text.palette import BAD, GOOD, MUTED, NOTICE, STRONG, WARNING
from tui.text.tables import NONE

GIB = 2**30
GAP = "  "
NAME_COLUMNS = 12
# From so many columns on there is room for the whole name, clocks, fan and link.
WIDE_COLUMNS = 120
MIDDLE_COLUMNS = 100
# From so many on there is room for what is less asked for of a process.
PROCESS_COLUMNS = 70
SPARK, SPARK_WIDE = 8, 16
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
    style = GOOD if value >= 70 else "" if value >= 20 else MUTED
    return Cell(f"{value:.0f}%", style)


def _whole_name(gpu: Gpu) -> Cell:
    name = printable(gpu.value("name") or NONE)
    for brand in BRANDS:
        name = name.removeprefix(brand)
    return Cell(name)


def _name(gpu: Gpu, columns: int = NAME_COLUMNS) -> Cell:
    name = _whole_name(gpu).text
    return Cell(name if cell_len(name) <= columns else set_cell_size(name, columns - 1) + "…")


def _of(used: float | None, most: float | None, digits: int = 0) -> str:
    return f"{NONE if used is None else f'{used:.{digits}f}'}/{NONE if most is None else f'{most:.{digits}f}'}"


def _memory(gpu: Gpu) -> Cell:
    used, total = (
        None if (value := gpu.value(name)) is None else value / GIB for name in ("memory_used", "memory_total")
    )
    share = used / total if used is not None and total else 0.0
    return Cell(_of(used, total, 1), BAD if share >= 0.95 else WARNING if share >= 0.8 else "")


def _power(gpu: Gpu) -> Cell:
    power, limit = gpu.value("power"), gpu.value("power_limit")
    return Cell(_of(power, limit), _power_style(gpu))


def _power_style(gpu: Gpu) -> str:
    power, limit = gpu.value("power"), gpu.value("power_limit")
    return WARNING if power is not None and limit and power >= 0.97 * limit else ""


def _temperature(gpu: Gpu) -> Cell:
    value = gpu.value("temperature")
    if value is None:
        return Cell(NONE)
    return Cell(f"{value}°C", BAD if value >= 85 else WARNING if value >= 75 else "")


def who_uses(gpu: Gpu) -> Cell:
    """The runs on a GPU, else the users of its processes, else that it is free."""
    processes = gpu.processes.value or ()
    runs = list(dict.fromkeys([*(one.run for one in processes if one.run), *gpu.runs]))
    others = [one for one in processes if one.run is None and one.kind == "compute"]
    names = dict.fromkeys(one.user.value or f"pid {one.pid}?" for one in others)
    if runs or names:
        return Cell(printable(", ".join([*runs, *names])))
    if use_of(gpu) is not None:
        return Cell("unknown" if gpu.processes.value is None else "in use")
    return Cell("free", MUTED)


def _note(gpu: Gpu) -> Cell:
    """What holds its clocks down or is wrong with it, then who uses it."""
    words = [word for word in gpu.value("throttle") or [] if word != "idle"]
    if gpu.value("ecc_uncorrected"):
        words.append(f"{gpu.value('ecc_uncorrected')} ECC errors")
    if gpu.divided:
        words.append(f"{len(gpu.instances)} MIG")
    user = who_uses(gpu)
    return Cell(", ".join([*words, user.text]), WARNING if words else user.style)


GPU = Column("GPU", lambda gpu: Cell(str(gpu.index)))
NAME = Column("NAME", _name, right=False)
BUSY = Column("BUSY", lambda gpu: _percent(gpu, "busy"))
ACTIVITY = [
    Column("SM", lambda gpu: _percent(gpu, "sm_active")),
    Column("TENSOR", lambda gpu: _percent(gpu, "tensor_active")),
]
LOAD = [
    Column("MEMORY GiB", _memory),
    Column("POWER W", _power),
    Column("TEMP", _temperature),
]
SHORT_NAME = Column("NAME", partial(_name, columns=10), right=False)
SHORT_POWER = Column("WATT", lambda gpu: Cell(_plain(gpu, "power").text, _power_style(gpu)))
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


@dataclass(frozen=True)
class Marks:
    """What a screen adds to the table: which GPUs are picked, and how busy each was at the latest looks, by UUID."""

    picked: Collection[str] = ()
    busy: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def pick(self, gpu: Gpu) -> Cell:
        return Cell("[x]" if gpu.uuid in self.picked else "[ ]", STRONG if gpu.uuid in self.picked else "")

    def spark(self, length: int, gpu: Gpu) -> Cell:
        return Cell(sparkline(self.busy.get(gpu.uuid or "", ())[-length:]).rjust(length))


def sparkline(values: Sequence[float | None]) -> str:
    """A bar for each percentage; a dot where it was not known."""
    return "".join("·" if value is None else "▁▂▃▄▅▆▇█"[min(max(int(value / 12.5), 0), 7)] for value in values)


def gpu_lines(snapshot: Snapshot, width: int, marks: Marks | None = None) -> list[Text]:
    """One line a GPU below a line of titles, none wider than `width`."""
    wide = width >= WIDE_COLUMNS
    name = Column("NAME", _whole_name, right=False) if wide else NAME
    columns = [GPU, name, BUSY, *ACTIVITY, *LOAD, *(WIDE if wide else []), NOTE]
    gap = GAP
    if marks is not None:
        pick = Column("", marks.pick, right=False)
        bars = Column("", partial(marks.spark, SPARK if width < MIDDLE_COLUMNS else SPARK_WIDE), right=False)
        if width < MIDDLE_COLUMNS:
            gap = GAP[:1]
            columns = [pick, GPU, SHORT_NAME, BUSY, bars, ACTIVITY[0], LOAD[0], SHORT_POWER, LOAD[2], NOTE]
        else:
            room = WIDE if width >= WIDE_COLUMNS + SPARK_WIDE + len(GAP) * len(WIDE) else []
            columns = [pick, GPU, name, BUSY, bars, *ACTIVITY, *LOAD, *room, NOTE]
    rows = [_cells(gpu, columns) for gpu in snapshot.gpus]
    return _table(columns, rows, width, gap)


def _cells(gpu: Gpu, columns: Sequence[Column]) -> list[Cell]:
    if gpu.state == "ok":
        return [column.cell(gpu) for column in columns]
    silent = f"stale, no answer for {gpu.age:.0f} s" if gpu.state == "stale" else str(gpu["busy"].reason)
    told = columns.index(BUSY)
    return [*(column.cell(gpu) for column in columns[:told]), Cell(printable(silent), BAD)]


def _table(columns: Sequence[Column], rows: Sequence[list[Cell]], width: int, gap: str = GAP) -> list[Text]:
    whole = [row for row in rows if len(row) == len(columns)]
    titles = [Cell(column.title, STRONG) for column in columns]
    widths = [max(cell_len(row[place].text) for row in [titles, *whole]) for place in range(len(columns))]
    for row in rows:
        known = range(len(row) - 1)
        widths[: len(known)] = [max(widths[place], cell_len(row[place].text)) for place in known]
    return [_line(columns, row, widths, width, gap) for row in [titles, *rows]]


def _line(columns: Sequence[Column], row: list[Cell], widths: list[int], width: int, gap: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for place, cell in enumerate(row):
        last = place == len(row) - 1
        room = 0 if last else widths[place] - cell_len(cell.text)
        left, right = (room, 0) if columns[place].right and not last else (0, room)
        line.append(" " * left)
        line.append(cell.text, cell.style)
        line.append(" " * right + ("" if last else gap))
    line.truncate(width, overflow="ellipsis")
    return line


def processes_of(snapshot: Snapshot) -> list[tuple[Gpu, Process | None]]:
    """Those with most GPU memory first on each GPU; None for a GPU of which they are not known."""
    found: list[tuple[Gpu, Process | None]] = []
    for gpu in snapshot.gpus:
        found += [(gpu, one) for one in sorted(gpu.processes.value or (), key=lambda one: -(one.gpu_memory.value or 0))]
        if gpu.processes.value is None:
            found.append((gpu, None))
    return found


def process_lines(processes: Sequence[tuple[Gpu, Process | None]], width: int) -> list[Text]:
    """One line a process, below a line of titles."""
    titles = ["GPU", "PID", "USER", "TYPE", "GPU MEM", "CPU", "HOST MEM", "COMMAND"]
    kept = range(len(titles)) if width >= PROCESS_COLUMNS else [0, 1, 2, 4, 5, 7]
    rows = [
        [str(gpu.index), *[NONE] * 6, f"not known: {gpu.processes.reason}"] if one is None else _process(gpu, one)
        for gpu, one in processes
    ]
    columns = [
        Column(titles[place], lambda _: Cell(""), right=titles[place] not in ("USER", "TYPE", "COMMAND"))
        for place in kept
    ]
    return _table(columns, [[Cell(printable(row[place])) for place in kept] for row in rows], width)


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


def title_words(snapshot: Snapshot) -> str:
    """Host and versions."""
    driver, cuda = (one.value or NONE for one in (snapshot.driver, snapshot.cuda))
    return printable(f"{snapshot.host}   driver {driver}   CUDA {cuda}")


def title_line(snapshot: Snapshot) -> Text:
    """Host and versions, and in bold what must be known of where this comes from."""
    line = Text(title_words(snapshot), no_wrap=True)
    if snapshot.source.notice is not None:
        line.append("   ")
        line.append(snapshot.source.notice, NOTICE)
    return line


def no_driver(snapshot: Snapshot) -> str:
    """Why there is no GPU to be shown, and what that means."""
    from engine.utils.host import cores

    error, instead = printable(snapshot.error or ""), counted(cores(), "core")
    if snapshot.pending:
        return f"On {snapshot.host} {error}; a run waits longer for it, so look again."
    return f"No NVIDIA driver can be asked on {snapshot.host} ({error}): training uses the CPU, {instead}."
