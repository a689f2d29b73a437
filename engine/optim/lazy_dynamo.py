"""Keeps torch's compiler out of processes that compile nothing. torch 2.15 imports it, which takes one to two seconds
of a rank's start, to learn that optimizers are not to be traced and how DDP is to be split for it; see
`torch._compile._disable_dynamo`, `torch.optim.optimizer._use_grad_for_differentiable` and
`DistributedDataParallel.__init__`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, optimizer

# What the compiler itself answers as long as nobody has set it otherwise.
_DDP_MODE = "ddp_optimizer"


def leave_out_compiler() -> None:
    """Of an optimizer's or DDP's methods none asks for the compiler any more, which is then not told to leave them
    alone. To be called before the first of them is made."""
    for owner in (Optimizer, DistributedDataParallel):
        for method in vars(owner).values():
            _leave_traceable(method)


def _leave_traceable(method: Any) -> None:
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        if _defined_in(method, torch._compile.__file__):
            inner.__dict__.setdefault("__dynamo_disable", inner)
        method = inner


def step_plainly(made: Optimizer) -> None:
    """Let the optimizer's `step` be what its class does, without what torch puts around it for its compiler, its
    profiler and hooks."""
    step: Any = type(made).step
    while _defined_in(step, optimizer.__file__) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    made.step = torch.no_grad()(partial(step, made))  # type: ignore[method-assign]


def _defined_in(function: Any, file: str | None) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == file


@contextmanager
def unasked_compiler() -> Iterator[None]:
    """In it DDP can be made without the compiler, where that is not there yet."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    answers = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: _DDP_MODE))
    torch.__dict__["_dynamo"] = answers
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is answers:
            del torch.__dict__["_dynamo"]
