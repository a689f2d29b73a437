"""Models without storage, on torch's `meta` device: made at once whatever their size, they know shapes, no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# What sets starting values: where there is no storage torch would only work out their shapes, at length.
INIT_FUNCTIONS = frozenset(
    f"{verb}_"
    for verb in (
        *("normal", "uniform", "trunc_normal", "constant", "ones", "zeros", "fill", "zero", "copy", "erfinv"),
        *("kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform", "orthogonal"),
        *("add", "sub", "mul", "div", "clamp"),
    )
)


class _SkipInitMode(TorchFunctionMode):
    """Starting values are not set where there is no storage for them. With `only_torch_empty` what layers make their
    parameters of, `torch.empty`, is the only thing without: the rest of what a model computes while it is made has
    values."""

    def __init__(self, *, only_torch_empty: bool) -> None:
        super().__init__()
        self._only_torch_empty = only_torch_empty

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._only_torch_empty and func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        target = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in INIT_FUNCTIONS and isinstance(target, torch.Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, without storage."""
    try:
        with torch.device("meta"), _SkipInitMode(only_torch_empty=False):
            return build()
    except Exception:
        # One that works out its own sizes with tensors looks at their values, and how it fails is open.
        with _SkipInitMode(only_torch_empty=True):
            return build().to("meta")
