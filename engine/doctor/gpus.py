"""The driver and its GPUs: whether they answer, who holds them, what holds their clocks down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from engine.doctor.check import Check
from engine.gpus.reservation import ReservationInfo
from engine.gpus.selection import find_current_use
from engine.gpus.snapshot import Gpu, GpuProcess, Snapshot
from engine.utils.process import user_name
from engine.utils.text import pluralize

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR_ID, DISPLAY_CLASS_PREFIX = "0x10de", "0x03"
NO_ANSWER_ADVICE = (
    "look for Xid errors (`sudo dmesg | grep -i xid`); a hung driver mostly takes `sudo nvidia-smi --gpu-reset`, or a "
    "reboot"
)
INSTALL_ADVICE = "make `nvidia-smi` work: install NVIDIA's driver, or start the container with `--gpus all`"
MAX_COMMAND_CHARS = 60
# What holds clocks down, in the words of `engine.gpus.nvml`, and what to do about it; idleness is well.
THROTTLE_ADVICE = {
    "set clocks": "someone has set its clocks: `sudo nvidia-smi -rgc -rac` lets them go",
    "power cap": "common under full load; `nvidia-smi -q -d POWER` shows whether its limit was lowered",
    "hardware slowdown": "it is too hot or short of power: look at fans, air flow and power cables",
    "sync boost": "it waits for a GPU that it is coupled with: look at that one",
    "thermal": "it is too hot: look at fans and air flow",
    "hardware thermal": "it is too hot: look at fans and air flow now",
    "power brake": "the power supply holds it back: look at the server's power supplies and power cap",
    "reliability": "its voltage is at the limit; nothing to be done",
}


def driver_check(snapshot: Snapshot | None) -> Check:
    """`snapshot` is None where nothing was learnt of a driver that is there."""
    name = "driver"
    if snapshot is None:
        return Check("GPUs", name, "problem", "NVIDIA's driver does not answer", NO_ANSWER_ADVICE)
    if snapshot.error is not None:
        found = f"NVIDIA's driver cannot be asked: {snapshot.error}"
        if snapshot.pending:
            return Check("GPUs", name, "problem", found, NO_ANSWER_ADVICE)
        return no_driver_check(found, count_nvidia_cards())
    driver, cuda = snapshot.driver.value or "unknown", snapshot.cuda.value or "unknown"
    found = f"version {driver}, serves CUDA {cuda}, {pluralize(len(snapshot.gpus), 'GPU')}"
    if snapshot.source.notice is not None:
        return Check("GPUs", name, "warning", f"{found}; {snapshot.source.notice}", "unset GPUTRAIN_NVML")
    return Check("GPUs", name, "ok", found)


def no_driver_check(found: str, cards: int) -> Check:
    """Well on a machine without NVIDIA's cards, which trains on the CPU."""
    if cards == 0:
        return Check("GPUs", "driver", "ok", f"no NVIDIA GPU here ({found}): runs train on the CPU")
    there = f"{found}, and there {'is' if cards == 1 else 'are'} {pluralize(cards, 'NVIDIA card')} in this machine"
    return Check("GPUs", "driver", "problem", there, INSTALL_ADVICE)


def count_nvidia_cards() -> int:
    """On the PCI bus, whether a driver serves them or not."""
    found = 0
    for device in PCI_DEVICES.glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            found += vendor == NVIDIA_VENDOR_ID and kind.startswith(DISPLAY_CLASS_PREFIX)
    return found


def gpu_checks(gpus: Sequence[Gpu], reservations: Sequence[ReservationInfo]) -> Iterator[Check]:
    """For each GPU all that is not well, or that it is."""
    for gpu in gpus:
        found = list(_gpu_checks(gpu, reservations))
        name = str(gpu.value("name") or "GPU of unknown name")
        divided = f", divided into {pluralize(len(gpu.instances), 'MIG instance')}" if gpu.mig_enabled else ", free"
        for check in found or [Check("GPUs", f"GPU {gpu.index}", "ok", name + divided)]:
            yield replace(check, gpu=gpu.index)


def _gpu_checks(gpu: Gpu, reservations: Sequence[ReservationInfo]) -> Iterator[Check]:
    name = f"GPU {gpu.index}"
    if gpu.state != "ok":
        silent = gpu.state == "stale"
        found = f"it has not answered for {gpu.age:.0f} s" if silent else "it is lost: fallen off the bus, or reset"
        yield Check("GPUs", name, "problem", found, NO_ANSWER_ADVICE)
        return
    if errors := gpu.value("ecc_uncorrected"):
        advice = "its memory is failing: `nvidia-smi -q -d ECC,ROW_REMAPPER` tells more; reset it, or have it replaced"
        yield Check("GPUs", name, "problem", f"{pluralize(errors, 'ECC error')} that could not be corrected", advice)
    for word in gpu.value("throttle") or []:
        if word != "idle":
            advice = THROTTLE_ADVICE.get(word, "`nvidia-smi -q -d PERFORMANCE` tells more")
            yield Check("GPUs", name, "warning", f"its clocks are held down: {word}", advice)
    yield from _usage_checks(gpu, reservations)


def _usage_checks(gpu: Gpu, reservations: Sequence[ReservationInfo]) -> Iterator[Check]:
    """Who has it: runs that reserved it, then other processes that compute on it."""
    name, me = f"GPU {gpu.index}", user_name()
    uuids = {gpu.uuid, *(instance.uuid for instance in gpu.instances)}
    runs = [one for one in reservations if uuids & set(one.gpus)]
    for one in runs:
        found = f"the run {one.run} of {one.user} has it"
        if one.user == me:
            yield Check("GPUs", name, "ok", found)
        else:
            yield Check("GPUs", name, "warning", found, "leave it out (--gpus), or wait for it (--wait)")
    processes = gpu.processes.value or ()
    others = [one for one in processes if one.kind == "compute" and one.run is None]
    yield from (_process_check(name, other, me) for other in others)
    if not runs and not processes and not gpu.mig_enabled and (use := find_current_use(gpu)) is not None:
        unknown = gpu.processes.value is None
        advice = "`nvidia-smi` on the host, outside of containers, may show who"
        yield Check("GPUs", name, "unknown" if unknown else "warning", use.message, advice)


def _process_check(name: str, process: GpuProcess, own_user: str) -> Check:
    command = "" if process.command.value is None else f" ({process.command.value[:MAX_COMMAND_CHARS]})"
    if process.user.value is None:
        found = f"process {process.pid} computes on it ({process.user.reason})"
        return Check("GPUs", name, "warning", found, "leave it out (--gpus), or wait for it (--wait)")
    found = f"process {process.pid} of {process.user.value} computes on it{command}"
    if process.user.value == own_user:
        return Check("GPUs", name, "warning", found, f"if it is a leftover of yours, end it: `kill {process.pid}`")
    advice = f"leave it out (--gpus), wait for it (--wait), or ask {process.user.value}"
    return Check("GPUs", name, "warning", found, advice)


def visible_devices_check(environ: Mapping[str, str], total: int, visible: int) -> Iterator[Check]:
    """What CUDA_VISIBLE_DEVICES takes away."""
    if "CUDA_VISIBLE_DEVICES" in environ and visible < total:
        value = environ["CUDA_VISIBLE_DEVICES"]
        found = f"CUDA_VISIBLE_DEVICES={value!r} shows {visible} of {pluralize(total, 'GPU')}"
        yield Check("GPUs", "visible", "warning", found, "unset CUDA_VISIBLE_DEVICES unless that is wanted")
