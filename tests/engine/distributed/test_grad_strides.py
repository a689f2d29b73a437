"""torch's warning about the strides of gradients becomes one sentence; other warnings stay as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.distributed.grad_strides import EXPLANATION, explain_grad_strides
from engine.utils.errors import Problem


class Sum(torch.autograd.Function):
    """The sum of a 1x1 convolution's weights; its gradient has the strides of channels_last."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        channels = ctx.shape[1]
        return torch.ones(ctx.shape).as_strided(ctx.shape, (channels, 1, channels, channels))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, 1, 1))

    def forward(self) -> Tensor:
        total: Tensor = Sum.apply(self.weight)
        return total


def test_grad_strides_are_explained_instead_of_torchs_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    explained: list[Problem] = []
    warnings.simplefilter("always")
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    explain_grad_strides(explained.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A process warns once, unless this is on.
    torch.set_warn_always(True)
    try:
        model = DistributedDataParallel(Weights(), gradient_as_bucket_view=True)
        model().backward()
    finally:
        torch.set_warn_always(False)
        dist.destroy_process_group()
    assert explained == [EXPLANATION]
    warnings.warn("another", stacklevel=1)
    assert "another" in shown
    assert not any("strides" in message for message in shown)
