"""Avoids the import of torch's compiler in processes that compile nothing.

Importing `torch._dynamo` adds one to two seconds to the start of a rank. torch imports it for two reasons: to exclude
optimizers and DDP from compilation, and to read how DDP splits its graph. Each patch here first checks that the code of
the torch function contains the expected names; if another torch version differs, nothing is patched and torch imports
its compiler. `optimizers` and `engine.train.distributed.parallel` call this module.
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

# Return value of `get_optimize_ddp_mode` with the default of `torch._dynamo.config.optimize_ddp`.
_OPTIMIZE_DDP_MODE = "ddp_optimizer"


def _reads(function: Any, *names: str) -> bool:
    """Whether a function's own code, without nested functions, contains all `names` as names or constants."""
    code = getattr(function, "__code__", None)
    return code is not None and {*code.co_names, *code.co_consts} >= set(names)


def avoid_dynamo_import() -> None:
    """Keep the methods of optimizers and DDP from importing the compiler. Call it before creating the first one."""
    for method in (*vars(Optimizer).values(), *vars(DistributedDataParallel).values()):
        while (inner := getattr(method, "__wrapped__", None)) is not None:
            # The cached result of the `torch._disable_dynamo` wrapper, whose first call would import the compiler.
            if _reads(method, "__dynamo_disable"):
                inner.__dict__.setdefault("__dynamo_disable", inner)
            method = inner


def unwrap_step(instance: Optimizer) -> None:
    """Remove torch's wrappers for the compiler, the profiler and hooks from the optimizer's `step`."""
    step: Any = type(instance).step
    while hasattr(step, "__wrapped__") and (
        _reads(step, "_dynamo", "graph_break") or _reads(step, "record_function", "_optimizer_step_pre_hooks")
    ):
        step = step.__wrapped__
    if step is not type(instance).step:
        instance.step = torch.no_grad()(partial(step, instance))  # type: ignore[method-assign]


@contextmanager
def dynamo_stub() -> Iterator[None]:
    """Context in which DDP is constructed without importing the compiler, unless it is already imported."""
    constructor = DistributedDataParallel.__init__
    patchable = _reads(constructor, "_dynamo", "get_optimize_ddp_mode", "python_reducer")
    if not patchable or "torch._dynamo" in sys.modules:
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
    """Stand-in for a module: holds the given attributes, and imports the module for any other attribute."""

    def __init__(self, name: str, **attributes: object) -> None:
        self._name = name
        vars(self).update(attributes)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
