"""Statistics of one GPU over a run, which `engine.runs.history` keeps for each GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.runs.bottleneck import GpuThrottling, update_throttling
from engine.runs.records import GpuSample, GpuSummary

# Readings whose mean is in a summary. Memory and temperature are there with their maximum.
MEAN_READINGS = ("util", "sm_active", "tensor_active", "power")


@dataclass
class GpuStats:
    """Statistics of one GPU over all its samples: means, maxima, throttle reasons, and the ongoing throttling."""

    host: str
    totals: dict[str, list[float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    throttle_reasons: set[str] = field(default_factory=set)
    throttling: GpuThrottling | None = None

    def add(self, sample: GpuSample, time: float) -> None:
        """Add a sample taken at `time`, in Unix seconds."""
        for name in MEAN_READINGS:
            if (value := getattr(sample, name)) is not None:
                total = self.totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += 1
        for name in ("memory_used", "temperature"):
            if (value := getattr(sample, name)) is not None:
                self.maxima[name] = max(self.maxima.get(name, 0.0), value)
        self.throttle_reasons |= set(sample.throttle_reasons)
        self.throttling = update_throttling(sample, time, self.throttling)

    def mean(self, name: str) -> float | None:
        """Return the mean of a reading; None if the GPU never provided it."""
        total = self.totals.get(name)
        return None if total is None else round(total[0] / total[1], 1)

    def summary(self, uuid: str) -> GpuSummary:
        """Return the entry of `summary.json`."""
        means = {name: mean for name in MEAN_READINGS if (mean := self.mean(name)) is not None}
        maxima = {f"max_{name}": value for name, value in self.maxima.items()}
        return GpuSummary(uuid=uuid, host=self.host, throttled=sorted(self.throttle_reasons), **means, **maxima)
