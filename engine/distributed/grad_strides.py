"""Explain torch's warning about the strides of gradients once per run, instead of its text once per rank.

`training.train` calls it before the model is wrapped in DistributedDataParallel, which warns in a backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from engine.utils.errors import Problem

# Of Reducer::check_grad_layout in torch/csrc/distributed/c10d/reducer.cpp.
TORCH_MESSAGE = "Grad strides do not match bucket view strides"
# AccumulateGrad gives every gradient the strides of its parameter except in dimensions of size 1
# (torch/csrc/autograd/utils/grad_layout_contract.h), so the elements are in the same order.
EXPLANATION = Problem(
    "",
    "some gradients and DistributedDataParallel's buckets have different strides in dimensions of size 1, as those of "
    "1x1 and depthwise convolutions in channels_last; their elements are in the same order, so it neither slows down "
    "training nor changes results, and there is nothing to do",
    code="no-effect",
)


def explain_grad_strides(emit: Callable[[Problem], None]) -> None:
    """From now on, pass `EXPLANATION` to `emit` instead of torch's warning, which a process shows once."""
    show = warnings.showwarning

    def explain(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith(TORCH_MESSAGE):
            emit(EXPLANATION)
        else:
            show(message, *args, **kwargs)

    warnings.showwarning = explain
