"""The readings of a GPU: key, label, unit, what NVML means by it, and the limits from which it is a warning or bad.

Every screen, `gputrain gpus` and the report take labels, digits and limits from `READINGS`. The keys are those of
`engine.gpus.snapshot.Gpu`, of the samples in journals and of their statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.base.units import UNKNOWN, format_byte_rate, format_bytes, format_count, format_gib


class Level(Enum):
    """How a value is to be judged."""

    NORMAL = ""
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class GpuReading:
    """One reading. `limit` is the key of the reading that bounds it, such as the power limit.

    `warning` and `bad` are the least values of these levels: shares of the limit if there is one, else values.
    """

    key: str
    label: str
    unit: str
    meaning: str
    number: Callable[[Any], str] = lambda value: f"{value:.0f}"
    """Formats a value without its unit."""
    limit: str | None = None
    warning: float | None = None
    bad: float | None = None

    def value_text(self, value: Any) -> str:
        """Return a value without its unit, for a column that names the unit."""
        return UNKNOWN if value is None else self.number(value)

    def text(self, value: Any) -> str:
        """Return a value with its unit; a blank separates units of letters."""
        return UNKNOWN if value is None else f"{self.number(value)}{self.spaced_unit}"

    def ratio_text(self, value: Any, limit: Any) -> str:
        """Return a value and its limit without their unit: `12.3/79.6`."""
        return f"{self.value_text(value)}/{self.value_text(limit)}"

    def cell_text(self, value: Any, limit: Any = None) -> str:
        """Return a value, and its limit if there is one, for a column with `title`: `87%`, `12.3/79.6`."""
        if self.limit is not None:
            return self.ratio_text(value, limit)
        return self.value_text(value) if self.has_unit_in_title else self.text(value)

    def full_text(self, value: Any, limit: Any = None) -> str:
        """Return a value, and its limit if there is one, with the unit: `12.3/79.6 GiB`."""
        return self.text(value) if self.limit is None else f"{self.ratio_text(value, limit)}{self.spaced_unit}"

    def share(self, value: Any, limit: Any = None) -> float | None:
        """Return a value as a share of its limit, a percentage as one of 100; None if unknown."""
        whole = 100 if self.limit is None else limit
        return None if value is None or not whole else value / whole

    @property
    def spaced_unit(self) -> str:
        """The unit as it follows a number."""
        return f" {self.unit}" if self.has_unit_in_title else self.unit

    @property
    def has_unit_in_title(self) -> bool:
        """Whether a column names the unit once, in its title. Signs such as % follow each number."""
        return self.unit[:1].isalpha()

    @property
    def title(self) -> str:
        """Heading of a column."""
        return f"{self.label} {self.unit}" if self.has_unit_in_title else self.label

    def level(self, value: Any, limit: Any = None) -> Level:
        """Return how a value is to be judged; an unknown one is normal."""
        if value is None or (self.limit is not None and not limit):
            return Level.NORMAL
        measured = value / limit if self.limit is not None else value
        if self.bad is not None and measured >= self.bad:
            return Level.BAD
        return Level.WARNING if self.warning is not None and measured >= self.warning else Level.NORMAL


def _rows() -> tuple[GpuReading, ...]:
    # Meanings are paraphrased from https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html and
    # https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmEnums.html
    return (
        GpuReading("util", "util", "%", "share of the last 1/6 to 1 s in which at least one kernel ran"),
        GpuReading("memory_util", "memory util", "%", "share of the same time in which GPU memory was read or written"),
        GpuReading("sm_active", "SM", "%", "share of the SMs that were busy"),
        GpuReading("tensor_active", "tensor", "%", "share of the time in which the tensor cores worked"),
        GpuReading("dram_active", "DRAM", "%", "share of the memory bandwidth in use"),
        GpuReading("memory_used", "memory", "GiB", "allocated GPU memory, without what the driver reserves",
                   format_gib, "memory_total", 0.8, 0.95),
        GpuReading("memory_total", "memory total", "GiB", "physical GPU memory", format_gib),
        GpuReading("memory_reserved", "reserved", "GiB", "GPU memory that driver and firmware reserve", format_gib),
        GpuReading("temperature", "temp", "°C", "temperature of the GPU", warning=75, bad=85),
        GpuReading("memory_temperature", "memory temp", "°C", "temperature of the GPU memory", warning=75, bad=85),
        GpuReading("power", "power", "W", "power draw of the GPU and its memory", limit="power_limit", warning=0.97),
        GpuReading("power_limit", "power limit", "W", "lowest power limit in force"),
        GpuReading("sm_clock", "SM clock", "MHz", "current clock of the SMs", limit="max_sm_clock"),
        GpuReading("max_sm_clock", "max SM clock", "MHz", "highest possible clock of the SMs"),
        GpuReading("memory_clock", "memory clock", "MHz", "current clock of the memory", limit="max_memory_clock"),
        GpuReading("max_memory_clock", "max memory clock", "MHz", "highest possible clock of the memory"),
        GpuReading("fan", "fan", "%", "intended fan speed; not measured"),
        GpuReading("performance_state", "state", "", "P0 (highest performance) to P15", str),
        GpuReading("throttle", "slowed by", "", "what lowers the clocks", ", ".join),
        GpuReading("ecc_corrected", "ECC corrected", "", "corrected memory errors since the driver was loaded",
                   format_count, warning=1),
        GpuReading("ecc_uncorrected", "ECC uncorrected", "", "uncorrected memory errors since the driver was loaded",
                   format_count, warning=1, bad=1),
        GpuReading("pcie_replays", "PCIe replays", "", "PCIe packets that were sent again", format_count, warning=1),
        GpuReading("pcie_sent", "PCIe sent", "", "PCIe throughput from the GPU", _kilobyte_rate),
        GpuReading("pcie_received", "PCIe received", "", "PCIe throughput to the GPU", _kilobyte_rate),
        GpuReading("nvlinks", "NVLinks", "", "active NVLinks", format_count),
        GpuReading("nvlink_sent", "NVLink sent", "", "throughput of all NVLinks from the GPU", _kilobyte_rate),
        GpuReading("nvlink_received", "NVLink received", "", "throughput of all NVLinks to the GPU", _kilobyte_rate),
        GpuReading("gpu_memory", "GPU memory", "", "GPU memory of a process", _gib),
        GpuReading("memory", "host memory", "", "resident memory of a process on the host", format_bytes),
        GpuReading("cpu", "CPU", "%", "CPU time of a process, in percent of one core"),
    )  # fmt: skip


def _gib(size: float) -> str:
    """Format GPU memory in the digits of `memory_used`, so that the same memory is the same number everywhere."""
    return f"{format_gib(size)} GiB"


def _kilobyte_rate(kilobytes_per_s: float) -> str:
    """Format a rate that NVML has in units of 1000 bytes per second."""
    return format_byte_rate(1000 * kilobytes_per_s)


READINGS: dict[str, GpuReading] = {reading.key: reading for reading in _rows()}
