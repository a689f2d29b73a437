"""Snapshot of a host's GPUs: the records that `sampler` prints, `monitor` reads and recordings store, one a line.

`gputrain gpus --json` prints them to users. A reading is a value with its unit and time, or the reason there is none.
An unknown value is never 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from engine.base.codec import ENTRIES, Count, FileRecord, Integer, Number, Record, Seconds, UnixTime, field, replace

T = TypeVar("T")
GpuState = Literal["ok", "stale", "lost"]


class Missing(StrEnum):
    """Fixed reasons for a missing value. Other reasons are NVML error messages, or contain details such as an age."""

    INTEGRATED = "integrated GPU"
    LOST = "lost"
    NO_PERMISSION = "no permission"
    NOT_RECORDED = "not in this recording"
    NOT_REQUESTED = "not requested"
    NOT_SUPPORTED = "not supported"
    NOT_SUPPORTED_BY_DRIVER = "not supported by this driver"


class Measurement(Record, Generic[T], frozen=True, omit_defaults=True):
    """A value, or None and the `reason`. `time` is the time of the query in Unix seconds."""

    value: T | None
    time: UnixTime
    reason: str | None = None
    # Unlike a default, the result of a factory is always written.
    unit: str = field(default_factory=str)

    def without_value(self, reason: str) -> Measurement[T]:
        """Return a copy with the value replaced by `reason`."""
        return Measurement(None, self.time, reason, self.unit)


def current_time() -> float:
    """Return the time in Unix seconds as readings store it, in milliseconds."""
    return round(time.time(), 3)


def _absent(unit: str, reason: Missing = Missing.NOT_RECORDED) -> Any:
    """Return the default of a reading, which also declares its unit."""
    return Measurement(None, 0.0, reason, unit)


class GpuProcess(Record, frozen=True, kw_only=True):
    """A process that uses a GPU, as `nvidia-smi --query-compute-apps` lists it, with its host metrics.

    `pid` is NVML's, which inside a container may be the PID on the host. `instance` is the MIG GPU instance ID,
    `compute_instance` that of the compute instance within it. An MPS server computes only for its clients, which are
    listed themselves.
    `gpu_memory` and `memory` (resident set size in host memory) are in bytes, `cpu` is in percent of one core.
    `run_time` is in seconds since the process started.
    `run` and `rank` are set if the process is a rank of a gputrain run.
    `idle` is the number of seconds for which the process has not computed, as far as it was watched. With
    `idle_at_least`, it has not computed since then, and may have been idle for longer.
    """

    pid: Count
    kind: Literal["compute", "graphics", "mps server"]
    instance: Count | None
    compute_instance: Count | None = None
    run: str | None = None
    rank: Count | None = None
    user: Measurement[str]
    command: Measurement[str]
    gpu_memory: Measurement[Count]
    cpu: Measurement[Number]
    memory: Measurement[Count]
    run_time: Measurement[Number] = _absent("s")
    idle: Measurement[Number] = _absent("s")
    idle_at_least: bool = False


ACTIVITY_READINGS = ("sm_active", "tensor_active", "dram_active")
INSTANCE_READINGS = ("memory_used", "memory_total", *ACTIVITY_READINGS)


class MigInstance(Record, frozen=True, kw_only=True):
    """A MIG device: a compute instance within a GPU instance, which CUDA exposes as a device of its own.

    Its memory and activity are those of the GPU instance, as in `Gpu`.
    """

    uuid: str
    gpu_instance: Count
    compute_instance: Count
    name: Measurement[str]
    memory_used: Measurement[Count]
    memory_total: Measurement[Count]
    sm_active: Measurement[Number] = _absent("%", Missing.NOT_REQUESTED)
    tensor_active: Measurement[Number] = _absent("%", Missing.NOT_REQUESTED)
    dram_active: Measurement[Number] = _absent("%", Missing.NOT_REQUESTED)

    def with_activity(self, readings: Mapping[str, Measurement[Any]]) -> MigInstance:
        """Return a copy with the activity in `readings`, those of its GPU instance by name."""
        return replace(self, **with_units({name: readings[name] for name in ACTIVITY_READINGS}))

    def without_values(self, reason: str) -> MigInstance:
        """Return a copy with the value of every reading replaced by `reason`."""
        return replace(self, **{name: getattr(self, name).without_value(reason) for name in INSTANCE_READINGS})


class Gpu(Record, frozen=True, kw_only=True):
    """Readings and processes of one GPU.

    `index` is the position in PCI bus order. `uuid` is None if NVML never reported it. `time` is the Unix time of the
    last answer, None if there was none. `age` is the number of seconds since the last answer, or since the first query.
    In backticks, the field of `nvidia-smi --query-gpu=` with the same meaning; `engine.gpus.nvml` has the NVML calls.
    """

    index: Count
    uuid: str | None
    state: GpuState
    age: Seconds
    time: UnixTime | None
    # Product name (`name`).
    name: Measurement[str] = _absent("")
    # domain:bus:device.function (`pci.bus_id`).
    pci_bus_id: Measurement[str] = _absent("")
    # Compute capability of CUDA, such as 9.0 (`compute_cap`).
    compute_capability: Measurement[str] = _absent("")
    # Percent of the sampling period with at least one kernel running (`utilization.gpu`). NVML's sampling period is
    # 1/6 s to 1 s, depending on the product.
    util: Measurement[Count] = _absent("%")
    # Percent of the sampling period in which device memory was read or written (`utilization.memory`).
    memory_util: Measurement[Count] = _absent("%")
    # Percent of SMs that were busy, averaged over the sampling interval (GPM metric 2).
    sm_active: Measurement[Number] = _absent("%")
    # Percent of time that the SMs executed tensor core operations of any type (GPM metric 5).
    tensor_active: Measurement[Number] = _absent("%")
    # Percent of the theoretical DRAM bandwidth in use (GPM metric 10).
    dram_active: Measurement[Number] = _absent("%")
    # Allocated device memory, without `memory_reserved` (`memory.used`).
    memory_used: Measurement[Count] = _absent("B")
    # Physical device memory (`memory.total`).
    memory_total: Measurement[Count] = _absent("B")
    # Whether the GPU has no memory of its own, such as GB10 and Thor (`integrated` of CUDA's device properties).
    # `memory_used` and `memory_total` are then those of the host.
    integrated: Measurement[bool] = _absent("")
    # Device memory reserved by the driver and firmware (`memory.reserved`).
    memory_reserved: Measurement[Count] = _absent("B")
    # Core temperature (`temperature.gpu`).
    temperature: Measurement[Integer] = _absent("°C")
    # Temperature of the device memory (`temperature.memory`).
    memory_temperature: Measurement[Integer] = _absent("°C")
    # Power draw of the GPU and its memory (`power.draw`).
    power: Measurement[Number] = _absent("W")
    # Power limit in force, the lowest of all that apply (`enforced.power.limit`).
    power_limit: Measurement[Number] = _absent("W")
    # Current SM clock (`clocks.sm`).
    sm_clock: Measurement[Count] = _absent("MHz")
    # Current memory clock (`clocks.mem`).
    memory_clock: Measurement[Count] = _absent("MHz")
    # Highest possible SM clock (`clocks.max.sm`).
    max_sm_clock: Measurement[Count] = _absent("MHz")
    # Highest possible memory clock (`clocks.max.mem`).
    max_memory_clock: Measurement[Count] = _absent("MHz")
    # Intended fan speed, in percent of the maximum; not measured (`fan.speed`).
    fan: Measurement[Count] = _absent("%")
    # P0 (highest performance) to P15 (`pstate`).
    performance_state: Measurement[str] = _absent("")
    # List of the active throttle reasons, as named in `nvml.THROTTLE_REASONS` (`clocks_throttle_reasons.active`).
    throttle: Measurement[tuple[str, ...]] = _absent("")
    # ECC errors since the driver was loaded (`ecc.errors.corrected.volatile.total`, and `uncorrected`).
    ecc_corrected: Measurement[Count] = _absent("errors")
    ecc_uncorrected: Measurement[Count] = _absent("errors")
    # Current PCIe link (`pcie.link.gen.current` and `pcie.link.width.current`); it drops when the GPU is idle.
    pcie_generation: Measurement[Count] = _absent("")
    pcie_width: Measurement[Count] = _absent("lanes")
    # Highest PCIe link that this GPU and the host support (`pcie.link.gen.max` and `pcie.link.width.max`).
    max_pcie_generation: Measurement[Count] = _absent("")
    max_pcie_width: Measurement[Count] = _absent("lanes")
    # PCIe packets that were sent again (`Replays Since Reset` of `nvidia-smi -q`).
    pcie_replays: Measurement[Count] = _absent("replays")
    # PCIe throughput from and to the GPU, 1 KB = 1000 B. With GPM: since the last sample (metrics 20 and 21). Without
    # GPM: over 20 ms (`txpci` and `rxpci` of `nvidia-smi dmon -s t`).
    pcie_sent: Measurement[Number] = _absent("KB/s")
    pcie_received: Measurement[Number] = _absent("KB/s")
    # Number of active NVLinks (`nvidia-smi nvlink --status`).
    nvlinks: Measurement[Count] = _absent("links")
    # Throughput of all NVLinks from and to the GPU since the last sample, 1 KB = 1000 B (GPM metrics 61 and 60).
    nvlink_sent: Measurement[Number] = _absent("KB/s")
    nvlink_received: Measurement[Number] = _absent("KB/s")
    # Current MIG mode, "on" or "off" (`mig.mode.current`).
    mig: Measurement[str] = _absent("")
    # Who may use the GPU for graphics: "desktop" (`display_active`), "Windows" in WSL 2, or "none".
    display: Measurement[str] = _absent("")

    instances: tuple[MigInstance, ...] = ()
    processes: Measurement[tuple[GpuProcess, ...]]
    runs: tuple[str, ...] = ()
    """Names of the runs that have reserved this GPU or one of its MIG instances."""
    run_owners: dict[str, str] = field(default_factory=dict)
    """The users of those of these runs that belong to others, by the name of the run."""
    reserved_by_runs: Count = 0
    """Bytes of its memory that these runs have reserved (`queue.min_free`); 0 if each has reserved whole devices."""

    def __getitem__(self, name: str) -> Measurement[Any]:
        reading: Measurement[Any] = getattr(self, name)
        return reading

    def value(self, name: str) -> Any:
        """Return the value of a reading by its name in `UNITS`, None if unknown."""
        return self[name].value

    @property
    def mig_enabled(self) -> bool:
        """Whether the GPU is in MIG mode."""
        return self.mig.value == "on"

    def aged(self, age: float, stale_after_s: float) -> Gpu:
        """Return a copy whose last answer is `age` seconds old, marked stale if that is longer than the limit."""
        return self.as_stale(age) if age > stale_after_s else replace(self, age=round(age, 3))

    def as_stale(self, age: float) -> Gpu:
        """Return a copy marked stale after `age` seconds without an answer: only static readings keep their values."""
        reason = f"stale: no answer for {age:.0f} s"
        return replace(
            self,
            age=round(age, 3),
            state="stale",
            processes=self.processes.without_value(reason),
            instances=tuple(instance.without_values(reason) for instance in self.instances),
            **{name: self[name].without_value(reason) for name in UNITS if name not in STATIC_READINGS},
        )


UNITS: dict[str, str] = {
    name: default.unit
    for name, default in zip(
        Gpu.__struct_fields__[-len(Gpu.__struct_defaults__) :], Gpu.__struct_defaults__, strict=True
    )
    if isinstance(default, Measurement)
}
"""Every reading of a GPU and its unit."""
# Independent of the load, so still valid for a GPU that does not answer.
STATIC_READINGS = {
    "name", "pci_bus_id", "compute_capability", "max_sm_clock", "max_memory_clock", "max_pcie_generation",
    "max_pcie_width",
}  # fmt: skip


def with_units(readings: Mapping[str, Measurement[Any]]) -> dict[str, Measurement[Any]]:
    """Return readings by name with their units."""
    return {name: Measurement(each.value, each.time, each.reason, UNITS[name]) for name, each in readings.items()}


class SnapshotSource(Record, frozen=True, kw_only=True):
    """Origin of a snapshot: the driver, or a recording. `made_up` marks a recording of GPUs that do not exist."""

    kind: Literal["driver", "recording"]
    made_up: bool

    @property
    def notice(self) -> str | None:
        """Notice to show next to the snapshot, None if it comes from the driver."""
        if self.kind == "driver":
            return None
        return "SIMULATED: these GPUs do not exist" if self.made_up else "recording: not the current state of the GPUs"


DRIVER = SnapshotSource(kind="driver", made_up=False)


class Snapshot(FileRecord, frozen=True, kw_only=True):
    """All GPUs of a host, in PCI bus order. `error` is one sentence if the driver cannot be queried at all.

    `driver` is the driver version, `cuda` the newest CUDA version that the driver supports.
    """

    time: UnixTime
    host: str
    source: SnapshotSource
    driver: Measurement[str]
    cuda: Measurement[str]
    error: str | None = None
    pending: bool = False
    """True until the driver and every GPU have answered once."""
    gpus: Annotated[tuple[Gpu, ...], ENTRIES]

    def as_of(self, now: float, stale_after_s: float) -> Snapshot:
        """Return the snapshot aged to `now` (Unix seconds). GPUs older than `stale_after_s` seconds become stale."""
        elapsed_s = max(now - self.time, 0.0)
        return replace(self, gpus=tuple(gpu.aged(gpu.age + elapsed_s, stale_after_s) for gpu in self.gpus))


MIN_STALE_AFTER_SECONDS = 2.0


class SamplerOptions(Record, frozen=True, kw_only=True):
    """What the sampler queries, and how often. Passed to its process as one line of JSON.

    `period` is in seconds. `activity` adds the activity of the SMs and of the links, `processes` the processes. `gpus`
    limits sampling to these UUIDs; None means all GPUs.
    """

    period: Seconds = 1.0
    activity: bool = True
    processes: bool = True
    gpus: tuple[str, ...] | None = None

    @property
    def stale_after_s(self) -> float:
        """Seconds without an answer after which a GPU is stale."""
        return max(MIN_STALE_AFTER_SECONDS, 2.5 * self.period)
