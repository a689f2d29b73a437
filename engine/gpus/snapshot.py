"""What is known of a host's GPUs at one moment: typed records, and the one JSON format in which the sampler tells them,
`gputrain gpus --json` prints them, and a recording keeps them.

A reading is a value with its unit and time, or the reason that there is none. Unknown is never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

SNAPSHOT_FORMAT = 1

T = TypeVar("T")
GpuState = Literal["ok", "stale", "lost"]

# Every reading of a GPU and its unit.
UNITS = {
    "name": "",
    "pci_bus_id": "",
    "busy": "%",
    "memory_busy": "%",
    "sm_active": "%",
    "tensor_active": "%",
    "dram_active": "%",
    "memory_used": "B",
    "memory_total": "B",
    "memory_reserved": "B",
    "temperature": "°C",
    "power": "W",
    "power_limit": "W",
    "sm_clock": "MHz",
    "memory_clock": "MHz",
    "max_sm_clock": "MHz",
    "max_memory_clock": "MHz",
    "fan": "%",
    "performance_state": "",
    "throttle": "",
    "ecc_corrected": "errors",
    "ecc_uncorrected": "errors",
    "pcie_generation": "",
    "pcie_width": "lanes",
    "pcie_sent": "KB/s",
    "pcie_received": "KB/s",
    "mig": "",
}
# What does not change with the load: still true of a GPU that does not answer.
STATIC_READINGS = {"name", "pci_bus_id", "max_sm_clock", "max_memory_clock"}


class Missing(StrEnum):
    """Reasons for which there is no value; others are the driver's own words."""

    LOST = "lost"
    NO_PERMISSION = "no permission"
    NOT_ASKED = "not asked for"
    NOT_SUPPORTED = "not supported"
    NOT_SUPPORTED_BY_DRIVER = "not supported by this driver"


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value, or None and the `reason`. `time` is when the driver was asked, in Unix seconds."""

    value: T | None
    time: float
    reason: str | None = None

    def to_dict(self, unit: str = "") -> dict[str, Any]:
        """The reading as JSON; the reason only where there is no value."""
        values: dict[str, Any] = {"value": self.value, "unit": unit, "time": round(self.time, 3)}
        return values if self.reason is None else values | {"reason": self.reason}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reading[T]:
        return cls(values["value"], values["time"], values.get("reason"))

    def without_value(self, reason: str) -> Reading[T]:
        """The same reading without its value."""
        return Reading(None, self.time, reason)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU. `pid` is the driver's, which in a container may be the host's; `run` and `rank` name a rank
    of one of our own runs; `instance` is the id of the MIG GPU instance. `memory` is the host's; both in bytes. `cpu`
    is in percent of one core."""

    pid: int
    kind: Literal["compute", "graphics"]
    instance: int | None
    user: Reading[str]
    command: Reading[str]
    gpu_memory: Reading[int]
    cpu: Reading[float]
    memory: Reading[int]
    run: str | None = None
    rank: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "kind": self.kind,
            "instance": self.instance,
            "run": self.run,
            "rank": self.rank,
            "user": self.user.to_dict(),
            "command": self.command.to_dict(),
            "gpu_memory": self.gpu_memory.to_dict("B"),
            "cpu": self.cpu.to_dict("%"),
            "memory": self.memory.to_dict("B"),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GpuProcess:
        read: dict[str, Any] = {
            key: Reading.from_dict(values[key]) for key in ("user", "command", "gpu_memory", "cpu", "memory")
        }
        plain = {key: values[key] for key in ("pid", "kind", "instance", "run", "rank")}
        return cls(**plain, **read)


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG instance: a part of a GPU that CUDA takes for a device. Ids are those of the GPU and compute instance."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    name: Reading[str]
    memory_used: Reading[int]
    memory_total: Reading[int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "gpu_instance": self.gpu_instance,
            "compute_instance": self.compute_instance,
            "name": self.name.to_dict(),
            "memory_used": self.memory_used.to_dict("B"),
            "memory_total": self.memory_total.to_dict("B"),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MigInstance:
        read: dict[str, Any] = {key: Reading.from_dict(values[key]) for key in ("name", "memory_used", "memory_total")}
        return cls(values["uuid"], values["gpu_instance"], values["compute_instance"], **read)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` is its place in PCI order; `uuid` is None where the driver does not even tell that. `time` is
    when it last answered, None where it never did; `age` are the seconds since then, or since it was first asked."""

    index: int
    uuid: str | None
    state: GpuState
    age: float
    time: float | None
    readings: Mapping[str, Reading[Any]]
    processes: Reading[tuple[GpuProcess, ...]]
    instances: tuple[MigInstance, ...] = ()
    runs: tuple[str, ...] = ()
    """Runs that have reserved this GPU."""

    def __getitem__(self, name: str) -> Reading[Any]:
        return self.readings[name]

    def value(self, name: str) -> Any:
        return self.readings[name].value

    @property
    def mig_enabled(self) -> bool:
        return bool(self.value("mig") == "on")

    def to_dict(self) -> dict[str, Any]:
        processes = self.processes.to_dict()
        if self.processes.value is not None:
            processes["value"] = [process.to_dict() for process in self.processes.value]
        return {
            "index": self.index,
            "uuid": self.uuid,
            "state": self.state,
            "age": round(self.age, 3),
            "time": None if self.time is None else round(self.time, 3),
            **{name: reading.to_dict(UNITS[name]) for name, reading in self.readings.items()},
            "instances": [instance.to_dict() for instance in self.instances],
            "processes": processes,
            "runs": list(self.runs),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Gpu:
        unknown = {"value": None, "time": values["time"] or 0.0, "reason": "not in this recording"}
        processes: Reading[tuple[GpuProcess, ...]] = Reading.from_dict(values["processes"])
        if processes.value is not None:
            listed = tuple(GpuProcess.from_dict(process) for process in values["processes"]["value"])
            processes = replace(processes, value=listed)
        return cls(
            index=values["index"],
            uuid=values["uuid"],
            state=values["state"],
            age=values["age"],
            time=values["time"],
            readings={name: Reading.from_dict(values.get(name, unknown)) for name in UNITS},
            processes=processes,
            instances=tuple(MigInstance.from_dict(instance) for instance in values["instances"]),
            runs=tuple(values["runs"]),
        )

    def with_age(self, age: float) -> Gpu:
        return replace(self, age=age)

    def as_stale(self, age: float) -> Gpu:
        """The GPU as one that has not answered for so long."""
        reason = f"stale: no answer for {age:.0f} s"
        kept = {
            name: value if name in STATIC_READINGS else value.without_value(reason)
            for name, value in self.readings.items()
        }
        instances = tuple(
            replace(
                one,
                memory_used=one.memory_used.without_value(reason),
                memory_total=one.memory_total.without_value(reason),
            )
            for one in self.instances
        )
        return replace(
            self,
            state="stale",
            age=age,
            readings=kept,
            processes=self.processes.without_value(reason),
            instances=instances,
        )


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Where a snapshot comes from: the driver, or a recording, which may be made up."""

    kind: Literal["driver", "recording"] = "driver"
    made_up: bool = False

    @property
    def notice(self) -> str | None:
        """What must be said wherever the snapshot is shown; None for the driver's own."""
        if self.kind == "driver":
            return None
        return "MADE UP: no such GPUs exist" if self.made_up else "a recording: not what the GPUs do now"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All GPUs of a host, in PCI order. `error` is one sentence where the driver cannot be asked at all."""

    time: float
    host: str
    driver: Reading[str]
    cuda: Reading[str]
    gpus: tuple[Gpu, ...]
    error: str | None = None
    source: SnapshotSource = field(default_factory=SnapshotSource)
    pending: bool = False
    """Not everything was asked once yet: the driver, or a GPU, is still to answer for the first time."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": SNAPSHOT_FORMAT,
            "time": round(self.time, 3),
            "host": self.host,
            "source": {"kind": self.source.kind, "made_up": self.source.made_up},
            "driver": self.driver.to_dict(),
            "cuda": self.cuda.to_dict(),
            "error": self.error,
            "pending": self.pending,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
        }

    def to_line(self) -> str:
        """One line of JSON, without the line's end."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> Snapshot:
        """Raises ValueError where the line is no snapshot of this format."""
        return cls.from_dict(json.loads(line))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Snapshot:
        """Raises ValueError where these are no snapshot's values."""
        try:
            if values["format"] != SNAPSHOT_FORMAT:
                raise ValueError(f"format {values['format']} is not known here, {SNAPSHOT_FORMAT} is")
            return cls(
                time=values["time"],
                host=values["host"],
                driver=Reading.from_dict(values["driver"]),
                cuda=Reading.from_dict(values["cuda"]),
                gpus=tuple(Gpu.from_dict(gpu) for gpu in values["gpus"]),
                error=values["error"],
                source=SnapshotSource(values["source"]["kind"], bool(values["source"]["made_up"])),
                pending=bool(values.get("pending")),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not a snapshot of GPUs") from error

    def as_of(self, now: float, stale_after_s: float) -> Snapshot:
        """The snapshot as it looks `now` (Unix seconds); GPUs older than `stale_after_s` seconds are stale."""
        since = max(now - self.time, 0.0)
        gpus = tuple(
            gpu.as_stale(gpu.age + since) if gpu.age + since > stale_after_s else gpu.with_age(gpu.age + since)
            for gpu in self.gpus
        )
        return replace(self, gpus=gpus)


MIN_PERIOD_SECONDS = 0.25
MIN_STALE_AFTER_SECONDS = 2.0


@dataclass
class SamplerOptions:
    """What is to be asked, and how often in seconds. `gpus` are UUIDs; None means all."""

    period: float = 1.0
    activity: bool = True
    links: bool = False
    processes: bool = True
    gpus: list[str] | None = None

    @property
    def stale_after_s(self) -> float:
        """Seconds after which a GPU that has not answered is stale."""
        return max(MIN_STALE_AFTER_SECONDS, 2.5 * self.period)

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> SamplerOptions:
        known = {part.name for part in fields(cls)}
        return cls(**{key: value for key, value in json.loads(line).items() if key in known})
