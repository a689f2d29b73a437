"""Inject faults into the ranks of a real run, without any hook in the product.

sitecustomize.py installs them in every process of a run. $GPUTRAIN_FAULT lists the faults as JSON: kind, rank, steps
and once. `Gputrain.inject_fault` sets it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from after_import import call_after_import


def trigger(kind: str, images: Any, channel: Any) -> Any:
    """Trigger one fault; return the images of the batch, changed for `nan`."""
    import torch

    if kind == "nan":
        return images * float("nan")
    if kind == "raise":
        raise ValueError("a fault of the test")
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind in ("hang", "slow"):
        time.sleep(10_000 if kind == "hang" else 0.05)
        return images
    if kind == "exit":
        os._exit(7)
    if kind in ("stop the run", "kill the run"):
        # The parent of a rank is the rank starter, whose parent is the supervisor.
        supervisor = psutil.Process(os.getppid()).ppid()
        os.kill(supervisor, signal.SIGTERM if kind == "stop the run" else signal.SIGKILL)
        # The step ends once the run must stop, or never: the rank is killed with its supervisor.
        while kind == "kill the run" or not channel.poll_requests().stop:
            time.sleep(0.01)
        return images
    if kind == "wait for a pause":
        while not channel.poll_requests().paused:
            time.sleep(0.01)
        return images
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "segfault": signal.SIGSEGV}[kind])
    return images


def install_faults(loop: Any, faults: list[dict[str, Any]]) -> None:
    """Patch `loop.forward_backward` to trigger each fault on its rank at its steps.

    `once` is the path of a marker file: the fault is triggered only if the file does not exist yet.
    """
    forward_backward = loop.forward_backward

    def faulty(trainer: Any, batch: Any, number: int) -> Any:
        for fault in faults:
            marker = fault["once"]
            if trainer.data.sampler.rank != fault["rank"] or trainer.data.position.step + 1 not in fault["steps"]:
                continue
            if marker is None or not Path(marker).exists():
                if marker is not None:
                    Path(marker).touch()
                batch = replace(batch, images=trigger(fault["kind"], batch.images, trainer.log.channel))
        return forward_backward(trainer, batch, number)

    loop.forward_backward = faulty


def install() -> None:
    faults = json.loads(os.environ["GPUTRAIN_FAULT"])
    call_after_import("engine.train.loop.loop", lambda loop: install_faults(loop, faults))
