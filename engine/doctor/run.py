"""Checks of one run: its preflight and an all-reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.config.schema import Config
from engine.distributed.node_plan import NodePlan
from engine.doctor.check import Check
from engine.doctor.software import AllReduceResult
from engine.gpus.allocation import GpuAllocation
from engine.gpus.selection import CudaDevice
from engine.launch.preflight import Preflight
from engine.utils.errors import Problem
from engine.utils.host import MAX_RANKS_PER_CORE, available_cores
from engine.utils.text import pluralize
from engine.utils.units import format_bytes

# Checks of these sections of the config have names of their own; the others are named "config".
CHECK_NAMES = {"device": "devices", "data": "data"}
MIN_GPU_BUS_BYTES_PER_SECOND = 2e9  # slower than PCIe through host memory
BUSY_GPUS_ADVICE = "select other GPUs with --gpus, or wait for them with --queue"
NCCL_ADVICE = (
    "set NCCL_DEBUG=INFO to see where it hangs; if GPUs cannot reach each other, try NCCL_P2P_DISABLE=1 and disable "
    "IOMMU or ACS in the BIOS; `nvidia-smi topo -m` shows how they are connected"
)


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


def all_reduce_devices(config: Config, chosen: Sequence[CudaDevice]) -> list[str]:
    """Return the UUIDs of the chosen GPUs, else "cpu" for each rank of the run, at least two."""
    max_ranks = MAX_RANKS_PER_CORE * available_cores()
    return [device.uuid for device in chosen] or ["cpu"] * max(min(config.device.ranks, max_ranks), 2)


def all_reduce_check(devices: Sequence[str], outcome: AllReduceResult) -> Check:
    """Report the outcome of `engine.doctor.probe.all_reduce` between devices."""
    on_gpu, number, name = devices[0] != "cpu", len(devices), "all-reduce"
    among = pluralize(number, "GPU") if on_gpu else f"{number} ranks on the CPU"
    backend = "NCCL" if on_gpu else "gloo"
    advice = NCCL_ADVICE if on_gpu else "check that neither a firewall nor GLOO_SOCKET_IFNAME blocks the interface lo"
    if outcome.error is not None:
        return Check(
            "run",
            name,
            "problem",
            f"{backend} between {among} failed: {outcome.error}",
            advice,
            code="library-failed",
        )
    if not outcome.right:
        return Check(
            "run", name, "problem", f"{backend} between {among} returned a wrong sum", advice, code="wrong-result"
        )
    if number == 1:
        return Check("run", name, "ok", f"{backend} works on one GPU; a single rank has nothing to reduce")
    bandwidth = bus_bandwidth(number, outcome.size_bytes, outcome.seconds)
    found = f"{format_bytes(outcome.size_bytes)} between {among} with {backend}: {bandwidth / 1e9:.3g} GB/s on the bus"
    if on_gpu and bandwidth < MIN_GPU_BUS_BYTES_PER_SECOND:
        return Check("run", name, "warning", f"{found}, which is slow", advice, code="slow-network")
    return Check("run", name, "ok", found)


def bus_bandwidth(ranks: int, size_bytes: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second as nccl-tests defines it, independent of the number of ranks."""
    return 2 * (ranks - 1) / ranks * size_bytes / seconds
