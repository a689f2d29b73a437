"""NVML metrics that are computed from two samples: GPM metrics. Called by `sampler`."""

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
# GPM reports throughput in MiB/s.
GPM_SCALE = dict.fromkeys(("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received"), 2**20 / 1000)


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
