"""Optimizers: what they take, that they are torch's own, which parts of a model they train how, and that a step can be
left out."""

from __future__ import annotations

import inspect
import math
from copy import deepcopy
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn, optim
from torchvision import models

from engine.config.loader import resolve_config
from engine.config.optimizer_options import DEFAULT_OVERRIDES, OPTIMIZERS, RESERVED_ARGUMENTS, state_copies
from engine.config.rules import config_conflicts
from engine.config.schema import Config
from engine.config.training_sections import OptimConfig
from engine.models.builtin import resnet18_small
from engine.optim import timm_optimizers
from engine.optim.optimizers import (
    OPTIMIZER_CLASSES,
    MuonAdamW,
    build_optimizer,
    optimizer_step,
    restore_optimizer,
    set_lr,
)
from engine.optim.param_groups import layer_ids
from engine.optim.timm_optimizers import timm_optimizer_problems, timm_options
from engine.utils.errors import UsageError

FUSED = {"sgd", "adam", "adamw"}
TORCHS = {**OPTIMIZER_CLASSES, "muon": optim.Muon}

# Of each optimizer a config with nothing left at its default, and torch's arguments for the same.
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


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def names_in(optimizer: optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def problems(**values: Any) -> list[str]:
    config = Config(optim=OptimConfig(**values))
    return list(map(str, config_conflicts(config)))


def refused(config: OptimConfig, model: nn.Module) -> str:
    with pytest.raises(UsageError) as caught:
        build_optimizer(config, model)
    return str(caught.value)


# What they take.


def test_optimizer_table_covers_every_torch_optimizer() -> None:
    kinds = {one for one in vars(optim).values() if inspect.isclass(one) and issubclass(one, optim.Optimizer)}
    assert kinds - {optim.Optimizer, optim.LBFGS, optim.SparseAdam} == set(TORCHS.values())
    assert set(TORCHS) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_table_matches_names_and_defaults_of_torch(name: str) -> None:
    parameters = inspect.signature(TORCHS[name]).parameters
    torchs = {key: one.default for key, one in parameters.items() if key not in RESERVED_ARGUMENTS}
    ours = {key: option.default for key, option in OPTIMIZERS[name].items()}
    if name == "muon":
        assert ours.pop("betas") == inspect.signature(optim.AdamW).parameters["betas"].default
    assert ours == torchs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_table_defaults_satisfy_their_rules(name: str) -> None:
    for key, option in OPTIMIZERS[name].items():
        default = DEFAULT_OVERRIDES.get(name, {}).get(key, option.default)
        assert option.rule.is_valid(default), key


def test_optimizer_options_report_all_problems_at_once() -> None:
    assert problems(
        name="rmsprop",
        nesterov=True,
        betas=(0.9, 0.99),
        options={"alfa": 0.9, "alpha": 1.5, "centered": 1, "momentum": 0.9},
    ) == [
        "optim.nesterov: rmsprop does not take it, only muon, sgd do, and some of timm's; leave it out, "
        "or give optim.nesterov=null",
        "optim.betas: rmsprop does not take it, only adam, adamax, adamw, muon, nadam, radam do, and some of timm's; "
        "leave it out, or give optim.betas=null",
        "optim.options: rmsprop has no parameter 'alfa'; there are alpha, centered; did you mean alpha?",
        "optim.options: alpha must be a number of at least 0 and less than 1, not 1.5",
        "optim.options: centered must be true or false, not 1",
        "optim.options: momentum has a key of its own: give optim.momentum",
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rprop", {"weight_decay": 0.1}),
        ("adafactor", {"eps": 1e-3}),
        ("adamax", {"options": {"amsgrad": True}}),
        ("sgd", {"nesterov": True, "momentum": 0.0}),
        ("sgd", {"nesterov": True, "options": {"dampening": 0.5}}),
        ("rprop", {"options": {"etas": [1.2, 0.5]}}),
        ("rprop", {"options": {"step_sizes": [1, 0.1]}}),
        ("adafactor", {"options": {"eps": 1e-3}}),
        ("adafactor", {"options": {"d": math.nan}}),
        ("muon", {"options": {"ns_steps": 100}}),
        ("muon", {"options": {"adjust_lr_fn": "none"}}),
        ("sgd", {"options": {"lr": 0.1}}),
        ("sgd", {"options": {"fused": False}}),
    ],
)
def test_optimizer_options_reject_invalid_value(name: str, values: dict[str, Any]) -> None:
    assert len(problems(name=name, **values)) == 1


def test_optimizer_options_and_layer_lr_parse_as_yaml() -> None:
    typed = resolve_config(
        None, ["optim.name=rmsprop", "optim.options={alpha: 0.9}", "optim.layer_lr={fc: 0.5}"]
    ).config.optim
    assert (typed.options, typed.layer_lr) == ({"alpha": 0.9}, {"fc": 0.5})


def test_optimizer_options_accept_explicit_defaults() -> None:
    assert problems(name="adam", momentum=0.0, nesterov=False, weight_decay=0.0) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_copies_matches_optimizer_state_size(name: str) -> None:
    for values in ({}, RECIPES[name][0] if name in RECIPES else {}):
        config, model = OptimConfig(name=name, **values), small()
        optimizer = build_optimizer(config, model)
        train(model, optimizer)
        # A step count is one number for each parameter.
        kept = sum(
            value.numel()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.ndim > 0
        )
        assert 0 <= state_copies(config) - kept / sum(one.numel() for one in model.parameters()) < 1


# That they are torch's own.


def test_sgd_with_dampening_matches_torch_first_step() -> None:
    ours, theirs = small(), small()
    train(ours, build_optimizer(OptimConfig(lr=0.02, options={"dampening": 0.5}), ours))
    train(theirs, optim.SGD(theirs.parameters(), 0.02, momentum=0.9, dampening=0.5))
    assert same(ours, theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_build_optimizer_matches_torch_after_three_steps(name: str) -> None:
    values, arguments = RECIPES[name]
    ours, theirs = small(), small()
    extra = {"fused": True} if name in FUSED else {}
    config = OptimConfig(name=name, lr=0.02, **values)  # type: ignore[arg-type]
    assert problems(name=name, lr=0.02, **values) == []
    train(ours, build_optimizer(config, ours))
    train(theirs, TORCHS[name](theirs.parameters(), **{"lr": 0.02, **arguments, **extra}))
    assert same(ours, theirs)
    assert not same(ours, small())


def test_build_optimizer_gives_sgd_default_momentum() -> None:
    momenta = [
        build_optimizer(OptimConfig(momentum=given), small()).param_groups[0]["momentum"] for given in (None, 0.0, 0.5)
    ]
    assert momenta == [0.9, 0.0, 0.5]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_build_optimizer_uses_fused_where_available(name: str) -> None:
    optimizer = build_optimizer(OptimConfig(name=name), small())  # type: ignore[arg-type]
    assert bool(optimizer.param_groups[0].get("fused")) is (name in FUSED)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is (name in FUSED)


def goes_on_alike(config: OptimConfig, model: nn.Module, optimizer: optim.Optimizer, later: nn.Module) -> bool:
    """Whether `later`, with the weights of `model` and a new optimizer with the state of its own, comes to the same."""
    later.load_state_dict(model.state_dict())
    resumed = build_optimizer(config, later)
    restore_optimizer(resumed, deepcopy(optimizer.state_dict()))
    train(model, optimizer, seed=2)
    train(later, resumed, seed=2)
    return same(model, later)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restore_optimizer_continues_training_identically(name: str) -> None:
    config = OptimConfig(name=name, lr=0.01, decay_norms=False, weight_decay=0.0 if name == "rprop" else 0.1)  # type: ignore[arg-type]
    model, later = small(), small(7)
    optimizer = build_optimizer(config, model)
    train(model, optimizer)
    assert goes_on_alike(config, model, optimizer, later)


# Muon.


def test_muon_trains_matrices_and_adamw_the_rest() -> None:
    model = small()
    optimizer = build_optimizer(
        OptimConfig(name="muon", weight_decay=0.1, nesterov=False, betas=(0.8, 0.9), eps=1e-4), model
    )
    assert names_in(optimizer) == [
        ["4.weight", "5.weight"],
        ["0.weight", "0.bias", "1.weight", "1.bias", "4.bias", "5.bias"],
    ]
    theirs = small()
    matrices = [one for one in theirs.parameters() if one.ndim == 2]
    others = [one for one in theirs.parameters() if one.ndim != 2]
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
    assert "muon trains matrices, and none of this model trains" in refused(
        OptimConfig(name="muon"), nn.Conv2d(1, 2, 3)
    )


def test_muon_accepts_model_with_only_matrices() -> None:
    optimizer = build_optimizer(OptimConfig(name="muon"), nn.Linear(3, 2, bias=False))
    assert names_in(optimizer) == [["weight"]]


@pytest.mark.parametrize("name", ["muon", "adamw", "rmsprop"])
def test_grad_scaler_skips_nonfinite_step(name: str) -> None:
    model = small()
    optimizer = build_optimizer(OptimConfig(name=name), model)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, changes in ((1.0, True), (float("inf"), False)):
        before = [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 1, 8, 8)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
        assert any(changed) is changes


# Steps that are left out.


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("beyond", [False, True], ids=["plain", "all options"])
def test_skipped_step_changes_neither_weights_nor_state(name: str, beyond: bool) -> None:
    values = RECIPES[name][0] if beyond and name in RECIPES else {}
    config = OptimConfig(name=name, lr=0.01, **values)  # type: ignore[arg-type]
    model, plain = small(), small()
    optimizer, unskipped = build_optimizer(config, model), build_optimizer(config, plain)
    for bad in (True, False, True, True, False):
        for one, network in ((optimizer, model), (unskipped, plain)):
            if bad and one is unskipped:
                continue
            one.zero_grad()
            network.eval()
            network(torch.full((1, 1, 8, 8), float("nan") if bad else 1.0)).sum().backward()
            optimizer_step(one, torch.tensor(bad), may_skip=True)
    assert same(model, plain)


def test_take_step_ignores_flag_without_may_skip() -> None:
    model = small()
    optimizer = build_optimizer(OptimConfig(name="rmsprop"), model)
    model(torch.ones(2, 1, 8, 8)).sum().backward()
    optimizer_step(optimizer, torch.tensor(True), may_skip=False)
    assert not same(model, small())


# Which parts train how.


def test_build_optimizer_uses_one_group_by_default() -> None:
    assert len(build_optimizer(OptimConfig(weight_decay=0.1), small()).param_groups) == 1
    assert len(build_optimizer(OptimConfig(weight_decay=0.0, decay_norms=False), small()).param_groups) == 1


def test_layer_lr_uses_longest_matching_prefix() -> None:
    model = nn.ModuleDict(
        {"layer1": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "layer10": nn.Linear(2, 2), "fc": nn.Linear(2, 2)}
    )
    optimizer = build_optimizer(
        OptimConfig(layer_lr={"layer1": 0.1, "layer1.1": 0.5, "fc": 1.0, "layer1.0.bias": 0.5}), model
    )
    assert {group["lr_scale"]: group["param_names"] for group in optimizer.param_groups} == {
        0.1: ["layer1.0.weight"],
        0.5: ["layer1.0.bias", "layer1.1.weight", "layer1.1.bias"],
        1.0: ["layer10.weight", "layer10.bias", "fc.weight", "fc.bias"],
    }
    set_lr(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.1, 0.2])


def test_layer_lr_rejects_unknown_part() -> None:
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
    message = refused(OptimConfig(layer_lr={"layer2": 0.1, "zzz": 0.1, "fc": 0.1}), model)
    assert message.splitlines() == [
        "optim.layer_lr: the model has no part 'layer2'; did you mean layer1?",
        "optim.layer_lr: the model has no part 'zzz'; there are layer1, fc",
    ]


def test_layer_lr_zero_freezes_part() -> None:
    model = small()
    optimizer = build_optimizer(OptimConfig(name="adamw", weight_decay=0.1, layer_lr={"4": 0.0}), model)
    set_lr(optimizer, 0.1)
    train(model, optimizer)
    unchanged = {
        name for (name, a), b in zip(model.named_parameters(), small().parameters(), strict=True) if a.equal(b)
    }
    assert unchanged == {"4.weight", "4.bias"}


def test_build_optimizer_excludes_frozen_parameters() -> None:
    model = small()
    for one in model[0].parameters():
        one.requires_grad_(False)
    assert "0.weight" not in names_in(build_optimizer(OptimConfig(), model))[0]
    assert "leaves nothing of the model to train" in refused(OptimConfig(), model.requires_grad_(False))


def test_decay_norms_false_exempts_biases_and_norms() -> None:
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1, decay_norms=False), small())
    assert {group["weight_decay"]: group["param_names"] for group in optimizer.param_groups} == {
        0.1: ["0.weight", "4.weight", "5.weight"],
        0.0: ["0.bias", "1.weight", "1.bias", "4.bias", "5.bias"],
    }


def test_decay_norms_false_exempts_parameters_named_by_model() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1, decay_norms=False), model)
    free = next(group["param_names"] for group in optimizer.param_groups if group["weight_decay"] == 0)
    assert {"cls_token", "pos_embed", "norm.weight", "head.bias"} <= set(free)
    assert "head.weight" not in free


LAYERS: dict[str, tuple[int, dict[str, int]]] = {
    "resnet18": (10, {"conv1": 0, "bn1": 0, "layer1.0": 1, "layer1.1": 2, "layer4.1": 8, "fc": 9}),
    "vit_b_16": (
        14,
        {
            "class_token": 0,
            "conv_proj": 0,
            "encoder.pos_embedding": 0,
            "encoder.layers.encoder_layer_0": 1,
            "encoder.layers.encoder_layer_11": 12,
            "encoder.ln": 12,
            "heads": 13,
        },
    ),
    "convnext_tiny": (
        23,
        {"features.0": 0, "features.1.0": 1, "features.2.1": 4, "features.7.2": 21, "classifier.2": 22},
    ),
    "swin_t": (17, {"features.0": 0, "features.1.0": 1, "features.2": 3, "features.7.1": 15, "norm": 15, "head": 16}),
    "timm vit_tiny_patch16_224": (
        14,
        {"cls_token": 0, "pos_embed": 0, "patch_embed": 0, "blocks.0": 1, "blocks.11": 12, "head": 13},
    ),
    "timm resnet18": (10, {"conv1": 0, "layer1.0": 1, "layer4.1": 8, "fc": 9}),
    "resnet18-small": (10, {"0": 0, "1": 0, "3": 1, "4": 2, "10": 8, "13": 9}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_orders_blocks_from_stem_to_head(name: str) -> None:
    count, expected = LAYERS[name]
    if name == "resnet18-small":
        model = resnet18_small(1, 3)
    elif name.startswith("timm "):
        model = timm.create_model(name.removeprefix("timm "))
    else:
        with torch.device("meta"):
            model = models.get_model(name, weights=None)
    layers = layer_ids(model)
    assert set(layers) == {key for key, _ in model.named_parameters()}
    assert set(layers.values()) == set(range(count))
    for part, layer in expected.items():
        assert {number for key, number in layers.items() if f"{key}.".startswith(f"{part}.")} == {layer}, part


def test_layer_decay_scales_lr_per_layer() -> None:
    optimizer = build_optimizer(OptimConfig(layer_decay=0.5, layer_lr={"5.bias": 0.1}), small())
    assert {tuple(group["param_names"]): group["lr_scale"] for group in optimizer.param_groups} == {
        ("0.weight", "0.bias", "1.weight", "1.bias"): 0.25,
        ("4.weight", "4.bias"): 0.5,
        ("5.weight",): 1.0,
        ("5.bias",): 0.1,
    }


@pytest.mark.parametrize("name", ["sgd", "adagrad", "muon"])
def test_restore_optimizer_keeps_state_across_changed_groups(name: str) -> None:
    before = OptimConfig(name=name, lr=0.01, layer_lr={"4": 1.0, "5": 0.5})  # type: ignore[arg-type]
    after = OptimConfig(name=name, lr=0.01, layer_lr={"0": 0.1}, layer_decay=0.9)  # type: ignore[arg-type]
    model = small()
    model[0].requires_grad_(False)
    optimizer = build_optimizer(before, model)
    train(model, optimizer)
    kept = {
        key: optimizer.state[one]
        for group in optimizer.param_groups
        for key, one in zip(group["param_names"], group["params"], strict=True)
    }
    model[0].requires_grad_(True)
    later = build_optimizer(after, model)
    fresh = {one: dict(state) for one, state in later.state.items()}
    restore_optimizer(later, deepcopy(optimizer.state_dict()))
    assert sorted({group["lr_scale"] for group in later.param_groups}) == pytest.approx([0.081, 0.81, 0.9, 1.0])
    for group in later.param_groups:
        for key, one in zip(group["param_names"], group["params"], strict=True):
            expected = kept.get(key, fresh.get(one, {}))
            assert later.state[one].keys() == expected.keys()
            assert all(torch.equal(later.state[one][what], value) for what, value in expected.items())
    train(model, later)


# timm's.


@pytest.mark.parametrize(
    ("name", "values", "arguments"),
    [
        ("lamb", {"weight_decay": 0.1, "options": {"trust_clip": True}}, {"weight_decay": 0.1, "trust_clip": True}),
        ("lion", {"betas": (0.8, 0.9)}, {"betas": (0.8, 0.9)}),
        ("sgdw", {}, {"momentum": 0.9}),
        ("adan", {"options": {"betas": [0.9, 0.8, 0.7]}}, {"betas": (0.9, 0.8, 0.7)}),
        ("muon", {"nesterov": True}, {"momentum": 0.95, "nesterov": True}),
    ],
)
def test_timm_optimizer_matches_timm(name: str, values: dict[str, Any], arguments: dict[str, Any]) -> None:
    config = OptimConfig(name=f"timm:{name}", lr=0.01, **values)
    assert timm_optimizer_problems(config) == []
    ours, theirs = small(), small()
    train(ours, build_optimizer(config, ours))
    train(theirs, timm.optim.create_optimizer_v2(theirs.parameters(), name, 0.01, **arguments))
    assert same(ours, theirs)
    assert not same(ours, small())


@pytest.mark.parametrize("name", ["timm:lamb", "timm:sgd", "timm:adopt", "timm:nadamlegacy"])
def test_timm_optimizer_resumes_and_skips_steps(name: str) -> None:
    config = OptimConfig(name=name, lr=0.01, decay_norms=False, weight_decay=0.1)
    model, later = small(), small(7)
    optimizer = build_optimizer(config, model)
    model(torch.full((1, 1, 8, 8), float("nan"))).sum().backward()
    optimizer_step(optimizer, torch.tensor(True), may_skip=True)
    assert same(model, small())
    model.load_state_dict(small().state_dict())
    train(model, optimizer)
    assert goes_on_alike(config, model, optimizer, later)


def test_timm_adamc_uses_scaled_lr_as_maximum() -> None:
    optimizer = build_optimizer(OptimConfig(name="timm:adamc", lr=0.1, lr_scaling="linear"), small(), world_size=4)
    assert optimizer.defaults["lr"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimConfig(name="timm:lamp"), "optim.name: timm has no optimizer 'lamp'; did you mean timm:lamb?"),
        (OptimConfig(name="timm:adahessian"), "needs second derivatives of the loss, which a plain step does not have"),
        (OptimConfig(name="timm:fusedadam"), "optim.name: timm:fusedadam cannot be taken: it needs apex, which is not"),
        (
            OptimConfig(name="timm:bnbadam"),
            "optim.name: timm:bnbadam cannot be taken: it needs bitsandbytes, which is not",
        ),
        (OptimConfig(name="timm:lookahead_adam"), "timm's lookahead around an optimizer is not supported"),
        (OptimConfig(name="timm:lamb", momentum=0.9), "optim.momentum: timm:lamb does not take it"),
        (OptimConfig(name="timm:lamb", options={"trust_clp": True}), "did you mean trust_clip?"),
        (
            OptimConfig(name="timm:lamb", options={"trust_clip": 3}),
            "optim.options: trust_clip must be true or false, not 3",
        ),
        (
            OptimConfig(name="timm:adan", betas=(0.9, 0.9)),
            "timm:adan takes 3 numbers for its betas: give it in optim.options",
        ),
    ],
)
def test_timm_optimizer_rejects_unsupported_config(config: OptimConfig, message: str) -> None:
    assert message in str(UsageError(timm_optimizer_problems(config)))
    assert message in refused(config, small())


@pytest.mark.parametrize(
    ("name", "options"),
    [("timm:adafactorbv", {"momentum_dtype": "none such"}), ("timm:muon", {"ns_coefficients": "none such"})],
)
def test_timm_optimizer_reports_constructor_error_as_usage_error(name: str, options: dict[str, Any]) -> None:
    message = refused(OptimConfig(name=name, options=options), small())
    assert message.startswith(f"optim.options: {name} cannot be made with these: ")
    assert "none such" in message


def test_timm_options_survive_what_timm_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("print('{}')\n")
    (tmp_path / "timm" / "optim.py").write_text(
        "import os\n"
        "os.write(1, b'a word without an end')\n"
        "class Info:\n    second_order, defaults = True, {}\n    opt_class = dict\n"
        "def list_optimizers():\n    print('another word')\n    return ['stub']\n"
        "def get_optimizer_info(name):\n    return Info\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="timm:stub cannot be taken: it needs second derivatives"):
        timm_options("timm:stub")


def test_timm_optimizer_without_timm_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(timm_optimizers, "version", absent)
    [problem] = timm_optimizer_problems(OptimConfig(name="timm:lamb"))
    assert str(problem) == "optim.name: timm is not installed: pip install timm"
    assert timm_optimizer_problems(OptimConfig(name="sgd")) == []


def test_muon_adamw_holds_state_of_both_optimizers() -> None:
    model = small()
    optimizer = build_optimizer(OptimConfig(name="muon"), model)
    assert isinstance(optimizer, MuonAdamW)
    train(model, optimizer)
    assert {tuple(sorted(state)) for state in optimizer.state.values()} == {
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq", "step"),
    }
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
