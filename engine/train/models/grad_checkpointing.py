"""Gradient checkpointing: compute the activations of a block again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.base.errors import UsageError


def checkpoint_gradients(model: nn.Module, name: str) -> None:
    """Turn on the model's own gradient checkpointing, as timm's models have it, or else that of its blocks.

    Blocks are the modules with layers of their own in a `nn.Sequential`, as in the models of torchvision. Raises
    UsageError if there are none.
    """
    own: Callable[[bool], None] | None = getattr(model, "set_grad_checkpointing", None)
    if own is not None:
        # timm's models without it assert so.
        with suppress(AssertionError):
            own(True)
            return
    blocks = list(dict.fromkeys(_blocks(model)))
    if not blocks:
        reason = f"is not available for {name}: it has neither set_grad_checkpointing nor blocks in a nn.Sequential"
        raise UsageError.one("model.grad_checkpointing", reason, "set it to false", code="not-supported")
    for block in blocks:
        # Not an attribute `forward`: a deep copy of the model, such as that of EMA weights, would run the original.
        block.__class__ = _checkpointed(type(block))


def _blocks(parent: nn.Module) -> Iterator[nn.Module]:
    for child in parent.children():
        is_block = isinstance(parent, nn.Sequential) and not isinstance(child, nn.Sequential)
        if is_block and next(child.parameters(), None) is not None and next(child.children(), None) is not None:
            yield child
        else:
            yield from _blocks(child)


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose instances compute their forward pass again in the backward pass of training."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **kwargs)
        return checkpoint(partial(kind.forward, self), *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})
