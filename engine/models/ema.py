"""A running average of the weights, which often does better than the weights themselves."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn


class ModelEma:
    """Holds `model`, whose weights are an exponential average of another's in float32. The decay grows to its value as
    `(1 + n) / (10 + n)` over the first steps, so that the weights of the beginning are soon forgotten (TensorFlow's
    ExponentialMovingAverage)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = deepcopy(model).eval().requires_grad_(False)
        self._decay = decay

    def update(self, model: nn.Module, step: int) -> None:
        """After step `step` (from 1) of training."""
        decay = min(self._decay, (1 + step) / (10 + step))
        fresh = [parameter.detach().float() for parameter in model.parameters()]
        torch._foreach_lerp_([parameter.data for parameter in self.model.parameters()], fresh, 1 - decay)

    def copy_buffers(self, model: nn.Module) -> None:
        """BatchNorm's running statistics are averages already."""
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
