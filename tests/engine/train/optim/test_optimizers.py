"""Optimizers: options, equality with torch's own, and skipped steps."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from engine.base.errors import Problem
from engine.config.conflicts import config_conflicts
from engine.config.optimizer_options import OPTIMIZERS, RESERVED_ARGUMENTS, state_copies
from engine.config.schema import Config
from engine.config.training_sections import DEFAULT_LRS, OptimConfig
from engine.train.optim.optimizers import OPTIMIZER_CLASSES, build_optimizer, optimizer_step
from support.messages import has_problem
from support.models.small_model import names_in, refused, resumes_identically, same, small, train

FUSED = {"sgd", "adam", "adamw"}
TORCH_OPTIMIZERS = {**OPTIMIZER_CLASSES, "muon": optim.Muon}

# Config values that differ from every default, and the equivalent arguments of torch.
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": (
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "options": {"dampening": 0}},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
    "adam": (
        {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "options": {"amsgrad": True}},
        {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True},
    ),
    "adamw": (
        {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "options": {"amsgrad": True}},
        {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True},
    ),
    "nadam": (
        {"betas": (0.8, 0.9), "options": {"momentum_decay": 0.1, "decoupled_weight_decay": True}, "weight_decay": 0.1},
        {"betas": (0.8, 0.9), "momentum_decay": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ),
    "radam": (
        {"eps": 1e-3, "weight_decay": 0.1, "options": {"decoupled_weight_decay": True}},
        {"eps": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "rmsprop": (
        {"momentum": 0.5, "options": {"alpha": 0.9, "centered": True}},
        {"momentum": 0.5, "alpha": 0.9, "centered": True},
    ),
    "adagrad": (
        {"eps": 1e-3, "options": {"lr_decay": 0.1, "initial_accumulator_value": 0.2}},
        {"eps": 1e-3, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    ),
    "adadelta": ({"eps": 1e-3, "options": {"rho": 0.5}}, {"eps": 1e-3, "rho": 0.5}),
    "adamax": ({"betas": (0.8, 0.9), "weight_decay": 0.1}, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    "asgd": (
        {"options": {"lambd": 0.01, "alpha": 0.5, "t0": 1}},
        {"lambd": 0.01, "alpha": 0.5, "t0": 1},
    ),
    "rprop": (
        {"options": {"etas": [0.4, 1.3], "step_sizes": [1e-3, 2]}},
        {"etas": (0.4, 1.3), "step_sizes": (1e-3, 2)},
    ),
    "adafactor": (
        {"weight_decay": 0.1, "options": {"beta2_decay": -0.5, "d": 2, "eps": [None, 1e-2]}},
        {"weight_decay": 0.1, "beta2_decay": -0.5, "d": 2, "eps": (None, 1e-2)},
    ),
}


def problems(**values: Any) -> list[Problem]:
    config = Config(optim=OptimConfig(**values))
    return list(config_conflicts(config))


# Options


def test_optimizer_table_covers_every_torch_optimizer() -> None:
    kinds = {kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, optim.Optimizer)}
    assert kinds - {optim.Optimizer, optim.LBFGS, optim.SparseAdam} == set(TORCH_OPTIMIZERS.values())
    assert set(TORCH_OPTIMIZERS) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_table_matches_names_and_defaults_of_torch(name: str) -> None:
    parameters = inspect.signature(TORCH_OPTIMIZERS[name]).parameters
    torch_defaults = {key: parameter.default for key, parameter in parameters.items() if key not in RESERVED_ARGUMENTS}
    our_defaults = {key: option.default for key, option in OPTIMIZERS[name].items()}
    if name != "sgd":
        assert DEFAULT_LRS[name] == parameters["lr"].default
    if name == "muon":
        assert our_defaults.pop("betas") == inspect.signature(optim.AdamW).parameters["betas"].default
    assert our_defaults == torch_defaults


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("adamax", {"options": {"amsgrad": True}}),
        ("sgd", {"nesterov": True, "momentum": 0.0}),
        ("rprop", {"options": {"etas": [1.2, 0.5]}}),
        ("adafactor", {"options": {"eps": 1e-3}}),
        ("adafactor", {"options": {"d": math.nan}}),
        ("muon", {"options": {"ns_steps": 100}}),
        ("sgd", {"options": {"lr": 0.1}}),
        ("sgd", {"options": {"fused": False}}),
    ],
)
def test_optimizer_options_reject_invalid_value(name: str, values: dict[str, Any]) -> None:
    assert len(problems(name=name, **values)) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_copies_matches_optimizer_state_size(name: str) -> None:
    for values in ({}, RECIPES[name][0] if name in RECIPES else {}):
        config, model = OptimConfig(name=name, **values), small()
        optimizer = build_optimizer(config, model)
        train(model, optimizer)
        # Step counts are scalars, which the estimate ignores.
        state_size = sum(
            value.numel()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.ndim > 0
        )
        assert 0 <= state_copies(config) - state_size / sum(parameter.numel() for parameter in model.parameters()) < 1


# Equality with torch


@pytest.mark.parametrize("name", RECIPES)
def test_build_optimizer_matches_torch_after_three_steps(name: str) -> None:
    values, arguments = RECIPES[name]
    ours, theirs = small(), small()
    extra = {"fused": True} if name in FUSED else {}
    config = OptimConfig(name=name, lr=0.02, **values)  # type: ignore[arg-type]
    assert problems(name=name, lr=0.02, **values) == []
    train(ours, build_optimizer(config, ours))
    train(theirs, TORCH_OPTIMIZERS[name](theirs.parameters(), **{"lr": 0.02, **arguments, **extra}))
    assert same(ours, theirs)
    assert not same(ours, small())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "timm:sgd"])
def test_build_optimizer_sgd_updates_all_half_precision_weights(name: str, dtype: torch.dtype) -> None:
    model = small().to(dtype)
    optimizer = build_optimizer(OptimConfig(name=name, lr=1.0), model)  # type: ignore[arg-type]
    before = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all((weight != value).all() for weight, value in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["adamw", "rprop", "adadelta", "adafactor"])
def test_restore_optimizer_continues_training_identically(name: str) -> None:
    config = OptimConfig(name=name, lr=0.01, decay_norms=False, weight_decay=0.0 if name == "rprop" else 0.1)  # type: ignore[arg-type]
    model, later = small(), small(7)
    optimizer = build_optimizer(config, model)
    train(model, optimizer)
    assert resumes_identically(config, model, optimizer, later)


# Muon


def test_muon_trains_matrices_and_adamw_the_rest() -> None:
    model = small()
    optimizer = build_optimizer(
        OptimConfig(name="muon", lr=0.05, weight_decay=0.1, nesterov=False, betas=(0.8, 0.9), eps=1e-4), model
    )
    assert names_in(optimizer) == [
        ["4.weight", "5.weight"],
        ["0.weight", "0.bias", "1.weight", "1.bias", "4.bias", "5.bias"],
    ]
    theirs = small()
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in theirs.parameters() if parameter.ndim != 2]
    muon = optim.Muon(matrices, 0.05, weight_decay=0.1, nesterov=False, eps=1e-4, adjust_lr_fn="match_rms_adamw")
    adamw = optim.AdamW(others, 0.05, (0.8, 0.9), 1e-4, 0.1, fused=True)
    train(model, optimizer)
    torch.manual_seed(1)
    for _ in range(3):
        muon.zero_grad()
        adamw.zero_grad()
        theirs(torch.randn(5, 1, 8, 8)).square().mean().backward()
        muon.step()
        adamw.step()
    assert same(model, theirs)


def test_muon_rejects_model_without_matrix() -> None:
    assert has_problem(refused(OptimConfig(name="muon"), nn.Conv2d(1, 2, 3)), "not-supported", "optim.name", "muon ")


# Skipped steps


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("beyond", [False, True], ids=["plain", "all options"])
def test_skipped_step_changes_neither_weights_nor_state(name: str, beyond: bool) -> None:
    values = RECIPES[name][0] if beyond and name in RECIPES else {}
    config = OptimConfig(name=name, lr=0.01, **values)  # type: ignore[arg-type]
    model, plain = small(), small()
    optimizer, unskipped = build_optimizer(config, model), build_optimizer(config, plain)
    for bad in (True, False, True, True, False):
        for current, network in ((optimizer, model), (unskipped, plain)):
            if bad and current is unskipped:
                continue
            current.zero_grad()
            network.eval()
            network(torch.full((1, 1, 8, 8), float("nan") if bad else 1.0)).sum().backward()
            optimizer_step(current, torch.tensor(bad), may_skip=True)
    assert same(model, plain)
