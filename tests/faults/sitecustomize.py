"""Inject faults into the ranks of a real run, without any hook in the product.

With this folder on PYTHONPATH, Python imports this file in every process of a run. $GPUTRAIN_FAULT lists the faults as
JSON: kind, rank, steps and once. `Gputrain.inject_fault` sets it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil


def trigger(kind: str, images: Any) -> Any:
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
        # A rank is forked by the fork server, which is a child of the supervisor.
        supervisor = psutil.Process(os.getppid()).ppid()
        os.kill(supervisor, signal.SIGTERM if kind == "stop the run" else signal.SIGKILL)
        return images
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "segfault": signal.SIGSEGV}[kind])
    return images


def install_faults(loop: Any, faults: list[dict[str, Any]]) -> None:
    """Patch `loop.forward_backward` to trigger each fault on its rank at its steps.

    `once` is the path of a marker file: the fault is triggered only if the file does not exist yet.
    """
    forward_backward = loop.forward_backward

    def faulty(state: Any, batch: Any, number: int) -> Any:
        for fault in faults:
            marker = fault["once"]
            if state.sampler.rank != fault["rank"] or state.position.step + 1 not in fault["steps"]:
                continue
            if marker is None or not Path(marker).exists():
                if marker is not None:
                    Path(marker).touch()
                batch = replace(batch, images=trigger(fault["kind"], batch.images))
        return forward_backward(state, batch, number)

    loop.forward_backward = faulty


class Finder(importlib.abc.MetaPathFinder):
    """Import hook that patches `engine.training.loop` when it is imported."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "engine.training.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            install_faults(module, json.loads(os.environ["GPUTRAIN_FAULT"]))

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


if os.environ.get("GPUTRAIN_FAULT"):
    sys.meta_path.insert(0, Finder())
