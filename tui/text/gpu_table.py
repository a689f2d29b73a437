"""The GPUs of the monitor as text: one line for each, or several with meters and a tall graph of the past.

`tui.text.gpus` has the plain table of `gputrain gpus`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.text import Text

from engine.gpus.snapshot import Gpu, Snapshot
from engine.utils.text import printable
from tui.charts.gpu_loads import GpuLoads, share_percent
from tui.charts.history import DOTS_PER_COLUMN, history_graph, shown_seconds, time_axis
from tui.charts.meter import load_meter
from tui.palette import ACCENT, BAD, FREE, MUTED, STRONG, TRACK, WARNING
from tui.text.gpu_names import gpu_key
from tui.text.gpu_words import common_name, is_free, notes, short_name, silence_reason, users
from tui.text.gpus import GIB
from tui.text.tables import UNKNOWN, shorten_middle

PICKED_MARK = "●"
GAP = 2
# One line per GPU: from these widths, meters and further columns fit.
METERS_MIN_WIDTH, POWER_METER_MIN_WIDTH, WIDE_MIN_WIDTH = 72, 100, 140
MIN_GRAPH_COLUMNS, MIN_AXIS_COLUMNS = 8, 24
# Several lines per GPU: from this width of the graphs, one of the memory is beside that of the load.
TWO_GRAPHS_MIN_COLUMNS = 72


@dataclass(frozen=True)
class TableView:
    """How the GPUs are shown: in `width` columns, with `lines` lines for each, and the last `seconds` of their load."""

    width: int
    lines: int
    seconds: float
    picked: Collection[str] = ()
    """Keys of GPUs (`tui.text.gpu_names.gpu_key`)."""


# Each GPU with its last answer, None if it never answered.
Answers = Sequence[tuple[Gpu, Gpu | None]]


@dataclass(frozen=True)
class Zone:
    """A column of the table: its title, and for each GPU its lines."""

    title: str
    blocks: list[list[Text]]
    align_right: bool = False

    @cached_property
    def width(self) -> int:
        cells = [line.cell_len for block in self.blocks for line in block]
        return max([len(self.title), *cells])


def gpu_table(snapshot: Snapshot, loads: GpuLoads, view: TableView) -> tuple[Text, list[list[Text]]]:
    """Return the header, and the lines of each GPU. A GPU that does not answer has its last readings."""
    answers = [(gpu, loads.last_answer(gpu)) for gpu in snapshot.gpus]
    index = _index_zone(snapshot, view)
    zones = (_block_zones if view.lines > 1 else _line_zones)(snapshot, answers, view)
    widths = [zone.width for zone in zones]
    # In one line, and without any reading, words take the place of the readings.
    words = [gpu.state != "ok" and (view.lines == 1 or last is None) for gpu, last in answers]
    room = view.width - index.width - sum(width + GAP for width in widths) - GAP
    graph = _graph_zone(snapshot, loads, view, max(room, 0))
    titles = [Text(zone.title) for zone in zones]
    header = Text.assemble(_joined([index, *zones], [Text(index.title), *titles]), " " * GAP, graph.title)
    blocks = []
    for row, (gpu, last) in enumerate(answers):
        lines = []
        for number in range(view.lines):
            if words[row]:
                text = _silence(gpu, last) if number == 0 else Text()
                text.truncate(sum(widths) + GAP * (len(widths) - 1), overflow="ellipsis", pad=True)
            else:
                text = _joined(zones, [zone.blocks[row][number] for zone in zones])
            start = _joined([index], [index.blocks[row][number]])
            line = Text(" " * GAP).join([start, text, graph.blocks[row][number]])
            line.truncate(view.width)
            lines.append(line)
        blocks.append(lines)
    header.truncate(view.width)
    return Text(header.plain, MUTED, no_wrap=True, end=""), blocks


def _joined(zones: Sequence[Zone], cells: Sequence[Text]) -> Text:
    """Join one cell of each zone, padded to the width of the zone."""
    line = Text(no_wrap=True, end="")
    for number, (zone, cell) in enumerate(zip(zones, cells, strict=True)):
        padding = " " * (zone.width - cell.cell_len)
        line.append(" " * GAP if number else "")
        line.append(padding if zone.align_right else "").append_text(cell).append("" if zone.align_right else padding)
    return line


def _index_zone(snapshot: Snapshot, view: TableView) -> Zone:
    blocks = []
    for gpu in snapshot.gpus:
        picked = gpu_key(gpu) in view.picked
        line = Text(no_wrap=True, end="")
        # A blank has no style: a cursor of reversed colors would show it.
        line.append(f"{PICKED_MARK} " if picked else "  ", ACCENT if picked else "")
        line.append(f"{gpu.index:>2}", ACCENT if picked else FREE if is_free(gpu) else STRONG)
        blocks.append([line, *[Text()] * (view.lines - 1)])
    return Zone(" GPU", blocks)


def _silence(gpu: Gpu, last: Gpu | None) -> Text:
    """Return why a GPU does not answer, and its last readings, if there are any."""
    line = Text.assemble((silence_reason(gpu), BAD), no_wrap=True, end="")
    if last is not None:
        util, used = last.value("util"), last.value("memory_used")
        readings = [
            "" if util is None else f"{util:.0f}% util",
            "" if used is None else f"{used / GIB:.1f} GiB",
            ", ".join(users(last)) or "free",
        ]
        line.append(f": last seen {', '.join(filter(None, readings))}", MUTED)
    return line


def _faded(line: Text) -> Text:
    """Return a line of old readings without the colors of the current ones."""
    faded = Text(line.plain, MUTED, no_wrap=True, end="")
    faded.spans = [span for span in line.spans if span.style in (TRACK, BAD)]
    return faded


def _number(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def _value_style(gpu: Gpu, value: float | None) -> str:
    return MUTED if value is None or is_free(gpu) else ""


def _percent(name: str) -> Callable[[Gpu], Text]:
    def make(gpu: Gpu) -> Text:
        value = gpu.value(name)
        return Text(_number(value, "%"), _value_style(gpu, value))

    return make


def _temperature(gpu: Gpu) -> Text:
    value = gpu.value("temperature")
    style = _value_style(gpu, value) if value is None or value < 75 else WARNING if value < 85 else BAD
    return Text(_number(value, "°"), style)


def _memory_text(gpu: Gpu) -> str:
    used, total = gpu.value("memory_used"), gpu.value("memory_total")
    return "/".join(UNKNOWN if value is None else f"{value / GIB:.1f}" for value in (used, total))


def _power_text(gpu: Gpu) -> str:
    return f"{_number(gpu.value('power'))}/{_number(gpu.value('power_limit'))}"


def _metered(value: float | None, columns: int, text: Text, text_width: int) -> Text:
    """Return a meter of a percentage with its text at the right."""
    line = Text(no_wrap=True, end="")
    if columns:
        line.append_text(load_meter(None if value is None else value / 100, columns)).append(" ")
    return line.append(" " * max(text_width - text.cell_len, 0)).append_text(text)


def _memory(gpu: Gpu, columns: int, width: int) -> Text:
    text = Text(_memory_text(gpu), _value_style(gpu, gpu.value("memory_used")))
    return _metered(share_percent(gpu, "memory_used", "memory_total"), columns, text, width)


def _power(gpu: Gpu, columns: int, width: int) -> Text:
    text = Text(_power_text(gpu), _value_style(gpu, gpu.value("power")))
    return _metered(share_percent(gpu, "power", "power_limit"), columns, text, width)


def _used_by(gpu: Gpu, width: int) -> Text:
    """Return notes and users in one line of at most `width` cells; a long name keeps its end."""
    if is_free(gpu):
        line = Text("free", FREE, no_wrap=True, end="")
        return Text.assemble(line, *((f"  {note}", WARNING) for note in notes(gpu)), no_wrap=True, end="")
    names = users(gpu)
    text = ", ".join(names) or ("unknown" if gpu.processes.value is None else "in use")
    line = Text(no_wrap=True, end="")
    for note in notes(gpu):
        line.append(f"{note}  ", WARNING)
    room = max(width - line.cell_len, min(width, 8))
    line.append(shorten_middle(text, room))
    line.truncate(width, overflow="ellipsis")
    return line


def _line_zones(snapshot: Snapshot, answers: Answers, view: TableView) -> list[Zone]:
    """Return the columns of a table with one line for each GPU."""
    known = [last or gpu for gpu, last in answers]
    width = view.width
    load_columns = 0 if width < METERS_MIN_WIDTH else max(width // 14, 5)
    small_columns = 0 if width < METERS_MIN_WIDTH else max(width // 20, 4)
    memory_width = max((len(_memory_text(gpu)) for gpu in known), default=0)
    power_width = max((len(_power_text(gpu)) for gpu in known), default=0)
    makers: list[tuple[str, bool, Callable[[Gpu], Text]]] = []
    if common_name(snapshot) is None:
        makers.append(("name", False, lambda gpu: Text(shorten_middle(short_name(gpu), 10 if width < 100 else 18))))
    makers.append(("util", False, lambda gpu: _metered(gpu.value("util"), load_columns, _percent("util")(gpu), 4)))
    if width >= METERS_MIN_WIDTH:
        makers.append(("SM", True, _percent("sm_active")))
    if width >= POWER_METER_MIN_WIDTH:
        makers.append(("tensor", True, _percent("tensor_active")))
    makers.append(("memory GiB", False, lambda gpu: _memory(gpu, small_columns, memory_width)))
    if width >= POWER_METER_MIN_WIDTH:
        makers.append(("power W", False, lambda gpu: _power(gpu, small_columns, power_width)))
    elif width >= METERS_MIN_WIDTH:
        makers.append(("W", True, lambda gpu: Text(_number(gpu.value("power")), _value_style(gpu, 0))))
    makers.append(("temp" if width >= WIDE_MIN_WIDTH else "°C", True, _temperature))
    used_by = (
        17
        if width < METERS_MIN_WIDTH
        else 18
        if width < POWER_METER_MIN_WIDTH
        else 22
        if width < WIDE_MIN_WIDTH
        else 34
    )
    makers.append(("used by", False, lambda gpu: _used_by(gpu, used_by)))
    # Of a GPU that does not answer, words take the place of the readings.
    return [
        Zone(title, [[make(gpu)] if gpu.state == "ok" else [Text()] for gpu in snapshot.gpus], right)
        for title, right, make in makers
    ]


def _block_zones(snapshot: Snapshot, answers: Answers, view: TableView) -> list[Zone]:
    """Return the users, the meters and further readings of each GPU, as blocks of several lines."""
    named = common_name(snapshot) is None
    who_width = min(max(view.width // 7, 18), 30)
    meter_columns = min(max(view.width // 8, 8), 28)
    zones = [Zone("used by", []), Zone("", []), Zone("", [])]
    for gpu, last in answers:
        known = last or gpu
        parts = [
            _who_lines(known, who_width, named=named),
            _meter_lines(known, meter_columns),
            _fact_lines(known, view.lines),
        ]
        if gpu.state != "ok":
            parts[0].insert(1, Text.assemble((shorten_middle(silence_reason(gpu), who_width), BAD)))
            parts = [[_faded(line) for line in lines] for lines in parts]
        for zone, lines in zip(zones, parts, strict=True):
            zone.blocks.append([*lines[: view.lines], *[Text()] * (view.lines - len(lines))])
    return zones


def _who_lines(gpu: Gpu, width: int, *, named: bool) -> list[Text]:
    if is_free(gpu):
        lines = [Text("free", FREE)]
    else:
        names = users(gpu) or ["unknown" if gpu.processes.value is None else "in use"]
        lines = [Text(shorten_middle(name, width)) for name in names]
    lines[1:1] = [Text(shorten_middle(note, width), WARNING) for note in notes(gpu)]
    if named:
        lines.insert(1, Text(shorten_middle(short_name(gpu), width), MUTED))
    # Whose runs these are, and what the others run.
    details = dict.fromkeys(
        process.user.value if process.run else process.command.value
        for process in gpu.processes.value or ()
        if process.run or process.kind == "compute"
    )
    for detail in filter(None, details):
        lines.append(Text(printable(detail), MUTED))
        lines[-1].truncate(width, overflow="ellipsis")
    return lines


def _meter_lines(gpu: Gpu, columns: int) -> list[Text]:
    def line(label: str, value: float | None, text: str) -> Text:
        return Text.assemble(
            (f"{label:<7}", MUTED),
            load_meter(None if value is None else value / 100, columns),
            (f" {text}", _value_style(gpu, value)),
            no_wrap=True,
            end="",
        )

    readings = {name: gpu.value(name) for name in ("util", "sm_active", "tensor_active", "dram_active")}
    lines = [
        line("util", readings["util"], _number(readings["util"], "%")),
        line("memory", share_percent(gpu, "memory_used", "memory_total"), f"{_memory_text(gpu)} GiB"),
        line("power", share_percent(gpu, "power", "power_limit"), f"{_power_text(gpu)} W"),
    ]
    for label, name in (("SM", "sm_active"), ("tensor", "tensor_active"), ("DRAM", "dram_active")):
        lines.append(line(label, readings[name], _number(readings[name], "%")))
    return lines


def _fact_lines(gpu: Gpu, lines: int) -> list[Text]:
    """Return the readings that the meters of a block of `lines` lines leave out, the most important first."""

    def pair(label: str, value: str) -> Text:
        return Text.assemble((f"{label} ", MUTED), (value, _value_style(gpu, 0)), no_wrap=True, end="")

    clock = pair("clock", f"{_number(gpu.value('sm_clock'))} MHz")
    temperature = Text.assemble(("temp ", MUTED), _temperature(gpu), no_wrap=True, end="")
    activity = Text.assemble(
        pair("SM", f"{_number(gpu.value('sm_active'), '%'):>4}"),
        "  ",
        pair("tensor", f"{_number(gpu.value('tensor_active'), '%'):>4}"),
        no_wrap=True,
        end="",
    )
    if lines == 2:
        power = Text.assemble(
            temperature, "  ", pair("power", f"{_number(gpu.value('power'))} W"), no_wrap=True, end=""
        )
        return [power, activity]
    hot = Text.assemble(temperature, "  ", pair("fan", _number(gpu.value("fan"), "%")), no_wrap=True, end="")
    facts = [temperature if gpu.value("fan") is None else hot, clock]
    if lines == 3:
        return [*facts, activity]
    link = (gpu.value("pcie_generation"), gpu.value("pcie_width"))
    facts.append(pair("PCIe", UNKNOWN if None in link else f"{link[0]}.0 x{link[1]}"))
    facts.append(pair("state", gpu.value("performance_state") or UNKNOWN))
    facts.append(pair("links", UNKNOWN if gpu.value("nvlinks") is None else f"{gpu.value('nvlinks')} NVLink"))
    return facts


def _span_title(seconds: float, columns: int) -> str:
    """Return the time that a narrow graph shows: `last 10 min` or `10 min`."""
    value, unit = next(
        (value, unit) for size, unit in ((3600, "h"), (60, "min"), (1, "s")) if (value := seconds / size) >= 1
    )
    title = f"last {value:g} {unit}"
    return title if len(title) <= columns else title.removeprefix("last ")


def _graph_zone(snapshot: Snapshot, loads: GpuLoads, view: TableView, columns: int) -> Zone:
    """Return the graphs of the past of each GPU, and their time axis as title."""
    if columns < MIN_GRAPH_COLUMNS:
        return Zone("", [[Text()] * view.lines for _ in snapshot.gpus])
    two = view.lines > 1 and columns >= TWO_GRAPHS_MIN_COLUMNS
    metrics = ("util", "memory") if two else ("util",)
    each = (columns - GAP * (len(metrics) - 1)) // len(metrics)
    shown = shown_seconds(view.seconds, each * DOTS_PER_COLUMN)
    titles = []
    for label in metrics if two else ("",):
        axis = time_axis(shown, each, len(label) + 1).plain
        if each < MIN_AXIS_COLUMNS:
            axis = _span_title(view.seconds, each)
        titles.append(f"{label}{axis[len(label) :]}"[:each])
    blocks = []
    for gpu in snapshot.gpus:
        graphs = [
            history_graph(
                loads.columns(gpu.uuid, metric, view.seconds, each * DOTS_PER_COLUMN, snapshot.time), view.lines
            )
            for metric in metrics
        ]
        blocks.append([Text(" " * GAP).join(parts) for parts in zip(*graphs, strict=True)])
    return Zone((" " * GAP).join(titles), blocks)
