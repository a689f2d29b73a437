"""Records about single ranks and GPUs that journal events contain.

`engine.runs.events` holds lists of them; `engine.runs.journal` writes each as a JSON object and reads it back with
`from_objects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Larger numbers can only come from a damaged journal, and would overflow later computations.
LARGEST = 2**63

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class RankDevice:
    """Process of one rank, and one of its devices, whose UUID the rank has verified."""

    rank: int
    """Rank, counted from 0 over all nodes."""
    host: str
    """Host name of the rank's node."""
    pid: int
    """Process ID on that host, in the rank's PID namespace."""
    device: str
    """UUID of the GPU or MIG instance, or "cpu"."""
    name: str = ""
    """Product name of the GPU, such as NVIDIA H200; "" on the CPU and in old journals."""
    index: int | None = None
    """Index of the GPU on its host in PCI bus order; null on the CPU and in old journals."""

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[RankDevice]:
        """Return the records of a journal line; incomplete ones are skipped."""
        records = []
        for values in objects:
            match values:
                case {"rank": int(rank), "host": str(host), "pid": int(pid), "device": str(device)}:
                    name, index = values.get("name"), values.get("index")
                    name = name if isinstance(name, str) else ""
                    records.append(cls(rank, host, pid, device, name, index if isinstance(index, int) else None))
        return records


@dataclass(frozen=True)
class RankPeakMemory:
    """Peak GPU memory of one rank in an epoch, as `torch.cuda.max_memory_allocated` and `max_memory_reserved` define
    it."""

    rank: int
    """Rank, counted from 0 over all nodes."""
    allocated: int
    """Peak memory of tensors, in bytes."""
    reserved: int
    """Peak memory that torch's caching allocator holds, in bytes."""

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[RankPeakMemory]:
        """Return the records of a journal line; incomplete ones are skipped."""
        records = []
        for values in objects:
            match values:
                case {"rank": int(rank), "allocated": int(allocated), "reserved": int(reserved)}:
                    records.append(cls(rank, allocated, reserved))
        return records


@dataclass(frozen=True)
class RankEpochTiming:
    """Time that one rank spent training in an epoch, evaluation excluded."""

    rank: int
    """Rank, counted from 0 over all nodes."""
    seconds: float
    """Total training time of the epoch, in seconds."""
    waited: float
    """Time spent waiting for data, in seconds."""
    forward: float
    """Time spent in forward passes, in seconds."""

    @property
    def local_seconds(self) -> float:
        """Seconds without collectives, in which the rank depends on no other rank."""
        return self.waited + self.forward

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[RankEpochTiming]:
        """Return the records of a journal line; none if one is incomplete, because ranks are compared to each other."""
        records = []
        for values in objects:
            rank = values.get("rank")
            times = [number(values.get(name)) for name in ("seconds", "waited", "forward")]
            valid_times = [time for time in times if time is not None and time >= 0]
            if not isinstance(rank, int) or len(valid_times) < len(times):
                return []
            records.append(cls(rank, *valid_times))
        return records


@dataclass(frozen=True)
class GpuSample:
    """NVML readings of one GPU at one moment. A reading that the driver did not provide is None (null in JSON)."""

    uuid: str | None
    """UUID of the GPU or MIG instance."""
    host: str = ""
    """Host name of the GPU's node; "" in old journals."""
    state: str | None = None
    """State of the readings: ok, stale or lost."""
    busy: float | None = None
    """GPU utilization in percent: share of the time in which any kernel ran."""
    sm_active: float | None = None
    """SM activity in percent (GPM)."""
    tensor_active: float | None = None
    """Tensor core activity in percent (GPM)."""
    memory_used: float | None = None
    """GPU memory in use, in bytes."""
    temperature: float | None = None
    """GPU temperature in degrees Celsius."""
    power: float | None = None
    """Power draw in watts."""
    sm_clock: float | None = None
    """Current SM clock in MHz."""
    max_sm_clock: float | None = None
    """Maximum SM clock in MHz."""
    throttle: list[str] | None = None
    """Throttle reasons, by the names in `engine.gpus.nvml`; empty at full clocks."""

    @property
    def throttle_reasons(self) -> list[str]:
        """Throttle reasons other than idleness."""
        return [word for word in self.throttle or [] if word != "idle"]

    @classmethod
    def from_objects(cls, objects: Iterable[JsonObject]) -> list[GpuSample]:
        """Return the records of a journal line; a missing value or one of another type becomes None."""
        return [cls._from_object(values) for values in objects]

    @classmethod
    def _from_object(cls, values: JsonObject) -> GpuSample:
        uuid, host, state, throttle = (values.get(name) for name in ("uuid", "host", "state", "throttle"))
        return cls(
            uuid=uuid if isinstance(uuid, str) else None,
            host=host if isinstance(host, str) else "",
            state=state if isinstance(state, str) else None,
            busy=number(values.get("busy")),
            sm_active=number(values.get("sm_active")),
            tensor_active=number(values.get("tensor_active")),
            memory_used=number(values.get("memory_used")),
            temperature=number(values.get("temperature")),
            power=number(values.get("power")),
            sm_clock=number(values.get("sm_clock")),
            max_sm_clock=number(values.get("max_sm_clock")),
            throttle=[str(word) for word in throttle] if isinstance(throttle, list) else None,
        )


def number(value: object) -> float | None:
    """Return the value if it is a number within +-`LARGEST`, else None."""
    return value if isinstance(value, int | float) and -LARGEST < value < LARGEST else None
