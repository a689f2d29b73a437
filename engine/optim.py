"""Optimizers by name."""

from __future__ import annotations

from torch import nn, optim

from engine.config import Optim


def build_optimizer(config: Optim, model: nn.Module) -> optim.Optimizer:
    """The learning rate is set before each step, see `engine.schedule`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.name == "sgd":
        return optim.SGD(
            parameters, config.lr, config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
        )
    kind = optim.Adam if config.name == "adam" else optim.AdamW
    return kind(parameters, config.lr, config.betas, config.eps, config.weight_decay)
