"""NVML queries, called only by `sampler`. A failed query returns a reading with the reason instead of raising.

`snapshot.Gpu` declares each reading, its unit and its `nvidia-smi --query-gpu=` field. NVML reference:
https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pynvml as nv

from engine.base.errors import CodedError
from engine.gpus.snapshot import Measurement, MigInstance, Missing, current_time, with_units

# NVML_VALUE_NOT_AVAILABLE is -1, so unsigned 32-bit and 64-bit fields without a value have all bits set.
VALUES_NOT_AVAILABLE = (2**32 - 1, 2**64 - 1)
MAX_VALUE = 2**53  # of a `Count`; a snapshot with a larger one cannot be read
WSL_DEVICE = Path("/dev/dxg")  # the GPUs of WSL 2
# Bits of nvmlClocksThrottleReason*; nvidia-smi shows them as `clocks_throttle_reasons.*`.
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


class DriverUnavailableError(CodedError):
    """NVML is unusable in this process; only a new process can initialize it again. The message says why."""

    code = "driver-unavailable"


def unavailable_reason(error: Exception) -> str:
    """Map an NVML error to the reason of a missing value. Raises DriverUnavailableError if NVML became unusable."""
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
    """Return the text of an NVML error, lowercase and without a period."""
    if getattr(error, "value", None) == nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "driver/library version mismatch; reboot to load the kernel module that matches the driver library"
    return str(error).strip().rstrip(".").lower()


def query(call: Callable[..., Any], *args: Any) -> Measurement[Any]:
    """Call an NVML function and return its result as a reading. Raises DriverUnavailableError if NVML is unusable."""
    now = current_time()
    try:
        return Measurement(call(*args), now)
    except ImplausibleValueError as error:
        return Measurement(None, now, str(error))
    # AttributeError: the installed nvidia-ml-py is too old to have the function.
    except (nv.NVMLError, nv.NVMLLibraryMismatchError, AttributeError) as error:
        return Measurement(None, now, unavailable_reason(error))


class ImplausibleValueError(Exception):
    """NVML returned a placeholder for "not available", or a value outside of the possible range."""


def require_available(value: float) -> float:
    """Return `value`. Raises ImplausibleValueError if it is NVML's placeholder for "not available", or too large."""
    if value in VALUES_NOT_AVAILABLE:
        raise ImplausibleValueError("not available")
    if value > MAX_VALUE:
        raise ImplausibleValueError(f"implausible value from the driver: {value}")
    return value


def checked_percent(value: float) -> float:
    """Return `value`. Raises ImplausibleValueError if it is above 100."""
    if require_available(value) > 100:
        raise ImplausibleValueError(f"implausible value from the driver: {value} %")
    return value


def watts(milliwatts: int) -> float:
    """Convert NVML's milliwatts to watts."""
    return round(require_available(milliwatts) / 1000, 3)


def decode(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def throttle_reason_names(mask: int) -> tuple[str, ...]:
    """Return the names of the throttle reasons in an NVML bit mask, including "idle"."""
    names = tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)
    unknown_bits = mask & ~sum(THROTTLE_REASONS)
    return (*names, f"unknown (0x{unknown_bits:x})") if unknown_bits else names


def memory_info(handle: Any) -> tuple[int, int, int | None]:
    """Return used, total and reserved device memory in bytes (nvidia-smi `memory.used`, `.total` and `.reserved`).

    ``nvmlDeviceGetMemoryInfo_v2`` reports reserved memory separately, as nvidia-smi does. Drivers without it count
    reserved memory as used, and reserved is None.
    """
    try:
        info = nv.nvmlDeviceGetMemoryInfo(handle, nv.nvmlMemory_v2)
        return (
            int(require_available(info.used)),
            int(require_available(info.total)),
            int(require_available(info.reserved)),
        )
    except (nv.NVMLError_FunctionNotFound, AttributeError):
        info = nv.nvmlDeviceGetMemoryInfo(handle)
        return int(require_available(info.used)), int(require_available(info.total)), None


def host_memory() -> tuple[int, int, int | None]:
    """Return used and total memory of the host in bytes, in place of `memory_info` for an integrated GPU.

    The GPU can allocate MemAvailable of /proc/meminfo: https://docs.nvidia.com/dgx/dgx-spark/known-issues.html
    """
    # Takes 15 ms to import.
    import psutil

    host = psutil.virtual_memory()
    return host.total - host.available, host.total, None


def mig_mode(handle: Any) -> str:
    """Return "on" or "off" (nvidia-smi `mig.mode.current`, ``nvmlDeviceGetMigMode``)."""
    return "on" if nv.nvmlDeviceGetMigMode(handle)[0] == nv.NVML_DEVICE_MIG_ENABLE else "off"


def display_user(handle: Any) -> str:
    """Return "desktop" if a display is active on the GPU (nvidia-smi `display_active`), "Windows" in WSL 2, or "none".

    ``nvmlDeviceGetDisplayActive``. Windows uses the memory of every GPU, also without a display.
    """
    if WSL_DEVICE.exists():
        return "Windows"
    return "desktop" if nv.nvmlDeviceGetDisplayActive(handle) == nv.NVML_FEATURE_ENABLED else "none"


def ecc_errors(handle: Any, kind: int) -> int:
    """Return the number of ECC errors since the driver was loaded (nvidia-smi `ecc.errors.*.volatile.total`).

    `kind` is ``NVML_MEMORY_ERROR_TYPE_CORRECTED`` or ``NVML_MEMORY_ERROR_TYPE_UNCORRECTED``.
    """
    return int(require_available(nv.nvmlDeviceGetTotalEccErrors(handle, kind, nv.NVML_VOLATILE_ECC)))


def throttle_reasons(handle: Any) -> tuple[str, ...]:
    """Return the reasons that currently limit the clocks (nvidia-smi `clocks_throttle_reasons.active`).

    Drivers before R535 lack its newer name, ``nvmlDeviceGetCurrentClocksEventReasons``.
    """
    return throttle_reason_names(nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def temperature(handle: Any) -> int:
    """Return the core temperature in °C (nvidia-smi `temperature.gpu`, ``nvmlDeviceGetTemperature``)."""
    return int(require_available(nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)))


def performance_state(handle: Any) -> str:
    """Return P0 (highest performance) to P15 (nvidia-smi `pstate`, ``nvmlDeviceGetPerformanceState``)."""
    state = nv.nvmlDeviceGetPerformanceState(handle)
    if state == nv.NVML_PSTATE_UNKNOWN:
        raise ImplausibleValueError("not available")
    return f"P{state}"


def active_nvlinks(handle: Any) -> int:
    """Return the number of active NVLinks (`nvidia-smi nvlink --status`, ``nvmlDeviceGetNvLinkState``)."""
    active = 0
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            active += nv.nvmlDeviceGetNvLinkState(handle, link) == nv.NVML_FEATURE_ENABLED
        except (nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument):
            if link == 0:
                raise
            break
    return active


def memory_temperature(handle: Any) -> int:
    """Return the temperature of the device memory in °C (nvidia-smi `temperature.memory`)."""
    [field] = nv.nvmlDeviceGetFieldValues(handle, [nv.NVML_FI_DEV_MEMORY_TEMP])
    if field.nvmlReturn != nv.NVML_SUCCESS:
        raise nv.NVMLError(field.nvmlReturn)
    # NVML sets only the low bytes of a shorter type, and nvidia-ml-py passes zeros.
    return int(require_available(field.value.ullVal))


Queries = Mapping[str, Callable[[Any], Any]]

# Queried once per GPU.
STATIC_QUERIES: Queries = {
    "name": lambda h: decode(nv.nvmlDeviceGetName(h)),
    "pci_bus_id": lambda h: decode(nv.nvmlDeviceGetPciInfo(h).busId),
    "compute_capability": lambda h: ".".join(map(str, nv.nvmlDeviceGetCudaComputeCapability(h))),
    "max_sm_clock": lambda h: require_available(nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_SM)),
    "max_memory_clock": lambda h: require_available(nv.nvmlDeviceGetMaxClockInfo(h, nv.NVML_CLOCK_MEM)),
    "max_pcie_generation": lambda h: require_available(nv.nvmlDeviceGetMaxPcieLinkGeneration(h)),
    "max_pcie_width": lambda h: require_available(nv.nvmlDeviceGetMaxPcieLinkWidth(h)),
}
# Queried every `sampler.INFREQUENT_INTERVAL_SECONDS`.
INFREQUENT_QUERIES: Queries = {
    "power_limit": lambda h: watts(nv.nvmlDeviceGetEnforcedPowerLimit(h)),
    "ecc_corrected": lambda h: ecc_errors(h, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": lambda h: ecc_errors(h, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "pcie_generation": lambda h: require_available(nv.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    "pcie_width": lambda h: require_available(nv.nvmlDeviceGetCurrPcieLinkWidth(h)),
    "pcie_replays": lambda h: require_available(nv.nvmlDeviceGetPcieReplayCounter(h)),
    "nvlinks": active_nvlinks,
    "memory_temperature": memory_temperature,
    "mig": mig_mode,
    "display": display_user,
}
# Queried in every round.
PERIODIC_QUERIES: Queries = {
    "temperature": temperature,
    "power": lambda h: watts(nv.nvmlDeviceGetPowerUsage(h)),
    "sm_clock": lambda h: require_available(nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_SM)),
    "memory_clock": lambda h: require_available(nv.nvmlDeviceGetClockInfo(h, nv.NVML_CLOCK_MEM)),
    "fan": lambda h: require_available(nv.nvmlDeviceGetFanSpeed(h)),
    "performance_state": performance_state,
    "throttle": throttle_reasons,
}
# Queried for GPUs without GPM. Each call blocks for 20 ms, the interval over which NVML measures.
PCIE_QUERIES: Queries = {
    "pcie_sent": lambda h: require_available(nv.nvmlDeviceGetPcieThroughput(h, nv.NVML_PCIE_UTIL_TX_BYTES)),
    "pcie_received": lambda h: require_available(nv.nvmlDeviceGetPcieThroughput(h, nv.NVML_PCIE_UTIL_RX_BYTES)),
}


def query_all(queries: Queries, handle: Any) -> dict[str, Measurement[Any]]:
    """Run all queries on a GPU and return their readings by name."""
    return {name: query(call, handle) for name, call in queries.items()}


def query_utilization_and_memory(handle: Any) -> dict[str, Measurement[Any]]:
    """Return the readings that share an NVML call: GPU and memory utilization, and memory use.

    Utilization is the percentage of the sampling period with a kernel running, or with memory accesses (nvidia-smi
    `utilization.gpu` and `utilization.memory`). NVML reports the utilization of integrated GPUs, but not their memory.
    """
    rates = query(lambda: nv.nvmlDeviceGetUtilizationRates(handle))
    memory = query(memory_info, handle)
    integrated = memory.reason == Missing.NOT_SUPPORTED and rates.value is not None
    if integrated:
        memory = query(host_memory)
    answers = {
        name: rates if rates.value is None else query(checked_percent, getattr(rates.value, field))
        for name, field in (("util", "gpu"), ("memory_util", "memory"))
    }
    answers["integrated"] = Measurement(integrated, memory.time)
    for index, name in enumerate(("memory_used", "memory_total", "memory_reserved")):
        value = None if memory.value is None else memory.value[index]
        answers[name] = Measurement(
            value, memory.time, memory.reason or (None if value is not None else Missing.NOT_SUPPORTED)
        )
    return answers


def _query_mig_device(handle: Any, index: int) -> tuple[Any, MigInstance]:
    mig_handle = nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
    readings = query_utilization_and_memory(mig_handle)
    return mig_handle, MigInstance(
        uuid=decode(nv.nvmlDeviceGetUUID(mig_handle)),
        gpu_instance=nv.nvmlDeviceGetGpuInstanceId(mig_handle),
        compute_instance=nv.nvmlDeviceGetComputeInstanceId(mig_handle),
        name=query(lambda: decode(nv.nvmlDeviceGetName(mig_handle))),
        **with_units({name: readings[name] for name in ("memory_used", "memory_total")}),
    )


def mig_devices(handle: Any) -> list[tuple[Any, MigInstance]]:
    """Return the MIG devices of a GPU in MIG mode with their handles. Device indices without a device are skipped."""
    max_count = query(lambda: nv.nvmlDeviceGetMaxMigDeviceCount(handle)).value or 0
    devices = [query(_query_mig_device, handle, index).value for index in range(max_count)]
    return [device for device in devices if device is not None]


def initialize() -> tuple[Measurement[str], Measurement[str]]:
    """Initialize NVML in this process. Return the versions of the driver, and of the newest CUDA that it supports
    (nvidia-smi `driver_version`, "CUDA Version").

    Raises DriverUnavailableError, with a one-line reason, if it cannot be initialized.
    """
    try:
        nv.nvmlInit()
    except nv.NVMLError as error:
        raise DriverUnavailableError(error_message(error)) from error
    return query(lambda: decode(nv.nvmlSystemGetDriverVersion())), query(cuda_version)


def cuda_version() -> str:
    """Return the newest CUDA version that the driver supports, such as 12.4."""
    version = nv.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def gpu_count() -> int:
    """Return the number of GPUs. Raises DriverUnavailableError."""
    try:
        return int(nv.nvmlDeviceGetCount())
    except nv.NVMLError as error:
        raise DriverUnavailableError(error_message(error)) from error


def open_gpu(index: int) -> tuple[Any, str]:
    """Return the NVML handle and the UUID of a GPU. `index` is in PCI bus order. A query."""
    handle = nv.nvmlDeviceGetHandleByIndex(index)
    return handle, decode(nv.nvmlDeviceGetUUID(handle))
