"""Records about single ranks, GPUs and diagnoses that journal events and the record of a run contain."""

from __future__ import annotations

from enum import StrEnum

from engine.base.codec import Count, Finite, Integer, Number, Record, Seconds


class RankDevice(Record, frozen=True, omit_defaults=True):
    """Process of one rank, and one of its devices, whose UUID the rank has verified."""

    rank: Count
    """Rank, counted from 0 over all nodes."""
    host: str
    """Host name of the rank's node."""
    pid: Count
    """Process ID on that host, in the rank's PID namespace."""
    device: str
    """UUID of the GPU or MIG instance, or "cpu"."""
    name: str = ""
    """Product name of the GPU, such as NVIDIA H200; absent on the CPU."""
    index: Count | None = None
    """Index of the GPU on its host in PCI bus order; absent on the CPU."""


class RankEpochTiming(Record, frozen=True):
    """Time that one rank spent training in an epoch, evaluation excluded."""

    rank: Integer
    """Rank, counted from 0 over all nodes."""
    seconds: Seconds
    """Total training time of the epoch, in seconds."""
    data_wait_seconds: Seconds
    """Time spent waiting for data, in seconds."""
    forward_seconds: Seconds
    """Time spent in forward passes, in seconds."""

    @property
    def local_seconds(self) -> float:
        """Seconds without collectives, in which the rank depends on no other rank."""
        return self.data_wait_seconds + self.forward_seconds


class Scores(Record, frozen=True, kw_only=True):
    """Results of one evaluation. A value that is not finite is None."""

    loss: Finite | None
    accuracy: Finite | None
    top5: Finite | None
    metrics: dict[str, Finite | None]

    def value(self, name: str) -> float | None:
        """Return the score that `run.monitor` calls so; None if it is unknown or not finite."""
        named = {"loss": self.loss, "accuracy": self.accuracy, "top5": self.top5}
        return named[name] if name in named else self.metrics.get(name)


class GpuSample(Record, frozen=True, omit_defaults=True):
    """NVML readings of one GPU at one moment. A reading that the driver did not provide is None, absent in JSON."""

    uuid: str | None = None
    """UUID of the GPU or MIG instance."""
    host: str = ""
    """Host name of the GPU's node."""
    state: str | None = None
    """State of the readings: ok, stale or lost."""
    util: Number | None = None
    """GPU utilization in percent: share of the time in which any kernel ran."""
    sm_active: Number | None = None
    """SM activity in percent (GPM)."""
    tensor_active: Number | None = None
    """Tensor core activity in percent (GPM)."""
    memory_used: Number | None = None
    """GPU memory in use, in bytes."""
    temperature: Number | None = None
    """GPU temperature in degrees Celsius."""
    power: Number | None = None
    """Power draw in watts."""
    sm_clock: Number | None = None
    """Current SM clock in MHz."""
    max_sm_clock: Number | None = None
    """Maximum SM clock in MHz."""
    throttle: list[str] | None = None
    """Throttle reasons, by the names in `engine.gpus.nvml`; empty at full clocks."""

    @property
    def throttle_reasons(self) -> list[str]:
        """Throttle reasons other than idleness."""
        return [word for word in self.throttle or [] if word != "idle"]


class BottleneckKind(StrEnum):
    """What limits a run. The values are part of the `summary.json` format."""

    DATA = "waiting for data"
    STRAGGLER = "waiting for a slow rank"
    THROTTLED = "slowed down"
    COMPUTE = "compute-bound"
    # Records of earlier versions have it.
    SMALL_STEPS = "too little work a step"


class Bottleneck(Record, frozen=True):
    """Diagnosis of a run: the kind, and one sentence with the advice."""

    kind: BottleneckKind
    message: str


class CodeSummary(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The code of a run in short, see `engine.jobs.code`."""

    commit: str
    """The commit that was checked out when the run was made; "" before the first commit."""
    is_dirty: bool
    """Whether files of code had changed since the commit, or were not tracked."""
    fingerprint: str
    """A digest that is equal for the same commit, changes, untracked files of code and submodules."""
    snapshot: bool = False
    """Whether the run uses a copy of the code."""
    changed: str = ""
    """How the code at the latest start differs from it, as a clause; "" if it does not."""
