"""The GPUs of the monitor: one line for each, or a block of several lines with meters and tall graphs of the past."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.gpus.snapshot import Gpu, Snapshot
from engine.show.readings import READINGS
from engine.show.table import (
    GAP,
    Align,
    Line,
    Shorten,
    Span,
    cell_width,
    fit,
    line_width,
    pad,
    pad_line,
    shorten,
    shorten_line,
)
from engine.utils.text import printable
from tui.charts.history import DOTS_PER_COLUMN, GpuLoads, history_graph, shown_seconds, time_axis
from tui.charts.meter import load_meter
from tui.palette import ACCENT, BAD, FREE, MUTED, STRONG, TRACK, WARNING
from tui.phrases import (
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
from tui.tables import styled
from tui.tables.gpus import GpuRow, gpu_columns, silence, value_style

INDEX_COLUMNS = 4
# One line per GPU: from these widths, there are graphs of a sixth of the width, and meters.
GRAPHS_MIN_WIDTH, METERS_MIN_WIDTH, GRAPH_SHARE = 72, 90, 6
LOAD_METER_SHARE, LIMIT_METER_SHARE = 14, 20
MIN_GRAPH_COLUMNS, MIN_AXIS_COLUMNS = 8, 24
# Several lines per GPU: from this width of the graphs, one of the memory is beside that of the load.
TWO_GRAPHS_MIN_COLUMNS = 72
METERED = ("util", "memory_used", "power", "sm_active", "tensor_active", "dram_active")
METER_LABEL_COLUMNS = 7
PERCENT_COLUMNS = 4
# Users, meters and further readings of a block.
ZONES = 3

Blocks = list[list[Line]]
"""The lines of each GPU, all equally wide."""


@dataclass(frozen=True)
class GpuView:
    """How the GPUs are shown: in `width` columns, with `lines` lines for each, and the last `seconds` of their load."""

    width: int
    lines: int
    seconds: float


class GpuBlocks:
    """The lines of each GPU of a snapshot, and their header. A GPU that does not answer has its last readings.

    Picking a GPU makes the lines of this GPU only.
    """

    def __init__(self, snapshot: Snapshot, loads: GpuLoads, view: GpuView) -> None:
        answers = [(gpu, loads.last_answer(gpu)) for gpu in snapshot.gpus]
        room = view.width - INDEX_COLUMNS - len(GAP)
        make_bodies = _one_line_each if view.lines == 1 else _several_lines_each
        titles, body_width, bodies = make_bodies(snapshot, answers, view, room)
        axis, graphs = _graphs(snapshot, loads, view, room - body_width - len(GAP))
        titles = f"{pad('GPU', INDEX_COLUMNS, Align.RIGHT)}{GAP}{pad(titles, body_width)}{GAP}{axis}".rstrip()
        self.header = Text(shorten(titles, view.width), MUTED, no_wrap=True, end="")
        self._width = view.width
        keys = [gpu_key(gpu) for gpu in snapshot.gpus]
        self._parts = dict(zip(keys, zip(bodies, graphs, strict=True), strict=True))
        self._made: dict[tuple[str, bool], tuple[Text, ...]] = {}

    def lines(self, gpu: Gpu, *, picked: bool) -> tuple[Text, ...]:
        """Return the lines of a GPU."""
        key = (gpu_key(gpu), picked)
        if key not in self._made:
            self._made[key] = tuple(self._make(gpu, picked=picked))
        return self._made[key]

    def _make(self, gpu: Gpu, *, picked: bool) -> Iterator[Text]:
        style = ACCENT if picked else FREE if is_free(gpu) else STRONG
        # A blank has no style: a cursor of reversed colors would show it.
        mark = (f"{MARK} ", ACCENT) if picked else ("  ", "")
        start: Line = (mark, (pad(str(gpu.index), INDEX_COLUMNS - 2, Align.RIGHT), style))
        for body, graph in zip(*self._parts[gpu_key(gpu)], strict=True):
            line = styled((*start, (GAP, ""), *body, (GAP, ""))).append_text(graph)
            if not graph:
                line.truncate(self._width)
            yield line
            start = ((" " * INDEX_COLUMNS, ""),)


Answers = Sequence[tuple[Gpu, Gpu | None]]
"""Each GPU with its last answer, None if it never answered."""


def _one_line_each(snapshot: Snapshot, answers: Answers, view: GpuView, room: int) -> tuple[str, int, Blocks]:
    """Return the titles, the width of the lines, and the line of each GPU."""
    rows = [GpuRow(str(gpu.index), gpu) for gpu in snapshot.gpus]
    answered = [row for row in rows if row.gpu.state == "ok"]
    meters = (0, 0)
    if view.width >= METERS_MIN_WIDTH:
        meters = (view.width // LOAD_METER_SHARE, view.width // LIMIT_METER_SHARE)
    graph = view.width // GRAPH_SHARE + len(GAP) if view.width >= GRAPHS_MIN_WIDTH else 0
    hidden = {"gpu"} if common_name(snapshot) is None else {"gpu", "name"}
    columns = [column for column in gpu_columns(answered, view.width, meters) if column.key not in hidden]
    table = fit(columns, answered, room - graph)
    width = sum(table.widths) + len(GAP) * (len(table.widths) - 1)
    blocks = []
    for row, (gpu, last) in zip(rows, answers, strict=True):
        line = table.line(row, None if gpu.state == "ok" else silence(gpu, last))
        blocks.append([pad_line(line, width)])
    return "".join(text for text, _ in table.header()), width, blocks


def _several_lines_each(snapshot: Snapshot, answers: Answers, view: GpuView, room: int) -> tuple[str, int, Blocks]:
    """Return the titles, the width of the lines, and as lines of each GPU its users, its meters and further readings
    side by side."""
    has_names = common_name(snapshot) is None
    who_columns = min(max(view.width // 7, 18), 30)
    meter_columns = min(max(view.width // 8, 8), 28)
    parts: list[list[list[Line]] | None] = []
    for gpu, last in answers:
        if gpu.state != "ok" and last is None:
            parts.append(None)
            continue
        known = GpuRow("", last or gpu)
        who = _who_lines(known, who_columns, has_name=has_names)
        zones = [who, _meter_lines(known, meter_columns, view.lines), _fact_lines(known, view.lines)]
        if gpu.state != "ok":
            who.insert(1, ((shorten(silence_reason(gpu), who_columns, Shorten.MIDDLE), BAD),))
            zones = [[_faded(line) for line in lines] for lines in zones]
        parts.append(zones)
    measured = [None if zones is None else [_measured(lines[: view.lines]) for lines in zones] for zones in parts]
    widths = [
        max((width for zones in measured if zones for _, width in zones[zone]), default=0) for zone in range(ZONES)
    ]
    gaps = (ZONES - 1) * len(GAP)
    widths[-1] = max(min(widths[-1], room - sum(widths[:-1]) - gaps), 0)
    blocks: Blocks = []
    for (gpu, _), measured_zones in zip(answers, measured, strict=True):
        if measured_zones is None:
            blocks.append([shorten_line(silence(gpu)[1], room), *[()] * (view.lines - 1)])
        else:
            padded = [[*lines, *[((), 0)] * (view.lines - len(lines))] for lines in measured_zones]
            blocks.append([_side_by_side(cells, widths) for cells in zip(*padded, strict=True)])
    title, total = "used by", sum(widths) + gaps
    if total < cell_width(title) or None in measured:
        total = max(cell_width(title), total, *(line_width(line) for lines in blocks for line in lines))
        blocks = [[pad_line(line, total) for line in lines] for lines in blocks]
    return title, total, blocks


def _measured(lines: Sequence[Line]) -> list[tuple[Line, int]]:
    """Return the lines with their widths."""
    return [(line, line_width(line)) for line in lines]


def _side_by_side(cells: Sequence[tuple[Line, int]], widths: Sequence[int]) -> Line:
    """Join lines, given with their widths, in columns of `widths`."""
    spans: list[Span] = []
    for (line, measured), width in zip(cells, widths, strict=True):
        if spans:
            spans.append((GAP, ""))
        spans += (*line, (" " * (width - measured), "")) if measured <= width else pad_line(line, width)
    return tuple(spans)


def _faded(line: Line) -> Line:
    """Return a line of old readings without the colors of the current ones."""
    return tuple((text, style if style in (TRACK, BAD) else MUTED) for text, style in line)


def _who_lines(row: GpuRow, width: int, *, has_name: bool) -> list[Line]:
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
    shown: list[Line] = [((shorten(text, width, Shorten.MIDDLE), style),) for text, style in lines]
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
    if lines == 2:
        return [(*fact("temperature"), (GAP, ""), *fact("power")), activity]
    has_fan = row.value("fan") is not None
    cooling = (*fact("temperature"), (GAP, ""), *fact("fan")) if has_fan else fact("temperature")
    if lines == 3:
        return [cooling, fact("sm_clock"), activity]
    link: Line = (("PCIe ", MUTED), (pcie_link(row.gpu), ""))
    return [cooling, fact("sm_clock"), link, fact("performance_state"), fact("nvlinks")]


def _graphs(snapshot: Snapshot, loads: GpuLoads, view: GpuView, columns: int) -> tuple[str, list[list[Text]]]:
    """Return the time axis, and the graphs of the past of each GPU."""
    if columns < MIN_GRAPH_COLUMNS:
        return "", [[Text()] * view.lines for _ in snapshot.gpus]
    two = view.lines > 1 and columns >= TWO_GRAPHS_MIN_COLUMNS
    metrics = ("util", "memory_used") if two else ("util",)
    each = (columns - len(GAP) * (len(metrics) - 1)) // len(metrics)
    values = each * DOTS_PER_COLUMN
    axes = [_axis(READINGS[key].label if two else "", view.seconds, each) for key in metrics]
    blocks = []
    for gpu in snapshot.gpus:
        graphs = [
            history_graph(loads.columns(gpu.uuid, metric, view.seconds, values, snapshot.time), view.lines)
            for metric in metrics
        ]
        blocks.append([Text(GAP).join(parts) if two else parts[0] for parts in zip(*graphs, strict=True)])
    return GAP.join(axes), blocks


def _axis(label: str, seconds: float, columns: int) -> str:
    """Return the time axis of a graph, or of a narrow one the time that it shows: `last 10 min` or `10 min`."""
    if columns >= MIN_AXIS_COLUMNS:
        axis = time_axis(shown_seconds(seconds, columns * DOTS_PER_COLUMN), columns, len(label) + 1).plain
        return f"{label}{axis[len(label) :]}"[:columns]
    sizes = ((3600, "h"), (60, "min"), (1, "s"))
    value, unit = next((value, unit) for size, unit in sizes if (value := seconds / size) >= 1)
    title = f"last {value:g} {unit}"
    return pad(title if len(title) <= columns else title.removeprefix("last "), columns)
