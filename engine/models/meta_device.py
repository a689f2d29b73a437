"""Build models on torch's `meta` device: fast at any size, with shapes and without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# In-place functions that initialize parameters. Meta tensors have no values, so these calls would only cost time.
INIT_FUNCTIONS = frozenset(
    f"{verb}_"
    for verb in (
        *("normal", "uniform", "trunc_normal", "constant", "ones", "zeros", "fill", "zero", "copy", "erfinv"),
        *("kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform", "orthogonal"),
        *("add", "sub", "mul", "div", "clamp"),
    )
)


class _SkipInitMode(TorchFunctionMode):
    """Skip initializers of meta tensors. With `only_torch_empty` only `torch.empty`, which allocates parameters, is
    redirected to the meta device, and every other tensor of the constructor has values."""

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
    """Return the model that `build` creates, on the meta device."""
    try:
        with torch.device("meta"), _SkipInitMode(only_torch_empty=False):
            return build()
    except Exception:
        # A constructor that reads tensor values fails on the meta device, with any exception.
        with _SkipInitMode(only_torch_empty=True):
            return build().to("meta")
