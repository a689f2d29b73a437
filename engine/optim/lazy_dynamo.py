"""Keeps torch's compiler out of processes that compile nothing.

To import `torch._dynamo` takes one to two seconds of a rank's start. torch does it for two reasons: to have the
compiler leave optimizers alone, and to learn how DDP is split for it. A function is changed here only where its code
reads what it is known by. In a torch that differs nothing is changed, and torch imports its compiler. Called by
`optimizers` and by `engine.distributed.parallel`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# What `get_optimize_ddp_mode` returns unless somebody has imported the compiler and set `config.optimize_ddp`.
_OPTIMIZE_DDP_MODE = "ddp_optimizer"


def _reads(function: Any, *names: str) -> bool:
    """Whether the code of a function, and not of one inside it, has all of these as names or constants."""
    code = getattr(function, "__code__", None)
    return code is not None and {*code.co_names, *code.co_consts} >= set(names)


def avoid_dynamo_import() -> None:
    """Let the methods of optimizers and of DDP run as they are. Call it before the first of them is made."""
    for owner in (Optimizer, DistributedDataParallel):
        for method in vars(owner).values():
            _preset_dynamo_disable(method)


def _preset_dynamo_disable(method: Any) -> None:
    """Preset what the wrapper that `torch._disable_dynamo` makes would ask the compiler for in its first call."""
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        if _reads(method, "__dynamo_disable"):
            inner.__dict__.setdefault("__dynamo_disable", inner)
        method = inner


def unwrap_step(instance: Optimizer) -> None:
    """Take from the optimizer's `step` what torch wraps it in for the compiler, the profiler and hooks."""
    step: Any = type(instance).step
    while hasattr(step, "__wrapped__") and (
        _reads(step, "_dynamo", "graph_break") or _reads(step, "record_function", "_optimizer_step_pre_hooks")
    ):
        step = step.__wrapped__
    if step is not type(instance).step:
        instance.step = torch.no_grad()(partial(step, instance))  # type: ignore[method-assign]


@contextmanager
def dynamo_stub() -> Iterator[None]:
    """Within it DDP can be constructed without the compiler, where that is not imported yet."""
    constructor = DistributedDataParallel.__init__
    known = _reads(constructor, "_dynamo", "get_optimize_ddp_mode", "python_reducer")
    if not known or "torch._dynamo" in sys.modules:
        yield
        return
    utils = _ModuleStub("torch._dynamo.utils", get_optimize_ddp_mode=lambda: _OPTIMIZE_DDP_MODE)
    stub = _ModuleStub("torch._dynamo", utils=utils)
    torch.__dict__["_dynamo"] = stub
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stub:
            del torch.__dict__["_dynamo"]


class _ModuleStub:
    """Has the given attributes of a module, and takes any other from the module itself, which it imports for that."""

    def __init__(self, name: str, **attributes: object) -> None:
        self._name = name
        vars(self).update(attributes)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
