"""The past load of all GPUs. `tui.pollers.GpuPoller` records it, so that every screen shows the past at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.gpus.snapshot import Gpu, Snapshot
from tui.charts.history import LoadHistory


def share_percent(gpu: Gpu, used: str, limit: str) -> float | None:
    """Return one reading in percent of another; None if one of them is unknown."""
    used_value, limit_value = gpu.value(used), gpu.value(limit)
    return None if used_value is None or not limit_value else 100.0 * used_value / limit_value


# In percent, except for the temperature in °C.
LOAD_METRICS: Mapping[str, Callable[[Gpu], float | None]] = {
    "util": lambda gpu: gpu.value("util"),
    "sm_active": lambda gpu: gpu.value("sm_active"),
    "tensor_active": lambda gpu: gpu.value("tensor_active"),
    "memory": lambda gpu: share_percent(gpu, "memory_used", "memory_total"),
    "power": lambda gpu: share_percent(gpu, "power", "power_limit"),
    "temperature": lambda gpu: gpu.value("temperature"),
}


class GpuLoads:
    """Histories of `LOAD_METRICS` and the last answer of each GPU, by its UUID."""

    def __init__(self) -> None:
        self._histories: dict[str, dict[str, LoadHistory]] = {}
        self._last_answers: dict[str, Gpu] = {}
        self.start_time: float | None = None
        """Unix seconds of the first snapshot; None before it."""

    def record(self, snapshot: Snapshot) -> None:
        """Add the readings of a snapshot. A GPU that did not answer gets a gap."""
        if self.start_time is None:
            self.start_time = snapshot.time
        for gpu in snapshot.gpus:
            if gpu.uuid is None:
                continue
            histories = self._histories.get(gpu.uuid)
            if histories is None:
                histories = self._histories[gpu.uuid] = {metric: LoadHistory() for metric in LOAD_METRICS}
            for metric, value_of in LOAD_METRICS.items():
                histories[metric].add(snapshot.time, value_of(gpu))
            if gpu.state == "ok":
                self._last_answers[gpu.uuid] = gpu

    def columns(self, uuid: str | None, metric: str, seconds: float, count: int, now: float) -> list[float | None]:
        """Return `count` means of a metric over the last `seconds` before `now` (Unix seconds); None for no data."""
        histories = self._histories.get(uuid or "")
        return [None] * count if histories is None else histories[metric].columns(seconds, count, now)

    def last_answer(self, gpu: Gpu) -> Gpu | None:
        """Return the GPU with the readings of its last answer; None if it never answered."""
        return gpu if gpu.state == "ok" else self._last_answers.get(gpu.uuid or "")
