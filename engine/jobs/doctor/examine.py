"""Run all checks of `gputrain doctor`, the quick ones first, so that one that hangs delays no earlier result."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from engine.base.errors import Problem, UsageError
from engine.base.helper_process import HelperError, HelperProcess, start_helper
from engine.base.libraries import training_problem
from engine.gpus.driver import has_driver_library
from engine.gpus.monitor import first_snapshot, open_monitor, recording_path
from engine.gpus.private_mount import private_folder_problem
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.selection import cuda_devices
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.visible_devices import visible_devices
from engine.jobs.doctor.check import Check
from engine.jobs.doctor.gpus import count_nvidia_cards, driver_check, gpu_checks, no_driver_check
from engine.jobs.doctor.machine import machine_checks
from engine.jobs.doctor.software import CudaInfo, Libraries, cuda_checks, installed_versions, libraries_check

# Generous for a busy server, or torch on a network file system.
DRIVER_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 60.0
CUDA_INIT_TIMEOUT_SECONDS = 30.0


def examine(runs_dir: Path) -> Iterator[list[Check]]:
    """Yield the checks of one area after the other. Raises UsageError if $GPUTRAIN_NVML is invalid."""
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with start_helper("engine.jobs.doctor.probe", env=environment) as probe:
        yield list(machine_checks(runs_dir))
        has_driver, snapshot = recording_path() is not None or has_driver_library(), None
        if has_driver:
            with closing(open_monitor(SamplerOptions(activity=False))) as monitor:
                snapshot = first_snapshot(monitor, DRIVER_TIMEOUT_SECONDS)
        gpus, visible = examine_gpus(snapshot, has_driver=has_driver)
        yield gpus
        yield list(examine_torch(probe, 0 if snapshot is None else len(snapshot.gpus), visible))


def examine_gpus(snapshot: Snapshot | None, *, has_driver: bool) -> tuple[list[Check], int]:
    """Check the NVIDIA driver and every GPU, and return how many are visible. Without a `snapshot` the driver does not
    answer."""
    ignored: list[Problem] = []
    reservations = read_reservations(report=ignored.append)
    ignored += [private] if has_driver and (private := private_folder_problem()) is not None else []
    checks = [Check("GPUs", "reservations", "warning", str(problem), code=problem.code) for problem in ignored]
    if not has_driver:
        return [no_driver_check("libnvidia-ml.so.1 not found", count_nvidia_cards()), *checks], 0
    checks = [driver_check(snapshot), *checks]
    if snapshot is None:
        return checks, 0
    checks += gpu_checks(snapshot.gpus, reservations)
    visible = 0
    try:
        visible = len(visible_devices(cuda_devices(snapshot, reservations), os.environ))
    except UsageError as error:
        problem = error.problems[0]
        found = f"{problem.label}: {problem.reason}"
        checks.append(Check("GPUs", "visible", "problem", found, problem.advice, code=problem.code))
    return checks, visible


def examine_torch(probe: HelperProcess, gpus: int, visible: int) -> Iterator[Check]:
    """Check what `probe` finds on a host with some GPUs; `visible` is how many of them CUDA_VISIBLE_DEVICES shows."""
    yield Check("torch", "gputrain", "ok", f"{version('gputrain')} on Python {platform.python_version()}")
    if (missing := training_problem()) is not None:
        found = "this installation does not train; it monitors GPUs, and lists and compares runs"
        yield Check("torch", "training", "warning", found, missing.reason, code="not-installed")
        return
    name = "torch"
    try:
        libraries = probe.receive(Libraries, IMPORT_TIMEOUT_SECONDS)
        yield libraries_check(libraries)
        if not libraries.error:
            name = "CUDA"
            yield from cuda_checks(probe.receive(CudaInfo, CUDA_INIT_TIMEOUT_SECONDS), gpus, visible)
    except HelperError as error:
        advice = "run `python -c 'import torch, torchvision; torch.cuda.init()'` to see where it hangs or fails"
        yield Check("torch", name, "problem", f"{installed_versions()}: {error}", advice, code="library-failed")
        probe.close()
