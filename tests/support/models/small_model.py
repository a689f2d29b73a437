"""A small model and helpers to train and compare it, for the tests of optimizers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn, optim

from engine.base.errors import Problem, UsageError
from engine.config.training_sections import OptimConfig
from engine.train.optim.optimizers import build_optimizer, restore_optimizer


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 3)
    )


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 3, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 1, 8, 8)).square().mean().backward()
        optimizer.step()


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def names_in(optimizer: optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def refused(config: OptimConfig, model: nn.Module) -> list[Problem]:
    with pytest.raises(UsageError) as caught:
        build_optimizer(config, model)
    return caught.value.problems


def resumes_identically(config: OptimConfig, model: nn.Module, optimizer: optim.Optimizer, later: nn.Module) -> bool:
    """Whether `later`, resumed from the weights and optimizer state of `model`, trains to identical weights."""
    later.load_state_dict(model.state_dict())
    resumed = build_optimizer(config, later)
    restore_optimizer(resumed, deepcopy(optimizer.state_dict()))
    train(model, optimizer, seed=2)
    train(later, resumed, seed=2)
    return same(model, later)
