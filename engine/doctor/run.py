"""Checks of one run: its preflight."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.schema import Config
from engine.distributed.node_plan import NodePlan
from engine.doctor.check import Check
from engine.gpus.allocation import GpuAllocation
from engine.launch.preflight import Preflight
from engine.utils.errors import Problem
from engine.utils.text import pluralize

# Checks of these sections of the config have names of their own; the others are named "config".
CHECK_NAMES = {"device": "devices", "data": "data"}
BUSY_GPUS_ADVICE = "select other GPUs with --gpus, or wait for them with --queue"


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
