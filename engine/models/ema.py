"""Exponential moving average (EMA) of the weights, which often generalizes better than the weights themselves."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn


class ModelEma:
    """Hold `model`, whose weights are the EMA of another model's weights in float32. The decay is `min(decay, (1 +
    step) / (10 + step))`, so that the initial weights are forgotten quickly (TensorFlow's ExponentialMovingAverage)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self._decay = decay

    def update(self, model: nn.Module, step: int) -> None:
        """Update after training step `step`, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        fresh = [parameter.detach().float() for parameter in model.parameters()]
        torch._foreach_lerp_([parameter.data for parameter in self.model.parameters()], fresh, 1 - decay)

    def copy_buffers(self, model: nn.Module) -> None:
        """Copy the buffers unchanged: BatchNorm's running statistics are averages already."""
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
