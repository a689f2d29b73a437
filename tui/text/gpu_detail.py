"""One GPU as text: what its readings are, what throttles it, its MIG instances, and its graphs with their axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from engine.gpus.snapshot import Gpu, Reading
from engine.utils.text import printable
from tui.charts.history import history_graph, time_axis
from tui.palette import BAD, MUTED, STRONG, WARNING
from tui.text.gpus import instance_name
from tui.text.tables import UNKNOWN

GIB = 2**30
# From this width, the groups of readings are columns.
COLUMNS_MIN_WIDTH = 150
COLUMN_GAP, GROUP_GAP = 2, "    "
# From this size, a graph has labels on its y axis.
MIN_LABELED_COLUMNS, MIN_LABELED_ROWS = 32, 5
HOT_CELSIUS, WARM_CELSIUS = 85, 75
# Paraphrased from nvmlClocksEventReasons, https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
THROTTLE_MEANINGS = {
    "idle": "no kernel runs, so the clocks are low",
    "set clocks": "the application clocks that were set limit the clocks",
    "power cap": "the power draw is at its limit, which lowers the clocks",
    "hardware slowdown": "heat, power draw or the power brake at least halves the clocks",
    "sync boost": "the clocks follow the slowest GPU of the sync boost group",
    "thermal": "the GPU or its memory is too hot, which lowers the clocks",
    "hardware thermal": "the GPU is far too hot, which at least halves the clocks",
    "power brake": "the host's power supply signals overload, which at least halves the clocks",
    "display clocks": "the display clock setting limits the clocks",
    "board limit": "a limit of the board lowers the clocks",
    "reliability": "the voltage is at its limit, which lowers the clocks",
}


@dataclass(frozen=True)
class Facts:
    """Related readings with their labels. `unknown` is the reason if all of them are unknown for the same reason."""

    title: str
    rows: Sequence[tuple[str, Text]]
    unknown: str | None = None


def fact_lines(gpu: Gpu, width: int) -> list[Text]:
    """Return all readings of a GPU that its graphs do not show, and a line per throttle reason."""
    groups = _fact_groups(gpu)
    lines = _columns(groups, width) if width >= COLUMNS_MIN_WIDTH else _flow(groups, width)
    return lines + [_truncated(line, width) for line in throttle_lines(gpu)]


def throttle_lines(gpu: Gpu) -> list[Text]:
    """Return a line for each throttle reason with its meaning."""
    reading = gpu["throttle"]
    if reading.value is None:
        return [Text.assemble(("throttling  ", MUTED), (printable(reading.reason or UNKNOWN), MUTED))]
    if not reading.value:
        return [Text.assemble(("throttling  ", MUTED), "none")]
    return [
        Text.assemble(
            ("throttling  ", MUTED),
            (printable(name), MUTED if name == "idle" else WARNING),
            (f": {THROTTLE_MEANINGS[name]}" if name in THROTTLE_MEANINGS else "", MUTED if name == "idle" else ""),
        )
        for name in reading.value
    ]


def _fact_groups(gpu: Gpu) -> list[Facts]:
    hot = _warn_from(WARM_CELSIUS, HOT_CELSIUS)
    errors, corrected = _warn_from(1, 1), _warn_from(1, None)
    return [
        _facts("clocks", gpu, [
            ("SM", ("sm_clock",), lambda gpu: _limited(gpu, "sm_clock", "max_sm_clock", " MHz")),
            ("memory", ("memory_clock",), lambda gpu: _limited(gpu, "memory_clock", "max_memory_clock", " MHz")),
            ("state", ("performance_state",), lambda gpu: str(gpu.value("performance_state"))),
        ]),
        _facts("cooling", gpu, [
            ("GPU", ("temperature",), lambda gpu: hot(gpu.value("temperature"), "°C")),
            ("memory", ("memory_temperature",), lambda gpu: hot(gpu.value("memory_temperature"), "°C")),
            ("fan", ("fan",), lambda gpu: f"{gpu.value('fan')}%"),
        ]),
        _facts("memory", gpu, [
            ("reserved", ("memory_reserved",), lambda gpu: f"{gpu.value('memory_reserved') / GIB:.1f} GiB"),
            ("util", ("memory_util",), lambda gpu: f"{gpu.value('memory_util')}%"),
            ("bandwidth", ("dram_active",), lambda gpu: f"{gpu.value('dram_active'):.0f}%"),
        ]),
        _facts("PCIe", gpu, [
            ("link", ("pcie_generation", "pcie_width"), _pcie_link),
            ("sent", ("pcie_sent",), lambda gpu: format_rate(gpu.value("pcie_sent"))),
            ("received", ("pcie_received",), lambda gpu: format_rate(gpu.value("pcie_received"))),
        ]),
        _facts("NVLink", gpu, [
            ("links", ("nvlinks",), lambda gpu: str(gpu.value("nvlinks"))),
            ("sent", ("nvlink_sent",), lambda gpu: format_rate(gpu.value("nvlink_sent"))),
            ("received", ("nvlink_received",), lambda gpu: format_rate(gpu.value("nvlink_received"))),
        ]),
        _facts("errors", gpu, [
            ("ECC corrected", ("ecc_corrected",), lambda gpu: corrected(gpu.value("ecc_corrected"))),
            ("uncorrected", ("ecc_uncorrected",), lambda gpu: errors(gpu.value("ecc_uncorrected"))),
            ("PCIe replays", ("pcie_replays",), lambda gpu: corrected(gpu.value("pcie_replays"))),
        ]),
    ]  # fmt: skip


# A label, the readings that must be known, and their text.
Fact = tuple[str, tuple[str, ...], Callable[[Gpu], Text | str]]


def _facts(title: str, gpu: Gpu, facts: Sequence[Fact]) -> Facts:
    rows, reasons = [], []
    for label, names, text_of in facts:
        missing: Reading[object] | None = next((gpu[name] for name in names if gpu.value(name) is None), None)
        reasons.append(missing.reason if missing else None)
        text = text_of(gpu) if missing is None else Text(printable(missing.reason or UNKNOWN), MUTED)
        rows.append((label, Text(text) if isinstance(text, str) else text))
    return Facts(title, rows, reasons[0] if len(set(reasons)) == 1 else None)


def _limited(gpu: Gpu, name: str, limit_name: str, unit: str) -> str:
    limit = gpu.value(limit_name)
    return f"{gpu.value(name)}{'' if limit is None else f'/{limit}'}{unit}"


def _pcie_link(gpu: Gpu) -> str:
    current = (gpu.value("pcie_generation"), gpu.value("pcie_width"))
    limit = (gpu.value("max_pcie_generation"), gpu.value("max_pcie_width"))
    text = f"{current[0]}.0 x{current[1]}"
    return text if limit == current or None in limit else f"{text} of {limit[0]}.0 x{limit[1]}"


def _warn_from(warning: float, bad: float | None) -> Callable[..., Text]:
    """Return a function that formats a number, colored from `warning` and from `bad` on."""

    def make_text(value: float, unit: str = "") -> Text:
        style = BAD if bad is not None and value >= bad else WARNING if value >= warning else ""
        return Text(f"{value}{unit}", style)

    return make_text


def format_rate(kilobytes: float) -> str:
    """Format KB/s (1000 bytes) with three digits: `12.4 GB/s`."""
    value, units = kilobytes, ["KB/s", "MB/s", "GB/s", "TB/s"]
    # 999.5 rounds to 1000, which has four digits.
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = 0 if value >= 99.95 or value == 0 else 1
    return f"{value:.{digits}f} {units[0]}"


def _columns(groups: Sequence[Facts], width: int) -> list[Text]:
    """Return the groups side by side, each with its title above."""
    column_width = (width + COLUMN_GAP) // len(groups)
    blocks = []
    for group in groups:
        label_width = max(len(label) for label, _ in group.rows)
        block = [Text(group.title, STRONG)]
        if group.unknown is not None:
            block.append(Text(printable(group.unknown), MUTED))
        else:
            room = column_width - COLUMN_GAP - label_width - 2
            # A reason that does not fit is less clear than none.
            block += [
                Text.assemble((f"{label:<{label_width}}  ", MUTED), text)
                if text.style != MUTED or text.cell_len <= room
                else Text(f"{label:<{label_width}}  {UNKNOWN}", MUTED)
                for label, text in group.rows
            ]
        blocks.append(block)
    lines = []
    for row in range(max(len(block) for block in blocks)):
        line = Text(no_wrap=True, end="")
        for block in blocks:
            cell = block[row].copy() if row < len(block) else Text()
            cell.truncate(column_width - COLUMN_GAP, overflow="ellipsis", pad=True)
            line.append_text(cell).append(" " * COLUMN_GAP)
        lines.append(_truncated(line, width))
    return lines


def _flow(groups: Sequence[Facts], width: int) -> list[Text]:
    """Return the groups one after the other, as many in a line as fit."""
    lines: list[Text] = []
    for group in groups:
        part = Text.assemble((group.title, STRONG), no_wrap=True, end="")
        if group.unknown is not None:
            part.append(f"  {printable(group.unknown)}", MUTED)
        else:
            for label, text in group.rows:
                part.append(f"  {label} ", MUTED)
                part.append_text(Text(UNKNOWN, MUTED) if text.style == MUTED else text)
        if lines and lines[-1].cell_len + len(GROUP_GAP) + part.cell_len <= width:
            lines[-1].append(GROUP_GAP).append_text(part)
        else:
            lines.append(part)
    return [_truncated(line, width) for line in lines]


def _truncated(line: Text, width: int) -> Text:
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


def instance_lines(gpu: Gpu, width: int) -> list[Text]:
    """Return a line for each MIG instance: its number, name, memory, activity and UUID."""
    names = [instance_name(instance) for instance in gpu.instances]
    name_width = max((len(name) for name in names), default=0)
    memory = [f"{_gib(instance.memory_used)}/{_gib(instance.memory_total)} GiB" for instance in gpu.instances]
    memory_width = max((len(text) for text in memory), default=0)
    return [
        _truncated(
            Text.assemble(
                f"{gpu.index}:{instance.gpu_instance}".rjust(5),
                f"  {name:<{name_width}}",
                f"  {used:>{memory_width}}",
                f"  SM {_percent_text(instance.sm_active):>4}  tensor {_percent_text(instance.tensor_active):>4}",
                (f"  {printable(instance.uuid)}", MUTED),
                no_wrap=True,
                end="",
            ),
            width,
        )
        for name, used, instance in zip(names, memory, gpu.instances, strict=True)
    ]


def _percent_text(reading: Reading[float]) -> str:
    return UNKNOWN if reading.value is None else f"{reading.value:.0f}%"


def _gib(reading: Reading[int]) -> str:
    return UNKNOWN if reading.value is None else f"{reading.value / GIB:.1f}"


@dataclass(frozen=True)
class Graph:
    """A graph of the past of one reading.

    `reading` is its name in `UNITS`, `metric` in `LOAD_METRICS`, and `unit` the unit of the metric. `text_of` returns
    the current value with its unit, `limit_of` the label of the full height.
    """

    title: str
    reading: str
    metric: str
    text_of: Callable[[Gpu], str]
    limit_of: Callable[[Gpu], str]
    unit: str = "%"

    def summary(self, values: Sequence[float | None]) -> str:
        """Return mean and maximum of the values that are shown."""
        known = [value for value in values if value is not None]
        return f"mean {sum(known) / len(known):.0f}{self.unit}  max {max(known):.0f}{self.unit}" if known else ""


def _percent(name: str) -> Callable[[Gpu], str]:
    return lambda gpu: UNKNOWN if gpu.value(name) is None else f"{gpu.value(name):.0f}%"


def _ratio(used: str, limit: str, scale: float, unit: str, digits: int = 0) -> Callable[[Gpu], str]:
    def make_text(gpu: Gpu) -> str:
        values = [gpu.value(name) for name in (used, limit)]
        return "/".join(UNKNOWN if value is None else f"{value / scale:.{digits}f}" for value in values) + f" {unit}"

    return make_text


def _limit(name: str, scale: float) -> Callable[[Gpu], str]:
    return lambda gpu: "" if gpu.value(name) is None else f"{gpu.value(name) / scale:.0f}"


def _full_percent(gpu: Gpu) -> str:
    return "100"


GRAPHS = (
    Graph("util", "util", "util", _percent("util"), _full_percent),
    Graph(
        "memory",
        "memory_used",
        "memory",
        _ratio("memory_used", "memory_total", GIB, "GiB", 1),
        _limit("memory_total", GIB),
    ),
    Graph("power", "power", "power", _ratio("power", "power_limit", 1, "W"), _limit("power_limit", 1)),
    Graph("SM", "sm_active", "sm_active", _percent("sm_active"), _full_percent),
    Graph("tensor cores", "tensor_active", "tensor_active", _percent("tensor_active"), _full_percent),
    Graph(
        "temperature",
        "temperature",
        "temperature",
        lambda gpu: UNKNOWN if gpu.value("temperature") is None else f"{gpu.value('temperature')}°C",
        _full_percent,
        unit="°C",
    ),
)


@dataclass(frozen=True)
class Plot:
    """Size of a graph with its labels: `columns` and `rows` of Braille, `label_width` left of them, an axis below."""

    columns: int
    rows: int
    label_width: int
    has_axis: bool

    @classmethod
    def fit(cls, width: int, height: int) -> Plot:
        """Return the largest plot in a panel of this size."""
        label_width = 5 if width >= MIN_LABELED_COLUMNS and height >= MIN_LABELED_ROWS else 0
        has_axis = height >= 2
        return cls(max(width - label_width, 1), max(height - has_axis, 1), label_width, has_axis)

    @property
    def values(self) -> int:
        """Number of values that the plot shows."""
        return 2 * self.columns

    def lines(self, values: Sequence[float | None], seconds: float, limit: str) -> list[Text]:
        """Return the graph of `values` (percent of the limit), and a time axis of `seconds` that ends now."""
        graph = list(history_graph(values, self.rows))
        if self.label_width:
            labels = {0: f"{limit:>3.3} ┤", self.rows - 1: "  0 ┤"}
            graph = [
                Text.assemble((labels.get(row, "    │"), MUTED), line, no_wrap=True, end="")
                for row, line in enumerate(graph)
            ]
        if self.has_axis:
            graph.append(Text.assemble(" " * self.label_width, time_axis(seconds, self.columns), no_wrap=True, end=""))
        return graph
