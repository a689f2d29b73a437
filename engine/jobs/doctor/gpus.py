"""Checks of the NVIDIA driver and its GPUs: errors, other users, and throttled clocks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from engine.base.text import pluralize
from engine.base.units import format_bytes
from engine.gpus.current_use import find_current_use, find_doubt, find_missing_instances
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.snapshot import Gpu, Snapshot
from engine.jobs.doctor.check import Check, CheckState

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR_ID, DISPLAY_CLASS_PREFIX = "0x10de", "0x03"
NO_ANSWER_ADVICE = (
    "check for Xid errors with `sudo dmesg | grep -i xid`; a driver that hangs usually needs "
    "`sudo nvidia-smi --gpu-reset` or a reboot"
)
INSTALL_ADVICE = "make `nvidia-smi` work: install the NVIDIA driver, or start the container with `--gpus all`"
NO_INSTANCES_ADVICE = (
    "create instances with `sudo nvidia-smi mig -cgi PROFILE -C`, or turn MIG mode off with `sudo nvidia-smi -mig 0`"
)
OTHER_GPUS_ADVICE = "select other GPUs with --gpus, or wait for it with --queue"
USED_GPU_ADVICE = (
    "`gputrain gpus --processes` shows them, `nvidia-smi` on the host also those of containers; end what is left over, "
    f"{OTHER_GPUS_ADVICE}"
)
# By throttle reason, as `engine.gpus.nvml` names them. An idle GPU needs none.
THROTTLE_ADVICE = {
    "set clocks": "the GPU's clocks are locked: reset them with `sudo nvidia-smi -rgc -rac`",
    "power cap": "normal under full load; `nvidia-smi -q -d POWER` shows whether the power limit was lowered",
    "hardware slowdown": "the GPU is too hot or lacks power: check fans, airflow and power cables",
    "sync boost": "another GPU of the same sync boost group is throttled: check that GPU",
    "thermal": "the GPU is too hot: check fans and airflow",
    "hardware thermal": "the GPU is too hot: check fans and airflow immediately",
    "power brake": "the server limits the GPU's power: check the power supplies and the power cap of the server",
    "reliability": "the GPU's voltage is at the limit: no action is needed",
}


def driver_check(snapshot: Snapshot | None) -> Check:
    """`snapshot` is None if the driver did not answer."""
    name = "driver"
    if snapshot is None:
        return Check(
            "GPUs", name, "problem", "the NVIDIA driver does not answer", NO_ANSWER_ADVICE, code="driver-hangs"
        )
    if snapshot.error is not None:
        found = f"the NVIDIA driver is not available: {snapshot.error}"
        if snapshot.pending:
            return Check("GPUs", name, "problem", found, NO_ANSWER_ADVICE, code="driver-hangs")
        return no_driver_check(found, count_nvidia_cards())
    driver, cuda = snapshot.driver.value or "unknown", snapshot.cuda.value or "unknown"
    found = f"version {driver}, supports CUDA {cuda}, {pluralize(len(snapshot.gpus), 'GPU')}"
    if snapshot.source.notice is not None:
        return Check(
            "GPUs", name, "warning", f"{found}; {snapshot.source.notice}", "unset GPUTRAIN_NVML", code="not-monitored"
        )
    return Check("GPUs", name, "ok", found)


def no_driver_check(found: str, cards: int) -> Check:
    """Return the check of a host whose NVIDIA driver is not available: a problem if the host has NVIDIA cards."""
    if cards == 0:
        return Check("GPUs", "driver", "ok", f"no NVIDIA GPU ({found}): runs use the CPU")
    found = f"{found}, but this host has {pluralize(cards, 'NVIDIA card')}"
    return Check("GPUs", "driver", "problem", found, INSTALL_ADVICE, code="driver-unavailable")


def count_nvidia_cards() -> int:
    """Count the NVIDIA cards on the PCI bus, with or without a driver."""
    count = 0
    for device in PCI_DEVICES.glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == NVIDIA_VENDOR_ID and kind.startswith(DISPLAY_CLASS_PREFIX)
    return count


def gpu_checks(gpus: Sequence[Gpu], reservations: Sequence[ReservationInfo]) -> Iterator[Check]:
    """Yield the warnings and problems of each GPU, or that it is free."""
    for gpu in gpus:
        checks = list(_gpu_checks(gpu, reservations))
        name = str(gpu.value("name") or "GPU of unknown name")
        state = f", divided into {pluralize(len(gpu.instances), 'MIG instance')}" if gpu.mig_enabled else ", free"
        state += ", shares the memory of the host" if gpu.value("integrated") else ""
        for check in checks or [Check("GPUs", f"GPU {gpu.index}", "ok", name + state)]:
            yield replace(check, gpu=gpu.index)


def _gpu_checks(gpu: Gpu, reservations: Sequence[ReservationInfo]) -> Iterator[Check]:
    name = f"GPU {gpu.index}"
    if gpu.state != "ok":
        if gpu.state == "stale":
            found = f"no answer for {gpu.age:.0f} s"
            yield Check("GPUs", name, "problem", found, NO_ANSWER_ADVICE, code="driver-hangs")
        else:
            found = "lost: it has fallen off the bus, or was reset"
            yield Check("GPUs", name, "problem", found, NO_ANSWER_ADVICE, code="gpu-lost")
        return
    if (without_instances := find_missing_instances(gpu)) is not None:
        yield Check("GPUs", name, "warning", without_instances.message, NO_INSTANCES_ADVICE, code="gpu-failed")
        return
    if errors := gpu.value("ecc_uncorrected"):
        advice = "the GPU's memory is failing: see `nvidia-smi -q -d ECC,ROW_REMAPPER`, and reset or replace the GPU"
        found = f"{errors} uncorrected ECC error{'' if errors == 1 else 's'}"
        yield Check("GPUs", name, "problem", found, advice, code="gpu-memory-errors")
    for reason in gpu.value("throttle") or []:
        if reason != "idle":
            advice = THROTTLE_ADVICE.get(reason, "see `nvidia-smi -q -d PERFORMANCE`")
            yield Check("GPUs", name, "warning", f"clocks throttled: {reason}", advice, code="gpu-throttled")
    yield from _usage_checks(gpu, reservations)


def _usage_checks(gpu: Gpu, reservations: Sequence[ReservationInfo]) -> Iterator[Check]:
    """Yield who uses a GPU: the runs that have reserved it, then others."""
    name = f"GPU {gpu.index}"
    uuids = [gpu.uuid, *(instance.uuid for instance in gpu.instances)]
    runs = [reservation for reservation in reservations if reservation.holds(*uuids)]
    for run in runs:
        memory = f"{format_bytes(run.min_free)} " if run.min_free else ""
        found = f"{memory}reserved by run {run.run} (user {run.user})"
        if run.uid == os.getuid():
            yield Check("GPUs", name, "ok", found)
        else:
            yield Check("GPUs", name, "warning", found, OTHER_GPUS_ADVICE, code="gpu-reserved")
    if (use := find_current_use(gpu, sharers=runs)) is not None and not (gpu.mig_enabled and not gpu.processes.value):
        state: CheckState = "unknown" if gpu.processes.value is None else "warning"
        yield Check("GPUs", name, state, use.message, USED_GPU_ADVICE, code="gpu-in-use")
    elif not runs and not gpu.mig_enabled and (doubt := find_doubt(gpu)):
        yield Check("GPUs", name, "ok", f"counts as free: {doubt}")
