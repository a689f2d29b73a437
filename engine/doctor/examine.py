"""Run all checks of `gputrain doctor`, the quick ones first, so that one that hangs delays no earlier result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

from engine.config.schema import Config
from engine.distributed.node_plan import NodePlan
from engine.doctor.check import Check
from engine.doctor.gpus import count_nvidia_cards, driver_check, gpu_checks, no_driver_check
from engine.doctor.machine import machine_checks
from engine.doctor.software import (
    CudaInfo,
    TorchInfo,
    compatibility_checks,
    no_answer_check,
    no_training_check,
    python_check,
    torch_checks,
)
from engine.gpus.allocation import GpuAllocation
from engine.gpus.device_preview import preview_allocation
from engine.gpus.driver import has_driver_library
from engine.gpus.monitor import first_snapshot, open_monitor, recording_path
from engine.gpus.private_mount import private_folder_problem
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.visible_devices import visible_devices
from engine.launch.preflight import Preflight, run_preflight, with_input_keys
from engine.launch.request import RunRequest
from engine.queue.place import fixed_terms
from engine.utils.errors import Problem, UsageError
from engine.utils.helper_process import HelperError, HelperProcess, start_helper
from engine.utils.libraries import training_problem
from engine.utils.text import pluralize

# Generous for a busy server, or torch on a network file system.
DRIVER_TIMEOUT_SECONDS = 10.0
IMPORT_TIMEOUT_SECONDS = 60.0
CUDA_INIT_TIMEOUT_SECONDS = 30.0
# Checks of these sections of the config have names of their own; the others are named "config".
CHECK_NAMES = {"device": "devices", "data": "data"}
BUSY_GPUS_ADVICE = "select other GPUs with --gpus, or wait for them with --queue"


def examine(request: RunRequest) -> Iterator[list[Check]]:
    """Yield the checks of one area after the other, for a run of this request. Raises UsageError if $GPUTRAIN_NVML is
    invalid."""
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with start_helper("engine.doctor.probe", env=environment) as probe:
        yield list(machine_checks(request.runs_dir))
        has_driver, snapshot = recording_path() is not None or has_driver_library(), None
        if has_driver:
            with closing(open_monitor(SamplerOptions(activity=False))) as monitor:
                snapshot = first_snapshot(monitor, DRIVER_TIMEOUT_SECONDS)
        gpus, visible = examine_gpus(snapshot, has_driver=has_driver)
        yield gpus
        yield list(examine_torch(probe, snapshot, visible))
        if training_problem() is None:
            yield examine_run(request, snapshot)


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


def examine_torch(probe: HelperProcess, snapshot: Snapshot | None, visible: int) -> Iterator[Check]:
    """Check what `probe` finds; `visible` is the number of GPUs that CUDA_VISIBLE_DEVICES shows."""
    yield python_check()
    if (missing := training_problem()) is not None:
        yield no_training_check(missing.reason)
        return
    name, what = "torch", "the import failed"
    try:
        torch_info = probe.receive(TorchInfo, IMPORT_TIMEOUT_SECONDS)
        yield from torch_checks(torch_info)
        if "torch" not in torch_info.errors:
            name, what = "CUDA", "the initialization of CUDA failed"
            cuda_info = probe.receive(CudaInfo, CUDA_INIT_TIMEOUT_SECONDS)
            yield from compatibility_checks(torch_info, cuda_info, snapshot, visible)
    except HelperError as error:
        yield no_answer_check(name, f"{what}: {error}")
        probe.close()


def examine_run(request: RunRequest, snapshot: Snapshot | None) -> list[Check]:
    """Check the config, devices and data of a run."""
    request, allocation = with_input_keys(request), GpuAllocation()
    config = request.config

    def choose_gpus(wait: bool) -> list[CudaDevice]:
        nonlocal allocation
        try:
            allocation = preview_allocation(config.device.gpus, snapshot, wait=config.waits, terms=fixed_terms(config))
        except NotFreeError as error:
            reason = f"the run waits: {error.problems[0].reason}"
            allocation.warnings = [Problem("", reason, code="gpu-in-use")]
            raise
        return allocation.devices

    preflight = run_preflight(request, choose_gpus)
    return list(preflight_checks(config, preflight, allocation))


def problem_check(problem: Problem) -> Check:
    """Return a problem for which `gputrain run` refuses the config, in the same words."""
    name = CHECK_NAMES.get(problem.location.partition(".")[0], "config")
    found = f"{problem.label}: {problem.reason}" if problem.location else problem.reason
    return Check("run", name, "problem", found, problem.advice, refuses_run=True, code=problem.code)


def preflight_checks(config: Config, preflight: Preflight, allocation: GpuAllocation) -> Iterator[Check]:
    """Yield the problems of a preflight, and the devices and the data of the run if they have none."""
    # `engine.doctor.machine` reports the runs folder.
    checks = [problem_check(problem) for problem in preflight.problems if problem.location != "runs folder"]
    yield from checks
    names = {check.name for check in checks}
    if preflight.plan is not None and "devices" not in names:
        yield device_check(config, preflight.plan, allocation)
    elif preflight.plan is None and allocation.warnings:
        found = "; ".join(map(str, allocation.warnings))
        yield Check("run", "devices", "warning", found, BUSY_GPUS_ADVICE, code=allocation.warnings[0].code)
    for warning in preflight.warnings:
        name = warning.location.partition(".")[0] or "config"
        found = f"{warning.label}: {warning.reason}" if warning.location else warning.reason
        yield Check("run", name, "warning", found, warning.advice, code=warning.code)
    if preflight.counts is not None and "data" not in names:
        counts, data = preflight.counts, config.data
        where = "" if data.path is None else f" in {data.path}"
        found = f"{data.dataset}{where}: {pluralize(counts.train, 'training image')}, {counts.val} for validation"
        yield Check("run", "data", "ok", found)


def device_check(config: Config, plan: NodePlan, allocation: GpuAllocation) -> Check:
    """Report the devices that `device.gpus` resolves to."""
    found = f"{pluralize(plan.local_world_size, 'rank')} on the CPU"
    if allocation.devices:
        indices = ", ".join(str(device.index) for device in allocation.devices)
        found = f"{config.device.gpus} resolves to GPU {indices}"
    if allocation.warnings:
        # The reason for the CPU contains its advice.
        advice = "" if allocation.cpu_fallback else BUSY_GPUS_ADVICE
        found = "; ".join([found, *map(str, allocation.warnings)])
        return Check("run", "devices", "warning", found, advice, code=allocation.warnings[0].code)
    return Check("run", "devices", "ok", found)
