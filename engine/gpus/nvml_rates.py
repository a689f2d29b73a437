"""NVML metrics that are computed from two samples: GPM metrics, and the throughput of NVLink. Called by `sampler`."""

from __future__ import annotations

import time
from typing import Any

import pynvml as nv

from engine.gpus import nvml
from engine.gpus.snapshot import Measurement, Missing

MIN_GPM_INTERVAL_SECONDS = 0.1
GPM_METRICS = {
    "sm_active": nv.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": nv.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active": nv.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "pcie_sent": nv.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_received": nv.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_sent": nv.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_received": nv.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}
PCIE_THROUGHPUT = ("pcie_sent", "pcie_received")
NVLINK_THROUGHPUT = ("nvlink_sent", "nvlink_received")
# GPM reports throughput in MiB/s, NVLink counters count KiB.
GPM_SCALE = dict.fromkeys((*PCIE_THROUGHPUT, *NVLINK_THROUGHPUT), 2**20 / 1000)
KILOBYTES_PER_KIB = 1.024
ALL_NVLINKS = 2**32 - 1  # field values of NVLink are sums over all links with this scope ID


class GpmReader:
    """GPU Performance Monitoring (GPM) metrics of one GPU, computed from two samples. Requires Hopper or newer.

    With `gpu_instance`, a MIG GPU instance ID, the metrics are those of the instance. The handle is that of the GPU.

    https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html
    """

    def __init__(self, gpu_instance: int | None = None) -> None:
        self._gpu_instance = gpu_instance
        self._previous_sample: Any = None
        self._next_sample: Any = None
        self._sampled_at = 0.0
        self._request = nv.c_nvmlGpmMetricsGet_t()

    def start(self, handle: Any) -> None:
        """Take the first sample if there is none yet, so that the interval of `read` starts here."""
        if not self._sampled_at:
            nvml.query(self._take_first_sample, handle)

    def read(self, handle: Any) -> dict[str, Measurement[Any]]:
        """Return the metrics since the last call or `start`. Blocks until the interval is at least 0.1 s long."""
        answer = nvml.query(self._read_metrics, handle)
        if answer.value is None:
            return dict.fromkeys(GPM_METRICS, answer)
        return {
            name: Measurement(value, answer.time, None if value is not None else Missing.NOT_SUPPORTED)
            for name, value in answer.value.items()
        }

    def _take_first_sample(self, handle: Any) -> None:
        if not nv.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nv.NVMLError(nv.NVML_ERROR_NOT_SUPPORTED)
        if self._previous_sample is None:
            self._previous_sample, self._next_sample = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
        self._take_sample(handle, self._previous_sample)
        self._sampled_at = time.monotonic()

    def _take_sample(self, handle: Any, sample: Any) -> None:
        if self._gpu_instance is None:
            nv.nvmlGpmSampleGet(handle, sample)
        else:
            nv.nvmlGpmMigSampleGet(handle, self._gpu_instance, sample)

    def _read_metrics(self, handle: Any) -> dict[str, float | None]:
        if not self._sampled_at:
            self._take_first_sample(handle)
        time.sleep(max(self._sampled_at + MIN_GPM_INTERVAL_SECONDS - time.monotonic(), 0.0))
        self._take_sample(handle, self._next_sample)
        self._sampled_at = time.monotonic()
        request = self._request
        request.version, request.numMetrics = nv.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        request.sample1, request.sample2 = self._previous_sample, self._next_sample
        for index, metric in enumerate(GPM_METRICS.values()):
            request.metrics[index].metricId = metric
        nv.nvmlGpmMetricsGet(request)
        self._previous_sample, self._next_sample = self._next_sample, self._previous_sample
        return {
            name: round(metric.value * GPM_SCALE.get(name, 1.0), 1)
            if metric.nvmlReturn == nv.NVML_SUCCESS and abs(metric.value) < nvml.MAX_VALUE
            else None
            for name, metric in zip(GPM_METRICS, request.metrics, strict=False)
        }


class NvlinkReader:
    """NVLink throughput of one GPU without GPM, computed from two readings of its data counters."""

    def __init__(self) -> None:
        self._previous: tuple[float, list[int]] | None = None

    def read(self, handle: Any) -> dict[str, Measurement[Any]]:
        """Return the throughput since the last call."""
        answer = nvml.query(self._read_counters, handle)
        if answer.value is None:
            return dict.fromkeys(NVLINK_THROUGHPUT, answer)
        previous, self._previous = self._previous, answer.value
        if previous is None:
            return dict.fromkeys(NVLINK_THROUGHPUT, answer.without_value("measured from the second sample on"))
        seconds = answer.value[0] - previous[0]
        return {
            name: Measurement(round((after - before) * KILOBYTES_PER_KIB / seconds, 1), answer.time)
            if after >= before and seconds > 0
            else answer.without_value("the counter was reset")
            for name, before, after in zip(NVLINK_THROUGHPUT, previous[1], answer.value[1], strict=True)
        }

    @staticmethod
    def _read_counters(handle: Any) -> tuple[float, list[int]]:
        """Return the monotonic time, and the KiB that were sent and received."""
        fields = (nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        return time.monotonic(), nvml.field_values(handle, *((field, ALL_NVLINKS) for field in fields))
