"""Run all checks of `gputrain doctor`, the quick ones first, so that one that hangs delays no earlier result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from engine.doctor.check import Check
from engine.doctor.gpus import count_nvidia_cards, driver_check, gpu_checks, no_driver_check, visible_devices_check
from engine.doctor.machine import machine_checks
from engine.doctor.run import (
    all_reduce_check,
    all_reduce_devices,
    preflight_checks,
)
from engine.doctor.software import (
    AllReduceRequest,
    AllReduceResult,
    CudaInfo,
    TorchInfo,
    compatibility_checks,
    no_answer_check,
    no_training_check,
    python_check,
    torch_checks,
)
from engine.gpus.allocation import UNMONITORED_WARNING, GpuAllocation
from engine.gpus.cpu_fallback import describe_driver_failure
from engine.gpus.device_preview import preview_allocation
from engine.gpus.monitor import first_snapshot, open_monitor, recording_path
from engine.gpus.private_mount import private_folder_problem
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.unmonitored import gpus_unknown_to_nvml, has_driver_library, mark_reserved
from engine.gpus.visible_devices import visible_devices
from engine.launch.input_keys import with_input_keys
from engine.launch.preflight import run_preflight
from engine.launch.request import RunRequest
from engine.queue.place import fixed_terms
from engine.utils.errors import Problem, UsageError
from engine.utils.helper_process import HelperError, HelperProcess, start_helper
from engine.utils.libraries import training_problem

# Generous for a busy server, or torch on a network file system.
DRIVER_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 60.0
CUDA_INIT_TIMEOUT_SECONDS = 30.0
ALL_REDUCE_TIMEOUT_SECONDS = 60.0


def examine(request: RunRequest) -> Iterator[list[Check]]:
    """Yield the checks of one area after the other, for a run of this request. Raises UsageError if $GPUTRAIN_NVML is
    invalid."""
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with start_helper("engine.doctor.probe", env=environment) as probe:
        yield list(machine_checks(request.runs_dir))
        examination = _Examination(request, probe)
        yield examination.gpus()
        yield examination.torch()
        if training_problem() is None:
            yield examination.run()


class _Examination:
    """One examination: what earlier checks found out is used by later ones."""

    def __init__(self, request: RunRequest, probe: HelperProcess) -> None:
        self._request = with_input_keys(request)
        self._config, self._probe = self._request.config, probe
        self._snapshot: Snapshot | None = None
        self._devices: list[CudaDevice] = []
        self._torch_info = TorchInfo()
        self._cuda_info: CudaInfo | None = None
        self._skip_reason: str | None = None

    def gpus(self) -> list[Check]:
        """Check the NVIDIA driver and every GPU. Raises UsageError if $GPUTRAIN_NVML is invalid."""
        recorded = recording_path() is not None
        has_driver = recorded or has_driver_library()
        if has_driver:
            monitor = open_monitor(SamplerOptions(activity=False))
            try:
                self._snapshot = first_snapshot(monitor, DRIVER_TIMEOUT_SECONDS)
            finally:
                monitor.close()
        ignored: list[Problem] = []
        reservations = read_reservations(report=ignored.append)
        ignored += [private] if has_driver and (private := private_folder_problem()) is not None else []
        checks = [Check("GPUs", "reservations", "warning", str(problem), code=problem.code) for problem in ignored]
        if not recorded and (unmonitored := gpus_unknown_to_nvml(self._snapshot)):
            self._devices = mark_reserved(unmonitored, reservations)
            found = f"{UNMONITORED_WARNING} ({describe_driver_failure(self._snapshot)})"
            return [Check("GPUs", "driver", "warning", found, code="not-monitored"), *checks]
        if not has_driver:
            return [no_driver_check("libnvidia-ml.so.1 not found", count_nvidia_cards()), *checks]
        checks = [driver_check(self._snapshot), *checks]
        if self._snapshot is None:
            return checks
        checks += gpu_checks(self._snapshot.gpus, reservations)
        devices = cuda_devices(self._snapshot, reservations)
        try:
            self._devices = visible_devices(devices, os.environ)
            checks += visible_devices_check(os.environ, len(devices), len(self._devices))
        except UsageError as error:
            problem = error.problems[0]
            found = f"{problem.label}: {problem.reason}"
            checks.append(Check("GPUs", "visible", "problem", found, problem.advice, code=problem.code))
        if recorded:
            self._skip_reason = "GPUTRAIN_NVML replays a recording"
        return checks

    def torch(self) -> list[Check]:
        checks = [python_check()]
        if (missing := training_problem()) is not None:
            return [*checks, no_training_check(missing.reason)]
        try:
            self._torch_info = self._probe.receive(TorchInfo, IMPORT_TIMEOUT_SECONDS)
        except HelperError as error:
            self._probe.close()
            self._skip_reason = "torch does not work"
            return [*checks, no_answer_check("torch", f"the import failed: {error}")]
        checks += torch_checks(self._torch_info)
        if "torch" in self._torch_info.errors:
            self._skip_reason = "torch does not work"
            return checks
        try:
            self._cuda_info = self._probe.receive(CudaInfo, CUDA_INIT_TIMEOUT_SECONDS)
        except HelperError as error:
            self._probe.close()
            self._skip_reason = "torch cannot initialize CUDA"
            return [
                *checks,
                no_answer_check("CUDA", f"the initialization of CUDA failed: {error}"),
            ]
        return [*checks, *compatibility_checks(self._torch_info, self._cuda_info, self._snapshot, len(self._devices))]

    def run(self) -> list[Check]:
        allocation, device = GpuAllocation(), self._config.device

        def choose_gpus(wait: bool) -> list[CudaDevice]:
            nonlocal allocation
            try:
                allocation = preview_allocation(
                    device.gpus, self._snapshot, wait=self._config.waits, terms=fixed_terms(self._config)
                )
            except NotFreeError as error:
                reason = f"the run waits: {error.problems[0].reason}"
                allocation.warnings = [Problem("", reason, code="gpu-in-use")]
                raise
            return allocation.devices

        preflight = run_preflight(self._request, choose_gpus)
        checks = list(preflight_checks(self._config, preflight, allocation))
        return [*checks, self._all_reduce(allocation.devices, devices_known=preflight.plan is not None)]

    def _all_reduce(self, chosen: Sequence[CudaDevice], *, devices_known: bool) -> Check:
        devices = all_reduce_devices(self._config, chosen)
        reason = self._skip_reason
        if not devices_known:
            reason = "the preflight found no devices; fix the problems above"
        elif chosen and reason is None and (self._cuda_info is None or not self._cuda_info.gpus):
            reason = "torch cannot use the GPUs"
        if reason is not None:
            return Check("run", "all-reduce", "unknown", f"skipped: {reason}", code="not-examined")
        self._probe.send(AllReduceRequest(devices=devices))
        try:
            return all_reduce_check(devices, self._probe.receive(AllReduceResult, ALL_REDUCE_TIMEOUT_SECONDS))
        except HelperError as error:
            return all_reduce_check(devices, AllReduceResult(error=str(error)))
