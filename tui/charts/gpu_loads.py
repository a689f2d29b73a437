"""The past load of all GPUs. `tui.pollers.host.GpuPoller` records it, so that every screen shows the past at once."""

from __future__ import annotations

from typing import cast

from engine.gpus.snapshot import Gpu, Snapshot
from engine.show.readings import READINGS
from tui.charts.history import LoadHistory

LOAD_READINGS = ("util", "memory_used", "power", "sm_active", "tensor_active", "temperature")
"""Keys of the readings whose past is recorded."""


def load_of(gpu: Gpu, key: str) -> float | None:
    """Return a reading in percent of its limit; the temperature, which has none, in °C. None if it is unknown."""
    reading, value = READINGS[key], gpu.value(key)
    if reading.limit is None:
        return cast("float | None", value)
    share = reading.share(value, gpu.value(reading.limit))
    return None if share is None else 100 * share


class GpuLoads:
    """Histories of `LOAD_READINGS` and the last answer of each GPU, by its UUID."""

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
                histories = self._histories[gpu.uuid] = {key: LoadHistory() for key in LOAD_READINGS}
            for key, history in histories.items():
                history.add(snapshot.time, load_of(gpu, key))
            if gpu.state == "ok":
                self._last_answers[gpu.uuid] = gpu

    def columns(self, uuid: str | None, key: str, seconds: float, count: int, now: float) -> list[float | None]:
        """Return `count` means of a reading over the last `seconds` before `now` (Unix seconds); None for no data."""
        histories = self._histories.get(uuid or "")
        return [None] * count if histories is None else histories[key].columns(seconds, count, now)

    def last_answer(self, gpu: Gpu) -> Gpu | None:
        """Return the GPU with the readings of its last answer; None if it never answered."""
        return gpu if gpu.state == "ok" else self._last_answers.get(gpu.uuid or "")
