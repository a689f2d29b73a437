"""Optimizers by name."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn, optim

from engine.config import Optim


class _SkipsOnDevice(Protocol):
    """What torch's fused optimizers take from their gradient scaler: they leave a step out, without a word to the
    host, where `found_inf` is 1."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


def build_optimizer(config: Optim, model: nn.Module) -> optim.Optimizer:
    """The learning rate is set before each step, see `engine.schedule`. Fused, so that it can leave out a step without
    a wait for the device, see `skip_if`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.name != "sgd":
        kind = optim.Adam if config.name == "adam" else optim.AdamW
        return kind(
            parameters,
            config.lr,
            config.betas or (0.9, 0.999),
            config.eps or 1e-8,
            config.weight_decay,
            fused=True,
        )
    momentum = 0.9 if config.momentum is None else config.momentum
    sgd = optim.SGD(
        parameters, config.lr, momentum, weight_decay=config.weight_decay, nesterov=config.nesterov, fused=True
    )
    if momentum:
        # Its own first step makes them of memory as it finds it, which stays there if that step is left out.
        for parameter in parameters:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def skip_if(optimizer: optim.Optimizer, bad: Tensor) -> None:
    """Make the next step one that changes nothing where `bad` (no dimension, bool, on the device) is true."""
    fused = cast(_SkipsOnDevice, optimizer)
    fused.grad_scale, fused.found_inf = None, bad.float()
