"""The readings of one GPU in groups, what throttles it, and its MIG instances, for the GPU screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from engine.base.text import printable
from engine.base.units import UNKNOWN
from engine.gpus.snapshot import Gpu, MigInstance
from engine.report.readings import READINGS
from engine.report.table import GAP, Align, Column, fit
from tui.screens.phrases import instance_name, pcie_link
from tui.screens.tables import styled
from tui.screens.tables.gpus import LEVEL_STYLES
from tui.terminal.palette import MUTED, STRONG, WARNING

GROUP_GAP = "    "
LINK = "pcie_width"
"""Stands for generation and width of the PCIe link."""
GROUPS: Mapping[str, Sequence[str]] = {
    "clock": ("sm_clock", "memory_clock", "performance_state"),
    "cooling": ("temperature", "memory_temperature", "fan"),
    "memory": ("memory_reserved", "memory_util", "dram_active"),
    "PCIe": (LINK, "pcie_sent", "pcie_received"),
    "NVLink": ("nvlinks", "nvlink_sent", "nvlink_received"),
    "errors": ("ecc_corrected", "ecc_uncorrected", "pcie_replays"),
}
"""The readings that the graphs of the screen do not show, by the title of their group."""
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

Fact = tuple[str, Text]
"""A label and its value, in `MUTED` if that is the reason why it is unknown."""


def reading_lines(gpu: Gpu, width: int) -> list[Text]:
    """Return all readings of a GPU that its graphs do not show, and a line per throttle reason."""
    groups = {title: [_fact(gpu, title, key) for key in keys] for title, keys in GROUPS.items()}
    return _flow(groups, width) + [_truncated(line, width) for line in throttle_lines(gpu)]


def throttle_lines(gpu: Gpu) -> list[Text]:
    """Return a line for each throttle reason with its meaning."""
    reading, label = gpu["throttle"], (f"{READINGS['throttle'].label}{GAP}", MUTED)
    if reading.value is None:
        return [Text.assemble(label, (printable(reading.reason or UNKNOWN), MUTED))]
    if not reading.value:
        return [Text.assemble(label, "nothing")]
    return [
        Text.assemble(
            label,
            (printable(name), MUTED if name == "idle" else WARNING),
            (f": {THROTTLE_MEANINGS[name]}" if name in THROTTLE_MEANINGS else "", MUTED if name == "idle" else ""),
        )
        for name in reading.value
    ]


def _fact(gpu: Gpu, group: str, key: str) -> Fact:
    """Return a reading with its label, which does not repeat the title of its group."""
    if key == LINK:
        unknown = next((gpu[name] for name in (key, "pcie_generation") if gpu.value(name) is None), None)
        return "link", Text(_link(gpu)) if unknown is None else Text(printable(unknown.reason or UNKNOWN), MUTED)
    reading, value = READINGS[key], gpu.value(key)
    label = reading.label.removeprefix(f"{group} ").removesuffix(f" {group}")
    if value is None:
        return label, Text(printable(gpu[key].reason or UNKNOWN), MUTED)
    limit = None if reading.limit is None else gpu.value(reading.limit)
    text = reading.text(value) if limit is None else reading.full_text(value, limit)
    return label, Text(text, LEVEL_STYLES[reading.level(value, limit)])


def _link(gpu: Gpu) -> str:
    current = (gpu.value("pcie_generation"), gpu.value("pcie_width"))
    limit = (gpu.value("max_pcie_generation"), gpu.value("max_pcie_width"))
    return pcie_link(gpu) + ("" if limit == current or None in limit else f" of {limit[0]}.0 x{limit[1]}")


def _common_reason(facts: Sequence[Fact]) -> Text | None:
    """Return why all facts of a group are unknown; None if they are not, or for different reasons."""
    first = facts[0][1]
    return first if first.style == MUTED and all(text == first and text.style == MUTED for _, text in facts) else None


def _flow(groups: Mapping[str, Sequence[Fact]], width: int) -> list[Text]:
    """Return the groups one after the other, as many in a line as fit."""
    lines: list[Text] = []
    for title, facts in groups.items():
        part = Text.assemble((title, STRONG), no_wrap=True, end="")
        if (reason := _common_reason(facts)) is not None:
            part.append(GAP).append_text(reason)
        else:
            for label, text in facts:
                part.append(f"{GAP}{label} ", MUTED)
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
    """Return a header, and a line for each MIG instance: its number, name, memory, activity and UUID."""

    def reading(key: str) -> Column[MigInstance]:
        def cell(instance: MigInstance) -> str:
            limit = READINGS[key].limit
            bound = None if limit is None else getattr(instance, limit).value
            return READINGS[key].cell_text(getattr(instance, key).value, bound)

        return Column(key, READINGS[key].title, cell, Align.RIGHT, priority=2)

    columns = [
        Column[MigInstance]("gpu", "GPU", lambda instance: f"{gpu.index}:{instance.gpu_instance}", Align.RIGHT, 5,
                            priority=3),
        Column[MigInstance]("name", "name", instance_name, priority=3),
        *map(reading, ("memory_used", "sm_active", "tensor_active")),
        Column[MigInstance]("uuid", "UUID", lambda instance: instance.uuid, style=MUTED, flex=True, width=8),
    ]  # fmt: skip
    table = fit(columns, gpu.instances, width)
    return [styled(line) for line in (table.header(MUTED), *map(table.line, gpu.instances))]
