"""Compare the monitor's readings with those of nvidia-smi, which samples the same GPU at the same time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Twin:
    """A reading of `gputrain gpus --json`, and the column of `nvidia-smi dmon` that means the same.

    `unit` is one unit of the column in ours. Two values agree within `relative` of the column's or `absolute` in its
    unit: the two programs sample at different moments.
    """

    reading: str
    column: str
    unit: float = 1.0
    relative: float = 0.05
    absolute: float = 2.0


# dmon counts memory in MiB and PCIe in MiB/s.
TWINS = (
    Twin("power", "pwr", relative=0.1, absolute=10),
    Twin("temperature", "gtemp"),
    Twin("memory_temperature", "mtemp"),
    Twin("util", "sm", absolute=5),
    Twin("memory_util", "mem", relative=0.2, absolute=5),
    Twin("sm_clock", "pclk", absolute=30),
    Twin("memory_clock", "mclk", absolute=1),
    Twin("memory_used", "fb", unit=2**20, relative=0.01, absolute=64),
    Twin("pcie_received", "rxpci", unit=1024, relative=0.3, absolute=200),
    Twin("pcie_sent", "txpci", unit=1024, relative=0.3, absolute=200),
)
# Columns that `--gpm-metrics=2,5,10` adds behind all others: NVML's metrics of SMs, tensor cores and DRAM, in percent.
GPM_METRICS = {"2": "sm_active", "5": "tensor_active", "10": "dram_active"}
DMON = ("nvidia-smi", "dmon", "-i", "0", "-s", "pucmt")
GPM_OPTION = f"--gpm-metrics={','.join(GPM_METRICS)}"


def dmon_medians(output: str, with_gpm: bool) -> dict[str, float]:
    """Return the median of each column of `nvidia-smi dmon`; "-" is no value. GPM columns get the names of readings."""
    header: list[str] = []
    columns: dict[str, list[float]] = {}
    for line in output.splitlines():
        words = line.split()
        if words[:2] == ["#", "gpu"]:
            header = words[1:]
            if with_gpm:
                header[-len(GPM_METRICS) :] = GPM_METRICS.values()
        elif len(words) == len(header) and words[:1] == ["0"]:
            for name, word in zip(header, words, strict=True):
                if word.replace(".", "", 1).isdigit():
                    columns.setdefault(name, []).append(float(word))
    return {name: statistics.median(values) for name, values in columns.items()}


def reading_medians(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the medians of the numeric readings of the first GPU over samples of `gputrain gpus --watch --json`."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, reading in sample["gpus"][0].items():
            value = reading.get("value") if isinstance(reading, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, []).append(float(value))
    return {name: statistics.median(column) for name, column in values.items()}


def compare(readings: Mapping[str, float], dmon: Mapping[str, float]) -> list[tuple[str, str, bool]]:
    """Return name, both values and whether they agree, for each reading that has a column in dmon's output."""
    twins = (*TWINS, *(Twin(name, name, absolute=5) for name in GPM_METRICS.values()))
    rows = []
    for twin in twins:
        ours, theirs = readings.get(twin.reading), dmon.get(twin.column)
        if ours is None or theirs is None:
            # A reading that only one of the two knows is no difference of values, but must be seen.
            shown = (f"{'unknown' if value is None else f'{value:g}'}" for value in (ours, theirs))
            rows.append((twin.reading, "gputrain {}, nvidia-smi {}".format(*shown), (ours is None) == (theirs is None)))
            continue
        ours /= twin.unit
        agree = abs(ours - theirs) <= max(twin.absolute, twin.relative * theirs)
        rows.append((twin.reading, f"gputrain {ours:,.1f}, nvidia-smi {theirs:,.1f}", agree))
    return rows
