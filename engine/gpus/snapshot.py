"""Snapshot of a host's GPUs: typed records and their JSON format.

`sampler` prints this format, `monitor` parses it, `gputrain gpus --json` prints it to users, and recordings store it.

A reading is a value with its unit and time, or the reason there is none. An unknown value is never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from engine.gpus.readings import STATIC_READINGS, UNITS

SNAPSHOT_FORMAT = 1

T = TypeVar("T")
GpuState = Literal["ok", "stale", "lost"]


class Missing(StrEnum):
    """Fixed reasons for a missing value. Other reasons are NVML error messages, or contain details such as an age."""

    LOST = "lost"
    NO_PERMISSION = "no permission"
    NOT_REQUESTED = "not requested"
    NOT_SUPPORTED = "not supported"
    NOT_SUPPORTED_BY_DRIVER = "not supported by this driver"


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value, or None and the `reason`. `time` is the time of the query in Unix seconds."""

    value: T | None
    time: float
    reason: str | None = None

    def to_dict(self, unit: str = "") -> dict[str, Any]:
        """Return the reading as JSON, with ``reason`` only if there is no value."""
        values: dict[str, Any] = {"value": self.value, "unit": unit, "time": round(self.time, 3)}
        return values if self.reason is None else values | {"reason": self.reason}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reading[T]:
        return cls(values["value"], values["time"], values.get("reason"))

    def without_value(self, reason: str) -> Reading[T]:
        """Return a copy with the value replaced by `reason`."""
        return Reading(None, self.time, reason)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU, as `nvidia-smi --query-compute-apps` lists it, with its host metrics.

    `pid` is NVML's, which inside a container may be the PID on the host. `instance` is the MIG GPU instance ID,
    `compute_instance` that of the compute instance within it. An MPS server computes only for its clients, which are
    listed themselves.
    `gpu_memory` and `memory` (resident set size in host memory) are in bytes, `cpu` is in percent of one core.
    `run` and `rank` are set if the process is a rank of a gputrain run.
    """

    pid: int
    kind: Literal["compute", "graphics", "mps server"]
    instance: int | None
    user: Reading[str]
    command: Reading[str]
    gpu_memory: Reading[int]
    cpu: Reading[float]
    memory: Reading[int]
    run: str | None = None
    rank: int | None = None
    compute_instance: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "kind": self.kind,
            "instance": self.instance,
            "compute_instance": self.compute_instance,
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
        readings: dict[str, Any] = {
            key: Reading.from_dict(values[key]) for key in ("user", "command", "gpu_memory", "cpu", "memory")
        }
        scalars = {key: values[key] for key in ("pid", "kind", "instance", "run", "rank")}
        return cls(**scalars, **readings, compute_instance=values.get("compute_instance"))


ACTIVITY_READINGS = ("sm_active", "tensor_active", "dram_active")
INSTANCE_READINGS = ("memory_used", "memory_total", *ACTIVITY_READINGS)


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG device: a compute instance within a GPU instance, which CUDA exposes as a device of its own.

    Its memory and activity are those of the GPU instance, in the units of `UNITS`.
    """

    uuid: str
    gpu_instance: int
    compute_instance: int
    name: Reading[str]
    memory_used: Reading[int]
    memory_total: Reading[int]
    sm_active: Reading[float] = field(default_factory=lambda: Reading(None, 0.0, Missing.NOT_REQUESTED))
    tensor_active: Reading[float] = field(default_factory=lambda: Reading(None, 0.0, Missing.NOT_REQUESTED))
    dram_active: Reading[float] = field(default_factory=lambda: Reading(None, 0.0, Missing.NOT_REQUESTED))

    def to_dict(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "gpu_instance": self.gpu_instance,
            "compute_instance": self.compute_instance,
            "name": self.name.to_dict(),
            **{name: getattr(self, name).to_dict(UNITS[name]) for name in INSTANCE_READINGS},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MigInstance:
        # Old recordings have no activity.
        recorded = [name for name in ("name", *INSTANCE_READINGS) if name in values]
        readings: dict[str, Any] = {name: Reading.from_dict(values[name]) for name in recorded}
        return cls(values["uuid"], values["gpu_instance"], values["compute_instance"], **readings)

    def with_activity(self, readings: Mapping[str, Reading[Any]]) -> MigInstance:
        """Return a copy with the activity in `readings`, those of its GPU instance by name."""
        activity: dict[str, Any] = {name: readings[name] for name in ACTIVITY_READINGS}
        return replace(self, **activity)

    def without_values(self, reason: str) -> MigInstance:
        """Return a copy with the value of every reading replaced by `reason`."""
        readings: dict[str, Any] = {name: getattr(self, name).without_value(reason) for name in INSTANCE_READINGS}
        return replace(self, **readings)


@dataclass(frozen=True, slots=True)
class Gpu:
    """Readings and processes of one GPU.

    `index` is the position in PCI bus order. `uuid` is None if NVML never reported it. `time` is the Unix time of the
    last answer, None if there was none. `age` is the number of seconds since the last answer, or since the first query.
    """

    index: int
    uuid: str | None
    state: GpuState
    age: float
    time: float | None
    readings: Mapping[str, Reading[Any]]
    processes: Reading[tuple[GpuProcess, ...]]
    instances: tuple[MigInstance, ...] = ()
    runs: tuple[str, ...] = ()
    """Names of the runs that have reserved this GPU or one of its MIG instances."""

    def __getitem__(self, name: str) -> Reading[Any]:
        return self.readings[name]

    def value(self, name: str) -> Any:
        """Return the value of a reading by its name in `UNITS`, None if unknown."""
        return self.readings[name].value

    @property
    def mig_enabled(self) -> bool:
        """Whether the GPU is in MIG mode."""
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
        not_recorded = {"value": None, "time": values["time"] or 0.0, "reason": "not in this recording"}
        processes: Reading[tuple[GpuProcess, ...]] = Reading.from_dict(values["processes"])
        if processes.value is not None:
            parsed = tuple(GpuProcess.from_dict(process) for process in values["processes"]["value"])
            processes = replace(processes, value=parsed)
        return cls(
            index=values["index"],
            uuid=values["uuid"],
            state=values["state"],
            age=values["age"],
            time=values["time"],
            readings={name: Reading.from_dict(values.get(name, not_recorded)) for name in UNITS},
            processes=processes,
            instances=tuple(MigInstance.from_dict(instance) for instance in values["instances"]),
            runs=tuple(values["runs"]),
        )

    def with_age(self, age: float) -> Gpu:
        return replace(self, age=age)

    def as_stale(self, age: float) -> Gpu:
        """Return a copy marked stale after `age` seconds without an answer: only static readings keep their values."""
        reason = f"stale: no answer for {age:.0f} s"
        readings = {
            name: reading if name in STATIC_READINGS else reading.without_value(reason)
            for name, reading in self.readings.items()
        }
        instances = tuple(instance.without_values(reason) for instance in self.instances)
        return replace(
            self,
            state="stale",
            age=age,
            readings=readings,
            processes=self.processes.without_value(reason),
            instances=instances,
        )


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Origin of a snapshot: the driver, or a recording. `made_up` marks a recording of GPUs that do not exist."""

    kind: Literal["driver", "recording"] = "driver"
    made_up: bool = False

    @property
    def notice(self) -> str | None:
        """Notice to show next to the snapshot, None if it comes from the driver."""
        if self.kind == "driver":
            return None
        return "SIMULATED: these GPUs do not exist" if self.made_up else "recording: not the current state of the GPUs"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All GPUs of a host, in PCI bus order. `error` is one sentence if the driver cannot be queried at all.

    `driver` is the driver version, `cuda` the newest CUDA version that the driver supports.
    """

    time: float
    host: str
    driver: Reading[str]
    cuda: Reading[str]
    gpus: tuple[Gpu, ...]
    error: str | None = None
    source: SnapshotSource = field(default_factory=SnapshotSource)
    pending: bool = False
    """True until the driver and every GPU have answered once."""

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
        """Return the snapshot as one line of JSON without a newline."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> Snapshot:
        """Parse a line of JSON. Raises ValueError if it is not a snapshot of the supported format."""
        return cls.from_dict(json.loads(line))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Snapshot:
        """Build a snapshot from parsed JSON. Raises ValueError if it is not a snapshot of the supported format."""
        try:
            if values["format"] != SNAPSHOT_FORMAT:
                raise ValueError(f"format {values['format']} is not supported, expected {SNAPSHOT_FORMAT}")
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
            raise ValueError("not a GPU snapshot") from error

    def as_of(self, now: float, stale_after_s: float) -> Snapshot:
        """Return the snapshot aged to `now` (Unix seconds). GPUs older than `stale_after_s` seconds become stale."""
        elapsed_s = max(now - self.time, 0.0)
        gpus = tuple(
            gpu.as_stale(gpu.age + elapsed_s)
            if gpu.age + elapsed_s > stale_after_s
            else gpu.with_age(gpu.age + elapsed_s)
            for gpu in self.gpus
        )
        return replace(self, gpus=gpus)


MIN_PERIOD_SECONDS = 0.25
MIN_STALE_AFTER_SECONDS = 2.0


@dataclass
class SamplerOptions:
    """What the sampler queries, and how often. Passed to its process as one line of JSON.

    `period` is in seconds. `activity` adds the activity of the SMs and of the links, `processes` the processes. `links`
    measures the PCIe throughput of GPUs without GPM in every period, not only every `sampler.PCIE_INTERVAL_SECONDS`.
    `gpus` limits sampling to these UUIDs; None means all GPUs.
    """

    period: float = 1.0
    activity: bool = True
    links: bool = False
    processes: bool = True
    gpus: list[str] | None = None

    @property
    def stale_after_s(self) -> float:
        """Seconds without an answer after which a GPU is stale."""
        return max(MIN_STALE_AFTER_SECONDS, 2.5 * self.period)

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> SamplerOptions:
        names = {option.name for option in fields(cls)}
        return cls(**{key: value for key, value in json.loads(line).items() if key in names})
