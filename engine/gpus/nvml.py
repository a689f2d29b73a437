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

from engine.gpus.snapshot import MigInstance, Missing, Reading

MIN_GPM_INTERVAL_SECONDS = 0.1
GPM_METRICS = {
    "sm_active": nv.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": nv.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active": nv.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
# NVML fills a field that it has no value for with ones.
VALUES_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)
THROTTLE_REASONS = {
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


class DriverUnavailableError(Exception):
    """The driver library must be set up anew, in a process that has not loaded it yet; the text says why."""


def unavailable_reason(error: Exception) -> str:
    """Why there is no value. Raises DriverGoneError where nothing can be asked any more."""
    code = getattr(error, "value", None)
    if code in (nv.NVML_ERROR_UNINITIALIZED, nv.NVML_ERROR_DRIVER_NOT_LOADED, nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
        raise DriverUnavailableError(error_message(error)) from error
    if code == nv.NVML_ERROR_NOT_SUPPORTED:
        return Missing.NOT_SUPPORTED
    if code == nv.NVML_ERROR_NO_PERMISSION:
        return Missing.NO_PERMISSION
    if code in (nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_GPU_NOT_FOUND, nv.NVML_ERROR_RESET_REQUIRED):
        return Missing.LOST
    if code == nv.NVML_ERROR_FUNCTION_NOT_FOUND or isinstance(error, nv.NVMLLibraryMismatchError | AttributeError):
        return Missing.NOT_SUPPORTED_BY_DRIVER
    return error_message(error)


def error_message(error: Exception) -> str:
    if getattr(error, "value", None) == nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the driver's library and its kernel module are of different versions; a reboot mends that"
    return str(error).strip().rstrip(".").lower()


def query(call: Callable[..., Any], *args: Any) -> Reading[Any]:
    """The answer to one question. Raises DriverGoneError."""
    now = time.time()
    try:
        return Reading(call(*args), now)
    except ImplausibleValueError as error:
        return Reading(None, now, str(error))
    # AttributeError: a binding older than the question.
    except (nv.NVMLError, nv.NVMLLibraryMismatchError, AttributeError) as error:
        return Reading(None, now, unavailable_reason(error))


class ImplausibleValueError(Exception):
    """What the driver answered cannot be."""


def require_available(value: float) -> float:
    if value in VALUES_NOT_AVAILABLE:
        raise ImplausibleValueError("not available")
    return value


def checked_percent(value: float) -> float:
    if require_available(value) > 100:
        raise ImplausibleValueError(f"the driver says {value} %, which cannot be")
    return value


def watts(milliwatts: int) -> float:
    return round(require_available(milliwatts) / 1000, 3)


def decode(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def throttle_reason_names(mask: int) -> list[str]:
    """The reasons of a mask that hold the clocks down, idleness too."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    rest = mask & ~sum(THROTTLE_REASONS)
    return [*words, f"unknown (0x{rest:x})"] if rest else words


def first_supported(*calls: Callable[[], Any]) -> Any:
    """The answer to the first question that driver and binding know: each is the one before by an older name."""
    for question in calls[:-1]:
        try:
            return question()
        except AttributeError:
            continue
        except nv.NVMLError as error:
            if error.value != nv.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    return calls[-1]()


def memory_info(handle: Any) -> tuple[int, int, int | None]:
    """Used, total and reserved. The second version of the call does not count as used what the driver keeps for itself,
    as nvidia-smi does not; where there is only the first, the reserved part is unknown."""
    try:
        info = nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2)
        return int(info.used), int(require_available(info.total)), int(info.reserved)
    except (nv.NVMLError_FunctionNotFound, AttributeError):
        info = nv.nvmlDeviceGetMemoryInfo(handle)
        return int(info.used), int(require_available(info.total)), None


def utilization_rates(handle: Any) -> Any:
    return nv.nvmlDeviceGetUtilizationRates(handle)


def mig_mode(handle: Any) -> str:
    return "on" if nv.nvmlDeviceGetMigMode(handle)[0] == nv.NVML_DEVICE_MIG_ENABLE else "off"


def ecc_errors(handle: Any, kind: int) -> int:
    """Since the driver was loaded."""
    return int(nv.nvmlDeviceGetTotalEccErrors(handle, kind, nv.NVML_VOLATILE_ECC))


def throttle_reasons(handle: Any) -> list[str]:
    return throttle_reason_names(
        first_supported(
            lambda: nv.nvmlDeviceGetCurrentClocksEventReasons(handle),
            lambda: nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )
    )


def temperature(handle: Any) -> int:
    return int(
        require_available(
            first_supported(
                lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
                lambda: nv.nvmlDeviceGetTemperatureV(handle, nv.NVML_TEMPERATURE_GPU),
            )
        )
    )


def performance_state(handle: Any) -> str:
    state = nv.nvmlDeviceGetPerformanceState(handle)
    if state == nv.NVML_PSTATE_UNKNOWN:
        raise ImplausibleValueError("not available")
    return f"P{state}"


Queries = Mapping[str, Callable[[Any], Any]]

STATIC_QUERIES: Queries = {
    "name": lambda h: decode(nv.nvmlDeviceGetName(h)),
    "pci_bus_id": lambda h: decode(nv.nvmlDeviceGetPciInfo(h).busId),
    "max_sm_clock": lambda h: require_available(nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_SM)),
    "max_memory_clock": lambda h: require_available(nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_MEM)),
}
INFREQUENT_QUERIES: Queries = {
    "power_limit": lambda h: watts(nv.nvmlDeviceGetEnforcedPowerLimit(h)),
    "ecc_corrected": lambda h: ecc_errors(h, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": lambda h: ecc_errors(h, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "pcie_generation": lambda h: require_available(nv.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie_width": lambda h: require_available(nv.nvmlDeviceGetCurrPcieLinkWidth(h)),
    "mig": mig_mode,
}
PERIODIC_QUERIES: Queries = {
    "temperature": temperature,
    "power": lambda h: watts(nv.nvmlDeviceGetPowerUsage(h)),
    "sm_clock": lambda h: require_available(nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_SM)),
    "memory_clock": lambda h: require_available(nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_MEM)),
    "fan": lambda h: require_available(nv.nvmlDeviceGetFanSpeed(h)),
    "performance_state": performance_state,
    "throttle": throttle_reasons,
}
# The driver measures these for 20 ms a call.
PCIE_QUERIES: Queries = {
    "pcie_sent": lambda h: require_available(nv.nvmlDeviceGetPcieThroughput(h, nv.NVML_PCIE_UTIL_TX_BYTES)),
    "pcie_received": lambda h: require_available(nv.nvmlDeviceGetPcieThroughput(h, nv.NVML_PCIE_UTIL_RX_BYTES)),
}


def query_all(queries: Queries, handle: Any) -> dict[str, Reading[Any]]:
    return {name: query(question, handle) for name, question in queries.items()}


def query_utilization_and_memory(handle: Any) -> dict[str, Reading[Any]]:
    """What one call tells of several readings: how busy, and the memory."""
    rates = query(utilization_rates, handle)
    held = query(memory_info, handle)
    answers = {
        name: rates if rates.value is None else query(checked_percent, getattr(rates.value, part))
        for name, part in (("busy", "gpu"), ("memory_busy", "memory"))
    }
    for place, name in enumerate(("memory_used", "memory_total", "memory_reserved")):
        value = None if held.value is None else held.value[place]
        answers[name] = Reading(value, held.time, held.reason or (None if value is not None else Missing.NOT_SUPPORTED))
    return answers


class GpmReader:
    """What NVML's GPM tells of one GPU: how much of it really works, from the difference of two samples. Hopper and
    later have it."""

    def __init__(self) -> None:
        self._previous_sample: Any = None
        self._next_sample: Any = None
        self._sampled_at = 0.0
        self._request = nv.c_nvmlGpmMetricsGet_t()

    def start(self, handle: Any) -> None:
        """Take a first sample, where there is none yet."""
        if not self._sampled_at:
            query(self._take_first_sample, handle)

    def read(self, handle: Any) -> dict[str, Reading[Any]]:
        """What it did since the last call, or since `start`, for at least 0.1 s."""
        answer = query(self._read_metrics, handle)
        if answer.value is None:
            return dict.fromkeys(GPM_METRICS, answer)
        return {
            name: Reading(value, answer.time, None if value is not None else Missing.NOT_SUPPORTED)
            for name, value in answer.value.items()
        }

    def _take_first_sample(self, handle: Any) -> None:
        if not nv.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nv.NVMLError(nv.NVML_ERROR_NOT_SUPPORTED)
        if self._previous_sample is None:
            self._previous_sample, self._next_sample = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
        nv.nvmlGpmSampleGet(handle, self._previous_sample)
        self._sampled_at = time.monotonic()

    def _read_metrics(self, handle: Any) -> dict[str, float | None]:
        if not self._sampled_at:
            self._take_first_sample(handle)
        time.sleep(max(self._sampled_at + MIN_GPM_INTERVAL_SECONDS - time.monotonic(), 0.0))
        nv.nvmlGpmSampleGet(handle, self._next_sample)
        self._sampled_at = time.monotonic()
        request = self._request
        request.version, request.numMetrics = nv.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        request.sample1, request.sample2 = self._previous_sample, self._next_sample
        for place, metric in enumerate(GPM_METRICS.values()):
            request.metrics[place].metricId = metric
        nv.nvmlGpmMetricsGet(request)
        self._previous_sample, self._next_sample = self._next_sample, self._previous_sample
        return {
            name: round(metric.value, 1)
            if metric.nvmlReturn == nv.NVML_SUCCESS and math.isfinite(metric.value)
            else None
            for name, metric in zip(GPM_METRICS, request.metrics, strict=False)
        }


class NvmlProcess(NamedTuple):
    """A process as the driver lists it."""

    pid: int
    kind: str
    instance: int | None
    gpu_memory: Reading[int]


def running_processes(handle: Any) -> Reading[list[NvmlProcess]]:
    """Who computes or draws on a GPU; a process that does both computes."""
    compute = query(lambda: nv.nvmlDeviceGetComputeRunningProcesses(handle))
    graphics = query(lambda: nv.nvmlDeviceGetGraphicsRunningProcesses(handle))
    if compute.value is None:
        return compute
    found: dict[tuple[int, int | None], NvmlProcess] = {}
    for kind, listed in (("compute", compute), ("graphics", graphics)):
        for process in listed.value or []:
            held = process.usedGpuMemory
            known = held is not None and held not in VALUES_NOT_AVAILABLE
            instance = None if process.gpuInstanceId in VALUES_NOT_AVAILABLE else int(process.gpuInstanceId)
            used: Reading[int] = Reading(
                int(held) if known else None, listed.time, None if known else "the driver does not tell"
            )
            found.setdefault((process.pid, instance), NvmlProcess(int(process.pid), kind, instance, used))
    return Reading(list(found.values()), compute.time)


def _query_mig_instance(handle: Any, index: int) -> MigInstance:
    part = nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    load = query_utilization_and_memory(part)
    return MigInstance(
        decode(nv.nvmlDeviceGetUUID(part)),
        nv.nvmlDeviceGetGpuInstanceId(part),
        nv.nvmlDeviceGetComputeInstanceId(part),
        query(lambda: decode(nv.nvmlDeviceGetName(part))),
        load["memory_used"],
        load["memory_total"],
    )


def mig_instances(handle: Any) -> tuple[MigInstance, ...]:
    """The MIG instances of a divided GPU; not every place for one is taken."""
    places = query(lambda: nv.nvmlDeviceGetMaxMigDeviceCount(handle)).value or 0
    found = [query(_query_mig_instance, handle, place).value for place in range(places)]
    return tuple(one for one in found if one is not None)


@dataclass(frozen=True)
class DriverVersions:
    """The driver, set up in this process."""

    version: Reading[str]
    cuda: Reading[str]


def initialize() -> DriverVersions:
    """Raises DriverGoneError with one sentence where there is no driver to ask."""
    try:
        nv.nvmlInit()
    except nv.NVMLError as error:
        raise DriverUnavailableError(error_message(error)) from error
    return DriverVersions(query(lambda: decode(nv.nvmlSystemGetDriverVersion())), query(cuda_version))


def cuda_version() -> str:
    """The newest CUDA that the driver can run."""
    version = nv.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def gpu_count() -> int:
    """How many GPUs there are. Raises DriverGoneError."""
    try:
        return int(nv.nvmlDeviceGetCount())
    except nv.NVMLError as error:
        raise DriverUnavailableError(error_message(error)) from error


def open_gpu(index: int) -> Reading[tuple[Any, str]]:
    """A handle to ask of, and the GPU's UUID."""

    def opened() -> tuple[Any, str]:
        handle = nv.nvmlDeviceGetHandleByIndex(index)
        return handle, decode(nv.nvmlDeviceGetUUID(handle))

    return query(opened)
