"""Choice and reservation of the GPU for inference. Called by the commands `predict` and `evaluate`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.reservation_reader import ReservedRank
from engine.gpus.visible_devices import show_devices
from engine.utils.errors import Problem, UsageError


@contextmanager
def reserve_device(name: str, run: str, notify: Callable[[Problem], object]) -> Iterator[str]:
    """Reserve a free GPU for "auto" and "cuda", and yield the device name for `resolve_device`.

    If no GPU is free, "auto" becomes "cpu", and "cuda" shares a GPU. The GPU becomes the only one that CUDA shows to
    this process, so call it before CUDA is initialized. If none can be reserved, torch chooses the device. `run` is the
    run name that other users see. `notify` receives why no GPU is free or reserved, and why it waits.
    """
    is_waiting = False

    def notify_once(reason: str) -> None:
        nonlocal is_waiting
        if not is_waiting:
            is_waiting = True
            notify(Problem("", f"waiting: {reason}", code="gpu-in-use"))

    if name not in ("auto", "cuda") or not torch.backends.cuda.is_built():
        yield name
        return
    try:
        allocation = allocate_devices("auto", run, wait=False, on_wait=notify_once, ranks=1)
    except UsageError as error:
        # Another user can make the shared folder of reservations unusable.
        problem = error.problems[0]
        notify(Problem("", f"no GPU is reserved: {problem.reason}", code=problem.code))
        yield name
        return
    try:
        name = _use(allocation, name, run, notify)
        yield name
    finally:
        allocation.reservation.release()


def _use(allocation: GpuAllocation, name: str, run: str, notify: Callable[[Problem], object]) -> str:
    """Show only the allocated GPU to CUDA, if it is used; return the name of the device."""
    for problem in allocation.reservation_problems:
        notify(problem)
    if not allocation.devices:
        return name
    [gpu] = allocation.devices
    if gpu.unavailable is not None:
        reason = f"no GPU is free ({gpu.unavailable.message})"
        if name != "auto":
            notify(Problem("", f"{reason}; using GPU {gpu.index}", code="gpu-in-use"))
        else:
            notify(Problem("", f"{reason}; using the CPU", code="gpu-fallback"))
            allocation.reservation.release()
            return "cpu"
    show_devices([gpu.uuid], os.environ)
    allocation.reservation.publish_ranks([ReservedRank(run, 0, os.getpid(), gpu.uuid)])
    return name
