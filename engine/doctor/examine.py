"""All checks in turn, those first that are quick: what hangs holds up nothing that was found before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.doctor.check import Check, State
from engine.doctor.gpus import driver_check, gpu_checks, hidden_check, no_driver_check, nvidia_cards
from engine.doctor.machine import machine_checks
from engine.doctor.run import (
    checkpoint_check,
    data_check,
    device_check,
    expected_model,
    loading_checks,
    reduce_check,
    reduce_devices,
)
from engine.doctor.software import fit_checks, python_check, silent_check, torch_checks
from engine.gpus.allocation import driver_library, first_snapshot
from engine.gpus.monitor import open_monitor, recording_path
from engine.gpus.reservation import all_held
from engine.gpus.selection import Device, devices_of
from engine.gpus.snapshot import Snapshot, Wants
from engine.gpus.visible_devices import visible
from engine.utils.errors import UsageError
from engine.utils.helper_process import HelperError, HelperProcess, start_helper

# Each may take long on a server that is busy, or reads torch over a network.
DRIVER_SECONDS = 10.0
IMPORT_SECONDS = 60.0
CUDA_SECONDS = 30.0
REDUCE_SECONDS = 60.0


def examine(config: Config, root: Path) -> Iterator[list[Check]]:
    """The checks of one area after the other, for a run of this config in a folder below `root`. Raises UsageError."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with start_helper("engine.doctor.probe", env=environment) as torch:
        torch.send(expected_model(config))
        yield list(machine_checks(root))
        look = _Look(config, torch)
        yield look.gpus()
        yield look.torch()
        yield look.run(root)


class _Look:
    """What is learnt on the way, and needed further on."""

    def __init__(self, config: Config, torch: HelperProcess) -> None:
        self._config, self._torch = config, torch
        self._snapshot: Snapshot | None = None
        self._devices: list[Device] = []
        self._told: dict[str, Any] = {}
        self._cuda: dict[str, Any] = {}
        self._broken: str | None = None

    def gpus(self) -> list[Check]:
        """Raises UsageError where $GPUTRAIN_NVML cannot be played back."""
        recorded = recording_path() is not None
        if not recorded and not driver_library():
            return [no_driver_check("its driver's library is not found", nvidia_cards())]
        monitor = open_monitor(Wants(activity=False))
        try:
            self._snapshot = first_snapshot(monitor, DRIVER_SECONDS)
        finally:
            monitor.close()
        checks = [driver_check(self._snapshot)]
        if self._snapshot is None:
            return checks
        held = all_held()
        checks += gpu_checks(self._snapshot.gpus, held)
        there = devices_of(self._snapshot, held)
        try:
            self._devices = visible(there, os.environ)
            checks += hidden_check(os.environ, len(there), len(self._devices))
        except UsageError as error:
            problem = error.problems[0]
            checks.append(Check("GPUs", "visible", "problem", f"{problem.label}: {problem.reason}", problem.advice))
        if recorded:
            self._broken = "GPUTRAIN_NVML plays a recording"
        return checks

    def torch(self) -> list[Check]:
        checks = [python_check()]
        try:
            self._told = self._torch.receive(IMPORT_SECONDS)
        except HelperError as error:
            self._broken = "torch does not work"
            return [*checks, silent_check("torch", f"import of both: {error}")]
        checks += torch_checks(self._told)
        if "torch" in self._told["errors"]:
            self._broken = "torch does not work"
            return checks
        try:
            self._cuda = self._torch.receive(CUDA_SECONDS)
        except HelperError as error:
            self._broken = "torch cannot set CUDA up"
            return [*checks, silent_check("CUDA", f"the set-up of CUDA: {error}")]
        return [*checks, *fit_checks(self._told, self._cuda, self._snapshot, len(self._devices))]

    def run(self, root: Path) -> list[Check]:
        devices, chosen = device_check(self._config, self._devices)
        checks = [devices, *loading_checks(self._config, len(chosen) or self._config.device.ranks)]
        checks += [data] if (data := data_check(self._config)) is not None else []
        if "weights" in self._told:
            checks.append(checkpoint_check(self._config, root, self._told["weights"]))
        elif "model" in self._told.get("errors", {}):
            found = f"{self._config.model.name} cannot be made: {self._told['errors']['model']}"
            checks.append(
                Check("run", "checkpoints", "unknown", found, "try `gputrain run --dry-run` with this config")
            )
        return [*checks, self._reduce(devices.state, chosen)]

    def _reduce(self, found: State, chosen: Sequence[Device]) -> Check:
        devices = reduce_devices(self._config, chosen)
        broken = self._broken
        if found == "problem":
            broken = "the devices cannot be had"
        elif chosen and broken is None and not self._cuda.get("gpus"):
            broken = "torch cannot use the GPUs"
        if broken is not None:
            return Check("run", "all-reduce", "unknown", f"not tried: {broken}")
        self._torch.send({"devices": devices})
        try:
            return reduce_check(devices, self._torch.receive(REDUCE_SECONDS))
        except HelperError as error:
            return reduce_check(devices, {"error": str(error)})
