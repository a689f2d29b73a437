"""All checks in turn, those first that are quick: what hangs holds up nothing that was found before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.doctor.check import Check, CheckState
from engine.doctor.gpus import count_nvidia_cards, driver_check, gpu_checks, no_driver_check, visible_devices_check
from engine.doctor.machine import machine_checks
from engine.doctor.run import (
    all_reduce_check,
    all_reduce_devices,
    checkpoint_check,
    data_check,
    device_check,
    loading_checks,
    probe_model_spec,
)
from engine.doctor.software import compatibility_checks, no_answer_check, python_check, torch_checks
from engine.gpus.allocation import first_snapshot, has_driver_library
from engine.gpus.monitor import open_monitor, recording_path
from engine.gpus.reservation import read_reservations
from engine.gpus.selection import CudaDevice, cuda_devices
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.visible_devices import visible_devices
from engine.utils.errors import UsageError
from engine.utils.helper_process import HelperError, HelperProcess, start_helper

# Each may take long on a server that is busy, or reads torch over a network.
DRIVER_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 60.0
CUDA_INIT_TIMEOUT_SECONDS = 30.0
ALL_REDUCE_TIMEOUT_SECONDS = 60.0


def examine(config: Config, root: Path) -> Iterator[list[Check]]:
    """The checks of one area after the other, for a run of this config in a folder below `root`. Raises UsageError."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with start_helper("engine.doctor.probe", env=environment) as torch:
        torch.send(probe_model_spec(config))
        yield list(machine_checks(root))
        look = _Examination(config, torch)
        yield look.gpus()
        yield look.torch()
        yield look.run(root)


class _Examination:
    """What is learnt on the way, and needed further on."""

    def __init__(self, config: Config, probe: HelperProcess) -> None:
        self._config, self._probe = config, probe
        self._snapshot: Snapshot | None = None
        self._devices: list[CudaDevice] = []
        self._torch_info: dict[str, Any] = {}
        self._cuda_info: dict[str, Any] = {}
        self._skip_reason: str | None = None

    def gpus(self) -> list[Check]:
        """Raises UsageError where $GPUTRAIN_NVML cannot be played back."""
        recorded = recording_path() is not None
        if not recorded and not has_driver_library():
            return [no_driver_check("its driver's library is not found", count_nvidia_cards())]
        monitor = open_monitor(SamplerOptions(activity=False))
        try:
            self._snapshot = first_snapshot(monitor, DRIVER_TIMEOUT_SECONDS)
        finally:
            monitor.close()
        checks = [driver_check(self._snapshot)]
        if self._snapshot is None:
            return checks
        held = read_reservations()
        checks += gpu_checks(self._snapshot.gpus, held)
        there = cuda_devices(self._snapshot, held)
        try:
            self._devices = visible_devices(there, os.environ)
            checks += visible_devices_check(os.environ, len(there), len(self._devices))
        except UsageError as error:
            problem = error.problems[0]
            checks.append(Check("GPUs", "visible", "problem", f"{problem.label}: {problem.reason}", problem.advice))
        if recorded:
            self._skip_reason = "GPUTRAIN_NVML plays a recording"
        return checks

    def torch(self) -> list[Check]:
        checks = [python_check()]
        try:
            self._torch_info = self._probe.receive(IMPORT_TIMEOUT_SECONDS)
        except HelperError as error:
            self._probe.close()
            self._skip_reason = "torch does not work"
            return [*checks, no_answer_check("torch", f"import of both: {error}")]
        checks += torch_checks(self._torch_info)
        if "torch" in self._torch_info["errors"]:
            self._skip_reason = "torch does not work"
            return checks
        try:
            self._cuda_info = self._probe.receive(CUDA_INIT_TIMEOUT_SECONDS)
        except HelperError as error:
            self._probe.close()
            self._skip_reason = "torch cannot set CUDA up"
            return [*checks, no_answer_check("CUDA", f"the set-up of CUDA: {error}")]
        return [*checks, *compatibility_checks(self._torch_info, self._cuda_info, self._snapshot, len(self._devices))]

    def run(self, root: Path) -> list[Check]:
        devices, chosen = device_check(self._config, self._devices)
        checks = [devices, *loading_checks(self._config, len(chosen) or self._config.device.ranks)]
        checks += [data] if (data := data_check(self._config)) is not None else []
        if "weights" in self._torch_info:
            checks.append(checkpoint_check(self._config, root, self._torch_info["weights"]))
        elif "model" in self._torch_info.get("errors", {}):
            found = f"{self._config.model.name} cannot be made: {self._torch_info['errors']['model']}"
            checks.append(
                Check("run", "checkpoints", "unknown", found, "try `gputrain run --dry-run` with this config")
            )
        return [*checks, self._all_reduce(devices.state, chosen)]

    def _all_reduce(self, device_state: CheckState, chosen: Sequence[CudaDevice]) -> Check:
        devices = all_reduce_devices(self._config, chosen)
        broken = self._skip_reason
        if device_state == "problem":
            broken = "the devices cannot be had"
        elif chosen and broken is None and not self._cuda_info.get("gpus"):
            broken = "torch cannot use the GPUs"
        if broken is not None:
            return Check("run", "all-reduce", "unknown", f"not tried: {broken}")
        self._probe.send({"devices": devices})
        try:
            return all_reduce_check(devices, self._probe.receive(ALL_REDUCE_TIMEOUT_SECONDS))
        except HelperError as error:
            return all_reduce_check(devices, {"error": str(error)})
