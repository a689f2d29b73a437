"""The functions of the fake NVML library in Python, each with the kind of its first argument, for `fake_nvml.py`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.gpu.fake_nvml_scene import (
    ARGUMENT_VERSION_MISMATCH,
    HOST,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    NOTHING,
    Call,
    Device,
    need,
)

MEMORY_V2 = 0x02000028


@dataclass
class Function:
    kind: str  # first argument: "host" (anything), "index" (of a GPU), "gpu" or "device" (a GPU or an instance)
    answer: Callable[..., None]  # called with the Call and the remaining arguments


FUNCTIONS: dict[str, Function] = {}


def add(name: str, kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def adding(answer: Callable[..., None]) -> Callable[..., None]:
        FUNCTIONS[name] = Function(kind, answer)
        return answer

    return adding


def give_text(buffer: Any, room: int, text: str) -> None:
    need(len(text) < room, INSUFFICIENT_SIZE)
    buffer.value = text.encode()


def give_handle(out: Any, device: Device | None, otherwise: int) -> None:
    need(device, otherwise)
    ctypes.c_void_p.from_buffer(out).value = HOST.handle(device or Device())


def address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def mib(amount: float) -> int:
    return int(amount) << 20


@add("nvmlInitWithFlags", "host")
@add("nvmlInit_v2", "host")
def init(call: Call, *_flags: int) -> None:
    with HOST.lock:
        HOST.users += 1


@add("nvmlShutdown", "host")
def shutdown(call: Call) -> None:
    with HOST.lock:
        HOST.users -= 1


@add("nvmlSystemGetDriverVersion", "host")
def driver_version(call: Call, text: Any, room: int) -> None:
    give_text(text, room, call.scene.driver)


@add("nvmlSystemGetNVMLVersion", "host")
def nvml_version(call: Call, text: Any, room: int) -> None:
    give_text(text, room, f"{call.scene.cuda // 1000}.{call.scene.driver}")


@add("nvmlSystemGetCudaDriverVersion", "host")
@add("nvmlSystemGetCudaDriverVersion_v2", "host")
def cuda_version(call: Call, version: Any) -> None:
    version.value = call.scene.cuda


@add("nvmlDeviceGetCount_v2", "host")
def count(call: Call, number: Any) -> None:
    number.value = len(call.scene.gpus)


@add("nvmlDeviceGetHandleByIndex_v2", "index")
def by_index(call: Call, out: Any) -> None:
    give_handle(out, next(iter(call.scene.gpus[call.gpu.index :]), None), INVALID_ARGUMENT)


@add("nvmlDeviceGetHandleByUUID", "host")
def by_uuid(call: Call, uuid: bytes, out: Any) -> None:
    devices = [*call.scene.gpus, *call.scene.instances]
    give_handle(out, next((device for device in devices if device.uuid == uuid.decode()), None), NOT_FOUND)


def bus_numbers(bus: str) -> list[int]:
    """Parse a PCI bus ID, whose domain has four or eight digits."""
    return [int(part, 16) for part in bus.replace(".", ":").split(":")]


@add("nvmlDeviceGetHandleByPciBusId_v2", "host")
def by_bus(call: Call, bus: bytes, out: Any) -> None:
    matches = (gpu for gpu in call.scene.gpus if bus_numbers(gpu.bus) == bus_numbers(bus.decode()))
    give_handle(out, next(matches, None), NOT_FOUND)


@add("nvmlDeviceGetMigDeviceHandleByIndex", "gpu")
def mig_by_index(call: Call, index: int, out: Any) -> None:
    instances = [instance for instance in call.scene.instances if instance.index == call.gpu.index]
    give_handle(out, next(iter(instances[index:]), None), NOT_FOUND)


@add("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", "device")
def gpu_of_mig(call: Call, out: Any) -> None:
    give_handle(out, call.mig and call.gpu, INVALID_ARGUMENT)


# Function -> values written through its pointers. A negative value means not supported.
NUMBERS: dict[str, Callable[[Device], list[float]]] = {
    "nvmlDeviceGetIndex": lambda gpu: [gpu.index],
    "nvmlDeviceGetMinorNumber": lambda gpu: [gpu.index],
    "nvmlDeviceGetPowerUsage": lambda gpu: [gpu.power * 1000],
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: [gpu.limit * 1000],
    "nvmlDeviceGetPowerManagementLimit": lambda gpu: [gpu.limit * 1000],
    "nvmlDeviceGetFanSpeed": lambda gpu: [gpu.fan],
    "nvmlDeviceGetPerformanceState": lambda gpu: [gpu.pstate],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: [gpu.throttle],
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: [gpu.throttle],
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: [gpu.pcie_gen],
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: [gpu.pcie_gen],
    "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: [gpu.pcie_width],
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: [gpu.pcie_width],
    "nvmlDeviceGetPcieReplayCounter": lambda gpu: [gpu.replays],
    "nvmlDeviceGetEccMode": lambda gpu: [gpu.ecc, gpu.ecc],
    "nvmlDeviceGetMigMode": lambda gpu: [gpu.mig, gpu.mig],
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: list(divmod(gpu.capability, 10)),
    "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: [7 if gpu.mig == 1 else 0],
    "nvmlDeviceGetDisplayActive": lambda gpu: [gpu.display],
}
# Function -> values, indexed by the argument before the pointer.
CHOICES: dict[str, Callable[[Device], list[float]]] = {
    "nvmlDeviceGetTemperature": lambda gpu: [gpu.temperature],
    "nvmlDeviceGetClockInfo": lambda gpu: [gpu.sm_clock, gpu.sm_clock, gpu.memory_clock, gpu.sm_clock],
    "nvmlDeviceGetMaxClockInfo": lambda gpu: [
        gpu.max_sm_clock, gpu.max_sm_clock, gpu.max_memory_clock, gpu.max_sm_clock
    ],
    "nvmlDeviceGetPcieThroughput": lambda gpu: [gpu.tx, gpu.rx],
}  # fmt: skip
# Other monitors call these and fail if the symbol is missing.
UNSUPPORTED = (
    "nvmlDeviceGetComputeMode", "nvmlDeviceGetDecoderUtilization", "nvmlDeviceGetDisplayMode",
    "nvmlDeviceGetDriverModel",
    "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetPersistenceMode",
)  # fmt: skip


def add_number(name: str, values: Callable[[Device], list[float]]) -> None:
    @add(name, "gpu")
    def numbers(call: Call, *pointers: Any) -> None:
        for pointer, value in zip(pointers, values(call.gpu), strict=True):
            need(value >= 0)
            pointer.value = int(value)


def add_choice(name: str, values: Callable[[Device], list[float]]) -> None:
    @add(name, "gpu")
    def choice(call: Call, variant: int, pointer: Any) -> None:
        need(variant < len(values(call.gpu)), INVALID_ARGUMENT)
        if name == "nvmlDeviceGetPcieThroughput":
            time.sleep(0.02)  # the real function measures over 20 ms
        need(values(call.gpu)[variant] >= 0)
        pointer.value = int(values(call.gpu)[variant])


def add_unsupported(name: str) -> None:
    @add(name, "gpu")
    def unsupported(call: Call, *_arguments: object) -> None:
        need(False)


for each, values in NUMBERS.items():
    add_number(each, values)
for each, values in CHOICES.items():
    add_choice(each, values)
for each in UNSUPPORTED:
    add_unsupported(each)


@add("nvmlDeviceGetTotalEccErrors", "gpu")
def ecc_errors(call: Call, kind: int, counter: int, number: Any) -> None:
    need(kind < 2 and counter < 2, INVALID_ARGUMENT)
    need(call.gpu.ecc > 0)
    number.value = int(call.gpu.uncorrected if kind else call.gpu.corrected)


@add("nvmlDeviceGetNvLinkState", "gpu")
def nvlink_state(call: Call, link: int, active: Any) -> None:
    need(call.gpu.nvlinks > 0)
    need(link < call.gpu.nvlinks, INVALID_ARGUMENT)
    active.value = 1


@add("nvmlDeviceGetFieldValues", "gpu")
def field_values(call: Call, count: int, values: Any) -> None:
    now = time.monotonic()
    for each in values[:count]:
        value = call.gpu.memory_temperature if each.fieldId == 82 else -1
        if each.fieldId in (138, 139) and call.gpu.nvlinks > 0:  # a counter in KiB, for one link or for all
            rate = call.gpu.nvlink_tx if each.fieldId == 138 else call.gpu.nvlink_rx
            value = rate * now / 1.024 / (1 if each.scopeId == NOTHING else call.gpu.nvlinks)
        each.nvmlReturn, each.value.ullVal = (0, int(value)) if value >= 0 else (NOT_SUPPORTED, 0)


@add("nvmlDeviceGetUtilizationRates", "gpu")
def utilization(call: Call, rates: Any) -> None:
    need(call.gpu.mig != 1 and call.gpu.util >= 0 and call.gpu.memory_util >= 0)
    rates.gpu, rates.memory = int(call.gpu.util), int(call.gpu.memory_util)


@add("nvmlDeviceGetPciInfo_v3", "gpu")
def pci_info(call: Call, pci: Any) -> None:
    pci.busId = call.gpu.bus.encode()
    pci.domain, pci.bus, pci.device, _ = bus_numbers(call.gpu.bus)
    pci.busIdLegacy = f"{pci.domain & 0xFFFF:04X}:{pci.bus:02X}:{pci.device:02X}.0".encode()
    pci.pciDeviceId, pci.pciSubSystemId = 0x233010DE, 0x16C110DE


@add("nvmlDeviceGetUUID", "device")
def uuid_of(call: Call, text: Any, room: int) -> None:
    give_text(text, room, call.either.uuid)


@add("nvmlDeviceGetName", "device")
def name_of(call: Call, text: Any, room: int) -> None:
    give_text(text, room, call.either.name)


@add("nvmlDeviceGetMemoryInfo", "device")
def memory(call: Call, info: Any) -> None:
    """Since driver 510, version 1 counts reserved memory as used and version 2 does not."""
    device_memory = call.either
    info.total, info.used = mib(device_memory.total), mib(device_memory.used + device_memory.reserved)
    info.free = info.total - info.used


@add("nvmlDeviceGetBAR1MemoryInfo", "device")
def bar1_memory(call: Call, info: Any) -> None:
    """Required by other monitors."""
    info.bar1Total, info.bar1Used = mib(call.either.total), mib(1)
    info.bar1Free = info.bar1Total - info.bar1Used


@add("nvmlDeviceGetMemoryInfo_v2", "device")
def memory_v2(call: Call, info: Any) -> None:
    need(info.version == MEMORY_V2, ARGUMENT_VERSION_MISMATCH)
    device_memory = call.either
    info.total, info.reserved, info.used = (
        mib(device_memory.total),
        mib(device_memory.reserved),
        mib(device_memory.used),
    )
    info.free = info.total - info.reserved - info.used


@add("nvmlDeviceGetGpuInstanceId", "device")
def gpu_instance(call: Call, number: Any) -> None:
    need(call.mig)
    number.value = int(call.either.gi)


@add("nvmlDeviceGetComputeInstanceId", "device")
def compute_instance(call: Call, number: Any) -> None:
    need(call.mig)
    number.value = int(call.either.ci)


def give_processes(call: Call, kind: str, number: Any, infos: Any) -> None:
    need(call.gpu.mig != 1 or call.mig or call.gpu.privileged, NO_PERMISSION)
    processes = [process for process in call.scene.processes if (process.gpu, process.kind) == (call.gpu.index, kind)]
    if call.mig:
        processes = [process for process in processes if (process.gi, process.ci) == (call.mig.gi, call.mig.ci)]
    room, number.value = number.value, len(processes)
    need(len(processes) <= room, INSUFFICIENT_SIZE)
    for process, info in zip(processes, infos or (), strict=False):
        info.pid, info.usedGpuMemory = process.pid, -1 if process.used < 0 else mib(process.used)
        info.gpuInstanceId, info.computeInstanceId = process.gi, NOTHING if process.gi == NOTHING else process.ci


@add("nvmlDeviceGetComputeRunningProcesses_v3", "device")
def compute_processes(call: Call, number: Any, infos: Any) -> None:
    give_processes(call, "compute", number, infos)


@add("nvmlDeviceGetGraphicsRunningProcesses_v3", "device")
def graphics_processes(call: Call, number: Any, infos: Any) -> None:
    give_processes(call, "graphics", number, infos)


@add("nvmlDeviceGetMPSComputeRunningProcesses_v3", "device")
def mps_processes(call: Call, number: Any, infos: Any) -> None:
    give_processes(call, "mps", number, infos)


@add("nvmlDeviceGetProcessUtilization", "gpu")
def process_utilization(call: Call, samples: Any, number: Any, since: int) -> None:
    need(call.gpu.sampling)
    found = [process for process in call.scene.processes if process.gpu == call.gpu.index and process.sm > 0]
    room, number.value = number.value, len(found)
    need(found, NOT_FOUND)
    need(samples and room >= len(found), INSUFFICIENT_SIZE)
    for process, sample in zip(found, samples, strict=False):
        sample.pid, sample.timeStamp, sample.smUtil = process.pid, time.time_ns() // 1000, int(process.sm)


# ---- GPM: metrics between two samples (here: the values of the scene at the time of the query) ----


@add("nvmlGpmQueryDeviceSupport", "gpu")
def gpm_support(call: Call, support: Any) -> None:
    need(support.version == 1, ARGUMENT_VERSION_MISMATCH)
    support.isSupportedDevice = int(call.gpu.gpm != 0)


@add("nvmlGpmSampleAlloc", "host")
def gpm_alloc(call: Call, out: Any) -> None:
    sample = ctypes.c_char()
    HOST.samples[ctypes.addressof(sample)] = (sample, 0, NOTHING)
    ctypes.c_void_p.from_buffer(out).value = ctypes.addressof(sample)


@add("nvmlGpmSampleFree", "host")
def gpm_free(call: Call, sample: int) -> None:
    HOST.samples.pop(sample, None)


@add("nvmlGpmSampleGet", "gpu")
def gpm_sample(call: Call, sample: int, gi: int = NOTHING) -> None:
    need(call.gpu.gpm)
    HOST.samples[sample] = (HOST.samples[sample][0], HOST.handle(call.gpu), gi)


def with_gpu_instance(call: Call, gi: int) -> Device | None:
    return next((mig for mig in call.scene.instances if (mig.index, mig.gi) == (call.gpu.index, gi)), None)


@add("nvmlGpmMigSampleGet", "gpu")
def gpm_mig_sample(call: Call, gi: int, sample: int) -> None:
    need(call.gpu.gpm)
    need(with_gpu_instance(call, gi), INVALID_ARGUMENT)
    gpm_sample(call, sample, gi)


@add("nvmlGpmMetricsGet", "gpu")
def gpm_metrics(call: Call, request: Any) -> None:
    need(request.version == 1, ARGUMENT_VERSION_MISMATCH)
    first, second = (HOST.samples.get(address(sample), (None, 0, 0)) for sample in (request.sample1, request.sample2))
    need(first[1:] == second[1:], INVALID_ARGUMENT)
    need(call.gpu.gpm)
    measured = call.gpu if first[2] == NOTHING else with_gpu_instance(call, first[2])
    need(measured, INVALID_ARGUMENT)
    mib = 1000 / 2**20
    nvlink = mib if call.gpu.nvlinks > 0 else -1
    supported = {
        2: (b"SM Util", b"%", measured.sm), 5: (b"Any Tensor Util", b"%", measured.tensor),
        10: (b"DRAM BW Util", b"%", measured.dram), 20: (b"PCIe TX", b"MiB/s", call.gpu.tx * mib),
        21: (b"PCIe RX", b"MiB/s", call.gpu.rx * mib), 60: (b"NVLink RX", b"MiB/s", call.gpu.nvlink_rx * nvlink),
        61: (b"NVLink TX", b"MiB/s", call.gpu.nvlink_tx * nvlink),
    }  # fmt: skip
    for metric in request.metrics[: request.numMetrics]:
        name, unit, value = supported.get(metric.metricId, (None, None, -1))
        metric.nvmlReturn, metric.value = (0, value) if value >= 0 else (NOT_SUPPORTED, 0)
        info = metric.metricInfo
        info.shortName, info.longName, info.unit = (name, name, unit) if value >= 0 else (None, None, None)
