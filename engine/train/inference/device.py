"""Choice and reservation of the GPU for inference. Called by the commands `predict` and `evaluate`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from engine.base.errors import Problem, UsageError
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.reservation_entry import ReservedRank
from engine.gpus.selection import NotFreeError
from engine.gpus.visible_devices import show_devices


@contextmanager
def reserve_device(selection: str, run: str, notify: Callable[[Problem], object]) -> Iterator[str]:
    """Reserve the GPU that `selection`, a value of `device.gpus`, selects, and yield the name for `resolve_device`.

    "auto" is a free GPU, or the CPU if none is free; if none can be reserved, torch chooses the device. The GPU becomes
    the only one that CUDA shows to this process, so call it before CUDA is initialized. `run` is the run name that
    other users see. `notify` receives why no GPU is free or reserved, who shares it, and why it waits. Raises
    UsageError for several GPUs, and for one that does not exist or cannot be used.
    """

    # Called again and again with the same reason.
    @cache
    def notify_once(reason: str) -> None:
        notify(Problem("", f"waiting: {reason}", code="gpu-in-use"))

    check_one_device(selection)
    if selection == "cpu" or not torch.backends.cuda.is_built():
        yield selection if selection in ("auto", "cpu") else "cuda"
        return
    ranks = 1 if selection == "auto" else None
    try:
        allocation = allocate_devices(selection, run, wait=False, on_wait=notify_once, ranks=ranks)
    except NotFreeError as error:
        # Its advice is to wait, which only a training can.
        [problem] = error.problems
        raise UsageError.one(problem.location, problem.reason, "use auto or an index", code=problem.code) from error
    except UsageError as error:
        if selection != "auto":
            raise
        # Another user can make the shared folder of reservations unusable.
        problem = error.problems[0]
        notify(Problem("", f"no GPU is reserved: {problem.reason}", code=problem.code))
        yield selection
        return
    try:
        yield _use(allocation, selection, run, notify)
    finally:
        allocation.reservation.release()


def check_one_device(selection: str) -> None:
    """Raise UsageError if a selection may be of several GPUs, or is a device of torch."""
    if device := re.fullmatch(r"cuda(?::(\d+))?", selection):
        meant = f"--gpus {device[1]}" if device[1] else "--gpus free:1"
        raise UsageError.one("--gpus", f"there is no GPU {selection!r}; did you mean {meant}?", code="unknown-value")
    if selection == "all" or "," in selection or re.fullmatch(r"free:(?!1$)\d+", selection):
        reason = f"{selection} is not allowed: a trained model uses one GPU"
        raise UsageError.one("--gpus", reason, "use auto, cpu, free:1, an index or a UUID", code="not-supported")


def _use(allocation: GpuAllocation, selection: str, run: str, notify: Callable[[Problem], object]) -> str:
    """Show only the allocated GPU to CUDA, if it is used; return the name of the device."""
    for problem in allocation.reservation_problems if selection == "auto" else allocation.warnings:
        notify(problem)
    if not allocation.devices:
        return selection
    [gpu] = allocation.devices
    if gpu.unavailable is not None and selection == "auto":
        notify(Problem("", f"no GPU is free ({gpu.unavailable.message}); using the CPU", code="gpu-fallback"))
        allocation.reservation.release()
        return "cpu"
    show_devices([gpu.uuid], os.environ)
    allocation.reservation.publish_ranks([ReservedRank(run, 0, os.getpid(), gpu.uuid)])
    return "cuda"
