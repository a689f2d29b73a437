"""The one place where the driver is asked. A question that fails gives a reading with the reason, never an exception.

NVML: https://docs.nvidia.com/deploy/nvml-api/. Units are those of `readings.UNITS`; each reading is nvidia-smi's of the
same name (`nvidia-smi --help-query-gpu`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml as nv

from engine.gpus.snapshot import Instance, Missing, Reading

GPM_GAP_SECONDS = 0.1
GPM_METRICS = {
    "sm_active": nv.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": nv.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active": nv.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
# NVML fills a field that it has no value for with ones.
NO_VALUE = (2**32 - 1, 2**64 - 1)
THROTTLE_WORDS = {
    0x1: "idle",
    0x2: "set clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


class DriverGoneError(Exception):
    """The driver library must be set up anew, in a process that has not loaded it yet; the text says why."""


def reason_of(error: Exception) -> str:
    """Why there is no value. Raises DriverGoneError where nothing can be asked any more."""
    code = getattr(error, "value", None)
    if code in (nv.NVML_ERROR_UNINITIALIZED, nv.NVML_ERROR_DRIVER_NOT_LOADED, nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
        raise DriverGoneError(error_in_words(error)) from error
    if code == nv.NVML_ERROR_NOT_SUPPORTED:
        return Missing.NOT_SUPPORTED
    if code == nv.NVML_ERROR_NO_PERMISSION:
        return Missing.NO_PERMISSION
    if code in (nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_GPU_NOT_FOUND, nv.NVML_ERROR_RESET_REQUIRED):
        return Missing.LOST
    if code == nv.NVML_ERROR_FUNCTION_NOT_FOUND or isinstance(error, nv.NVMLLibraryMismatchError | AttributeError):
        return Missing.NOT_SUPPORTED_BY_DRIVER
    return error_in_words(error)


def error_in_words(error: Exception) -> str:
    if getattr(error, "value", None) == nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the driver's library and its kernel module are of different versions; a reboot mends that"
    return str(error).strip().rstrip(".").lower()


def ask(question: Callable[..., Any], *about: Any) -> Reading[Any]:
    """The answer to one question. Raises DriverGoneError."""
    now = time.time()
    try:
        return Reading(question(*about), now)
    except ImplausibleError as error:
        return Reading(None, now, str(error))
    # AttributeError: a binding older than the question.
    except (nv.NVMLError, nv.NVMLLibraryMismatchError, AttributeError) as error:
        return Reading(None, now, reason_of(error))


class ImplausibleError(Exception):
    """What the driver answered cannot be."""


def number(value: float) -> float:
    if value in NO_VALUE:
        raise ImplausibleError("not available")
    return value


def percent(value: float) -> float:
    if number(value) > 100:
        raise ImplausibleError(f"the driver says {value} %, which cannot be")
    return value


def watts(milliwatts: int) -> float:
    return round(number(milliwatts) / 1000, 3)


def text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def throttle_words(mask: int) -> list[str]:
    """The reasons of a mask that hold the clocks down, idleness too."""
    words = [word for bit, word in THROTTLE_WORDS.items() if mask & bit]
    rest = mask & ~sum(THROTTLE_WORDS)
    return [*words, f"unknown (0x{rest:x})"] if rest else words


def first_known(*questions: Callable[[], Any]) -> Any:
    """The answer to the first question that driver and binding know: each is the one before by an older name."""
    for question in questions[:-1]:
        try:
            return question()
        except AttributeError:
            continue
        except nv.NVMLError as error:
            if error.value != nv.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    return questions[-1]()


def memory(handle: Any) -> tuple[int, int, int | None]:
    """Used, total and reserved. The second version of the call does not count as used what the driver keeps for itself,
    as nvidia-smi does not; where there is only the first, the reserved part is unknown."""
    try:
        info = nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2)
        return int(info.used), int(number(info.total)), int(info.reserved)
    except (nv.NVMLError_FunctionNotFound, AttributeError):
        info = nv.nvmlDeviceGetMemoryInfo(handle)
        return int(info.used), int(number(info.total)), None


def utilization(handle: Any) -> Any:
    return nv.nvmlDeviceGetUtilizationRates(handle)


def mig_mode(handle: Any) -> str:
    return "on" if nv.nvmlDeviceGetMigMode(handle)[0] == nv.NVML_DEVICE_MIG_ENABLE else "off"


def ecc_errors(handle: Any, kind: int) -> int:
    """Since the driver was loaded."""
    return int(nv.nvmlDeviceGetTotalEccErrors(handle, kind, nv.NVML_VOLATILE_ECC))


def throttle(handle: Any) -> list[str]:
    return throttle_words(
        first_known(
            lambda: nv.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
    )


def temperature(handle: Any) -> int:
    return int(
        number(
            first_known(
                lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
                lambda: nv.nvmlDeviceGetTemperatureV(handle, nv.NVML_TEMPERATURE_GPU),
            )
        )
    )


def performance_state(handle: Any) -> str:
    state = nv.nvmlDeviceGetPerformanceState(handle)
    if state == nv.NVML_PSTATE_UNKNOWN:
        raise ImplausibleError("not available")
    return f"P{state}"


Questions = Mapping[str, Callable[[Any], Any]]

LASTING_QUESTIONS: Questions = {
    "name": lambda h: text(nv.nvmlDeviceGetName(h)),
    "pci_bus_id": lambda h: text(nv.nvmlDeviceGetPciInfo(h).busId),
    "max_sm_clock": lambda h: number(nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_SM)),
    "max_memory_clock": lambda h: number(nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_MEM)),
}
SLOW_QUESTIONS: Questions = {
    "power_limit": lambda h: watts(nv.nvmlDeviceGetEnforcedPowerLimit(h)),
    "ecc_corrected": lambda h: ecc_errors(h, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": lambda h: ecc_errors(h, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "pcie_generation": lambda h: number(nv.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie_width": lambda h: number(nv.nvmlDeviceGetCurrPcieLinkWidth(h)),
    "mig": mig_mode,
}
QUESTIONS: Questions = {
    "temperature": temperature,
    "power": lambda h: watts(nv.nvmlDeviceGetPowerUsage(h)),
    "sm_clock": lambda h: number(nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_SM)),
    "memory_clock": lambda h: number(nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_MEM)),
    "fan": lambda h: number(nv.nvmlDeviceGetFanSpeed(h)),
    "performance_state": performance_state,
    "throttle": throttle,
}
# The driver measures these for 20 ms a call.
LINK_QUESTIONS: Questions = {
    "pcie_sent": lambda h: number(nv.nvmlDeviceGetPcieThroughput(h, nv.NVML_PCIE_UTIL_TX_BYTES)),
    "pcie_received": lambda h: number(nv.nvmlDeviceGetPcieThroughput(h, nv.NVML_PCIE_UTIL_RX_BYTES)),
}


def ask_all(questions: Questions, handle: Any) -> dict[str, Reading[Any]]:
    return {name: ask(question, handle) for name, question in questions.items()}


def ask_load(handle: Any) -> dict[str, Reading[Any]]:
    """What one call tells of several readings: how busy, and the memory."""
    rates = ask(utilization, handle)
    held = ask(memory, handle)
    answers = {
        name: rates if rates.value is None else ask(percent, getattr(rates.value, part))
        for name, part in (("busy", "gpu"), ("memory_busy", "memory"))
    }
    for place, name in enumerate(("memory_used", "memory_total", "memory_reserved")):
        value = None if held.value is None else held.value[place]
        answers[name] = Reading(value, held.time, held.reason or (None if value is not None else Missing.NOT_SUPPORTED))
    return answers


class Activity:
    """What NVML's GPM tells of one GPU: how much of it really works, from the difference of two samples. Hopper and
    later have it."""

    def __init__(self) -> None:
        self._before: Any = None
        self._spare: Any = None
        self._taken = 0.0
        self._request = nv.c_nvmlGpmMetricsGet_t()

    def begin(self, handle: Any) -> None:
        """Take a first sample, where there is none yet."""
        if not self._taken:
            ask(self._begin, handle)

    def read(self, handle: Any) -> dict[str, Reading[Any]]:
        """What it did since the last call, or since `begin`, for at least 0.1 s."""
        answer = ask(self._read, handle)
        if answer.value is None:
            return dict.fromkeys(GPM_METRICS, answer)
        return {
            name: Reading(value, answer.time, None if value is not None else Missing.NOT_SUPPORTED)
            for name, value in answer.value.items()
        }

    def _begin(self, handle: Any) -> None:
        if not nv.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nv.NVMLError(nv.NVML_ERROR_NOT_SUPPORTED)
        if self._before is None:
            self._before, self._spare = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
        nv.nvmlGpmSampleGet(handle, self._before)
        self._taken = time.monotonic()

    def _read(self, handle: Any) -> dict[str, float | None]:
        if not self._taken:
            self._begin(handle)
        time.sleep(max(self._taken + GPM_GAP_SECONDS - time.monotonic(), 0.0))
        nv.nvmlGpmSampleGet(handle, self._spare)
        self._taken = time.monotonic()
        request = self._request
        request.version, request.numMetrics = nv.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        request.sample1, request.sample2 = self._before, self._spare
        for place, metric in enumerate(GPM_METRICS.values()):
            request.metrics[place].metricId = metric
        nv.nvmlGpmMetricsGet(request)
        self._before, self._spare = self._spare, self._before
        return {
            name: round(metric.value, 1)
            if metric.nvmlReturn == nv.NVML_SUCCESS and math.isfinite(metric.value)
            else None
            for name, metric in zip(GPM_METRICS, request.metrics, strict=False)
        }


class Tenant(NamedTuple):
    """A process as the driver lists it."""

    pid: int
    kind: str
    instance: int | None
    gpu_memory: Reading[int]


def tenants(handle: Any) -> Reading[list[Tenant]]:
    """Who computes or draws on a GPU; a process that does both computes."""
    compute = ask(lambda: nv.nvmlDeviceGetComputeRunningProcesses(handle))
    graphics = ask(lambda: nv.nvmlDeviceGetGraphicsRunningProcesses(handle))
    if compute.value is None:
        return compute
    found: dict[tuple[int, int | None], Tenant] = {}
    for kind, listed in (("compute", compute), ("graphics", graphics)):
        for process in listed.value or []:
            held = process.usedGpuMemory
            known = held is not None and held not in NO_VALUE
            instance = None if process.gpuInstanceId in NO_VALUE else int(process.gpuInstanceId)
            used: Reading[int] = Reading(
                int(held) if known else None, listed.time, None if known else "the driver does not tell"
            )
            found.setdefault((process.pid, instance), Tenant(int(process.pid), kind, instance, used))
    return Reading(list(found.values()), compute.time)


def _instance(handle: Any, place: int) -> Instance:
    part = nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
    load = ask_load(part)
    return Instance(
        text(nv.nvmlDeviceGetUUID(part)),
        nv.nvmlDeviceGetGpuInstanceId(part),
        nv.nvmlDeviceGetComputeInstanceId(part),
        ask(lambda: text(nv.nvmlDeviceGetName(part))),
        load["memory_used"],
        load["memory_total"],
    )


def instances(handle: Any) -> tuple[Instance, ...]:
    """The MIG instances of a divided GPU; not every place for one is taken."""
    places = ask(lambda: nv.nvmlDeviceGetMaxMigDeviceCount(handle)).value or 0
    found = [ask(_instance, handle, place).value for place in range(places)]
    return tuple(one for one in found if one is not None)


@dataclass(frozen=True)
class Driver:
    """The driver, set up in this process."""

    version: Reading[str]
    cuda: Reading[str]


def set_up() -> Driver:
    """Raises DriverGoneError with one sentence where there is no driver to ask."""
    try:
        nv.nvmlInit()
    except nv.NVMLError as error:
        raise DriverGoneError(error_in_words(error)) from error
    return Driver(ask(lambda: text(nv.nvmlSystemGetDriverVersion())), ask(cuda_version))


def cuda_version() -> str:
    """The newest CUDA that the driver can run."""
    version = nv.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def count() -> int:
    """How many GPUs there are. Raises DriverGoneError."""
    try:
        return int(nv.nvmlDeviceGetCount())
    except nv.NVMLError as error:
        raise DriverGoneError(error_in_words(error)) from error


def open_gpu(index: int) -> Reading[tuple[Any, str]]:
    """A handle to ask of, and the GPU's UUID."""

    def opened() -> tuple[Any, str]:
        handle = nv.nvmlDeviceGetHandleByIndex(index)
        return handle, text(nv.nvmlDeviceGetUUID(handle))

    return ask(opened)
