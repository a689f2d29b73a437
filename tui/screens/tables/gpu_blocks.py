"""The GPUs of the monitor: one line for each, or a block of several lines with meters and tall graphs of the past for
those that are in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.text import Text

from engine.base.text import printable
from engine.gpus.snapshot import Gpu, Snapshot
from engine.report.readings import READINGS
from engine.report.table import (
    GAP,
    Align,
    Column,
    FittedTable,
    Line,
    Shorten,
    fit,
    line_text,
    pad,
    shorten,
    shorten_line,
)
from tui.charts.history import DOTS_PER_COLUMN, GpuLoads, history_graph, shown_seconds, time_axis
from tui.charts.meter import load_meter
from tui.screens.phrases import (
    MARK,
    common_name,
    gpu_key,
    gpu_warnings,
    is_free,
    kind_notes,
    pcie_link,
    reserved_text,
    short_name,
    silence_reason,
    users,
    users_text,
)
from tui.screens.tables import spans, styled
from tui.screens.tables.gpus import GpuRow, gpu_columns, silence, value_style
from tui.terminal.palette import ACCENT, BAD, FREE, MUTED, STRONG, TRACK, WARNING

# One line per GPU: from this width, there are meters. The graph has at least a sixth of the width.
METERS_MIN_WIDTH, GRAPH_SHARE = 90, 6
LOAD_METER_SHARE, LIMIT_METER_SHARE = 14, 20
MIN_GRAPH_COLUMNS, MIN_AXIS_COLUMNS = 8, 24
# Several lines per GPU: from this width of the graphs, one of the memory is beside that of the load.
TWO_GRAPHS_MIN_COLUMNS = 72
METERED = ("util", "memory_used", "power", "sm_active", "tensor_active", "dram_active")
METER_LABEL_COLUMNS = 7
PERCENT_COLUMNS = 4


@dataclass(frozen=True)
class GpuView:
    """How the GPUs are shown: in `width` columns, with `lines` lines for each that is in use, and the last `seconds` of
    their load."""

    width: int
    lines: int
    seconds: float


@dataclass(frozen=True)
class BlockLine(GpuRow):
    """The line of this `number` of a GPU, from 0. Of a GPU with several lines, it has these `parts`."""

    number: int = 0
    parts: Mapping[str, Line] = field(default_factory=dict)


class GpuBlocks:
    """The lines of each GPU of a snapshot, and their header. A GPU that does not answer has its last readings.

    Picking a GPU makes the lines of this GPU only.
    """

    def __init__(self, snapshot: Snapshot, loads: GpuLoads, view: GpuView) -> None:
        self._last_answers = {gpu_key(gpu): loads.last_answer(gpu) for gpu in snapshot.gpus}
        self._view, self._has_names = view, common_name(snapshot) is None
        self._lines = {gpu_key(gpu): self._block(gpu) for gpu in snapshot.gpus}
        shown = [line for lines in self._lines.values() for line in lines if line.parts or line.gpu.state == "ok"]
        # The width of the graph is known when the other columns have theirs.
        graph = Column[BlockLine](
            "graph", " " * view.width, lambda _: "", width=max(view.width // GRAPH_SHARE, MIN_GRAPH_COLUMNS),
            priority=7, flex=True,
        )  # fmt: skip
        table = fit([*self._columns(shown), graph], shown, view.width - len(MARK))
        if table.columns[-1] is graph:
            heights = {key: len(lines) for key, lines in self._lines.items()}
            title, graphs = _graphs(snapshot, loads, view, heights, table.widths[-1])
            graph = dataclasses.replace(graph, title=title, cell=lambda line: graphs[gpu_key(line.gpu)][line.number])
            table = dataclasses.replace(table, columns=(*table.columns[:-1], graph))
        self._table: FittedTable[BlockLine] = table
        self.header = Text(f" {line_text(table.header())}", MUTED, no_wrap=True, end="")
        self._made: dict[tuple[str, bool], tuple[Text, ...]] = {}

    def lines(self, gpu: Gpu, *, picked: bool) -> tuple[Text, ...]:
        """Return the lines of a GPU."""
        key = gpu_key(gpu)
        if (key, picked) not in self._made:
            self._made[key, picked] = tuple(
                styled(((MARK, ACCENT) if picked and not line.number else (" ", ""), *self._line(line)))
                for line in self._lines[key]
            )
        return self._made[key, picked]

    def _line(self, line: BlockLine) -> Line:
        is_silent = not line.parts and line.gpu.state != "ok" and self._view.lines == 1
        return self._table.line(line, silence(line.gpu, self._last_answers[gpu_key(line.gpu)]) if is_silent else None)

    def _columns(self, lines: list[BlockLine]) -> list[Column[BlockLine]]:
        """Return the columns before the graph."""
        width = self._view.width
        meters = (width // LOAD_METER_SHARE, width // LIMIT_METER_SHARE) if width >= METERS_MIN_WIDTH else (0, 0)
        index, name, *readings = gpu_columns(lines, width, meters)
        index = dataclasses.replace(index, style=lambda line: FREE if line.is_free else STRONG)
        if self._view.lines == 1:
            return [index, name, *readings] if self._has_names else [index, *readings]

        def part(key: str, title: str = "", width: int = 0, *, flex: bool = False) -> Column[BlockLine]:
            return Column(key, title, lambda line: line.parts.get(key, ()), width=width, priority=9, flex=flex)

        return [index, part("users", "used by", self._users_columns), part("meters"), part("facts", flex=True)]

    @property
    def _users_columns(self) -> int:
        return min(max(self._view.width // 7, 18), 30)

    def _block(self, gpu: Gpu) -> list[BlockLine]:
        """Return the lines of a GPU: of several, with its users, its meters and further readings side by side."""
        count, label = 1 if is_free(gpu) else self._view.lines, str(gpu.index)
        if self._view.lines == 1:
            return [BlockLine(label, gpu)]
        known = GpuRow(label, self._last_answers[gpu_key(gpu)] or gpu)
        meter_columns = min(max(self._view.width // 8, 8), 28)
        parts = {
            "users": _user_lines(known, self._users_columns, has_name=self._has_names),
            "meters": _meter_lines(known, meter_columns, count),
            "facts": _fact_lines(known, count),
        }
        if count == 1:
            found = tuple(span for line in parts["users"] for span in ((GAP, ""), *line))
            parts["users"] = [shorten_line(found[1:], self._users_columns)]
        if gpu.state != "ok":
            parts["users"].insert(1, ((shorten(silence_reason(gpu), self._users_columns, Shorten.MIDDLE), BAD),))
            parts = {key: [_faded(line) for line in lines] for key, lines in parts.items()}
        return [
            BlockLine("" if number else label, gpu, number,
                      {key: lines[number] for key, lines in parts.items() if number < len(lines)})
            for number in range(count)
        ]  # fmt: skip


def _faded(line: Line) -> Line:
    """Return a line of old readings without the colors of the current ones."""
    return tuple((text, style if style in (TRACK, BAD) else MUTED) for text, style in line)


def _user_lines(row: GpuRow, width: int, *, has_name: bool) -> list[Line]:
    gpu = row.gpu
    names = [] if row.is_free else users(gpu)
    lines = [(name, FREE if row.is_free else "") for name in names or [users_text(gpu)]]
    lines[1:1] = [*((note, WARNING) for note in gpu_warnings(gpu)), *((note, MUTED) for note in kind_notes(gpu))]
    lines += [(reserved_text(gpu), MUTED)] if gpu.reserved_by_runs else []
    if has_name:
        lines.insert(1, (short_name(gpu), MUTED))
    # Whose runs these are, and what the others run.
    details = dict.fromkeys(
        process.user.value if process.run else process.command.value
        for process in gpu.processes.value or ()
        if process.run or process.kind == "compute"
    )
    shown: list[Line] = [
        ((shorten(text, width, Shorten.END if style == WARNING else Shorten.MIDDLE), style),) for text, style in lines
    ]
    return shown + [((shorten(printable(detail), width), MUTED),) for detail in details if detail]


def _meter_lines(row: GpuRow, columns: int, count: int) -> list[Line]:
    lines: list[Line] = []
    for key in METERED[:count]:
        reading = READINGS[key]
        value, limit = row.value(key), row.limit(key)
        bar = load_meter(reading.share(value, limit), columns)
        text = (f" {reading.full_text(value, limit)}", value_style(row, key))
        lines.append(((pad(reading.label, METER_LABEL_COLUMNS), MUTED), *bar, text))
    return lines


def _fact_lines(row: GpuRow, lines: int) -> list[Line]:
    """Return the readings that the meters of a block of `lines` lines leave out, the most important first."""

    def fact(key: str, width: int = 0) -> Line:
        text = READINGS[key].text(row.value(key))
        return (f"{READINGS[key].label} ", MUTED), (
            pad(text, max(width, len(text)), Align.RIGHT),
            value_style(row, key),
        )

    activity = (*fact("sm_active", PERCENT_COLUMNS), (GAP, ""), *fact("tensor_active", PERCENT_COLUMNS))
    if lines <= 2:
        return [(*fact("temperature"), (GAP, ""), *fact("power")), activity]
    has_fan = row.value("fan") is not None
    cooling = (*fact("temperature"), (GAP, ""), *fact("fan")) if has_fan else fact("temperature")
    if lines == 3:
        return [cooling, fact("sm_clock"), activity]
    link: Line = (("PCIe ", MUTED), (pcie_link(row.gpu), ""))
    return [cooling, fact("sm_clock"), link, fact("performance_state"), fact("nvlinks")]


def _graphs(
    snapshot: Snapshot, loads: GpuLoads, view: GpuView, heights: Mapping[str, int], columns: int
) -> tuple[str, dict[str, list[Line]]]:
    """Return the time axis, and the lines of the graphs of the past of each GPU, as many as its height."""
    two = view.lines > 1 and columns >= TWO_GRAPHS_MIN_COLUMNS
    metrics = ("util", "memory_used") if two else ("util",)
    each = (columns - len(GAP) * (len(metrics) - 1)) // len(metrics)
    values = each * DOTS_PER_COLUMN
    axes = [_axis(READINGS[key].label if two else "", view.seconds, each) for key in metrics]
    found = {}
    for gpu in snapshot.gpus:
        graphs = [
            history_graph(loads.columns(gpu.uuid, metric, view.seconds, values, snapshot.time), heights[gpu_key(gpu)])
            for metric in metrics
        ]
        found[gpu_key(gpu)] = [
            tuple(span for part in parts for span in ((GAP, ""), *spans(part)))[1:]
            for parts in zip(*graphs, strict=True)
        ]
    return GAP.join(axes), found


def _axis(label: str, seconds: float, columns: int) -> str:
    """Return the time axis of a graph, or of a narrow one the time that it shows: `last 10 min` or `10 min`."""
    if columns >= MIN_AXIS_COLUMNS:
        axis = time_axis(shown_seconds(seconds, columns * DOTS_PER_COLUMN), columns, len(label) + 1).plain
        return f"{label}{axis[len(label) :]}"[:columns]
    sizes = ((3600, "h"), (60, "min"), (1, "s"))
    value, unit = next((value, unit) for size, unit in sizes if (value := seconds / size) >= 1)
    title = f"last {value:g} {unit}"
    return pad(title if len(title) <= columns else title.removeprefix("last "), columns)
