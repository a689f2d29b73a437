"""Parameter groups: learning rate and weight decay per part, and state restored across changed groups."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torchvision import models

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.config.training_sections import OptimConfig
from engine.train.models.builtin import SmallResNet18
from engine.train.optim.optimizers import build_optimizer, restore_optimizer
from engine.train.optim.param_groups import layer_ids, summarize_param_groups
from support.messages import has_problem
from support.models.small_model import names_in, refused, small, train


def test_layer_lr_rejects_unknown_part() -> None:
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
    problems = refused(OptimConfig(layer_lr={"layer2": 0.1, "zzz": 0.1, "fc": 0.1}), model)
    for problem, values in zip(problems, (("'layer2'", "layer1?"), ("'zzz'", "layer1, fc")), strict=True):
        assert has_problem([problem], "unknown-value", "optim.layer_lr", *values)


def test_build_optimizer_excludes_frozen_parameters() -> None:
    model = small()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    assert "0.weight" not in names_in(build_optimizer(OptimConfig(), model))[0]
    assert has_problem(refused(OptimConfig(), model.requires_grad_(False)), "invalid-value", "model.freeze")


def test_weight_decay_groups_apply_by_name_then_bias_then_norm() -> None:
    groups = {"norm": 0.2, "bias": 0.3, "4": 0.4, "4.bias": 0.5, "0.*": 0.6}
    config = OptimConfig(weight_decay=0.1, weight_decay_groups=groups)
    optimizer = build_optimizer(config, small())
    assert {group["weight_decay"]: group["param_names"] for group in optimizer.param_groups} == {
        0.6: ["0.weight", "0.bias"],
        0.2: ["1.weight"],
        0.3: ["1.bias", "5.bias"],
        0.4: ["4.weight"],
        0.5: ["4.bias"],
        0.1: ["5.weight"],
    }
    decays = [group.weight_decay for group in summarize_param_groups(config, small())]
    assert decays == [0.6, 0.2, 0.3, 0.4, 0.5, 0.1]


def test_weight_decay_groups_reject_unknown_and_negative_values() -> None:
    problems = refused(OptimConfig(weight_decay_groups={"fc": 0.1, "*.gamma": 0.1, "norm": 0.0}), small())
    for problem, name in zip(problems, ("'fc'", "'*.gamma'"), strict=True):
        assert has_problem([problem], "unknown-value", "optim.weight_decay_groups", name, " 0, 1, 4, 5")
    with pytest.raises(UsageError) as caught:
        resolve_config(None, ["optim.weight_decay_groups={bias: 0, fc: -1}", "optim.decay_norms=false"])
    assert [problem.location for problem in caught.value.problems] == ["optim.weight_decay_groups", "optim.decay_norms"]


def timm_model(name: str, **options: int) -> nn.Module:
    # It takes two seconds, which every xdist worker would spend while it collects.
    import timm

    model: nn.Module = timm.create_model(name, **options)
    return model


def test_decay_norms_false_exempts_parameters_named_by_model() -> None:
    model = timm_model("vit_tiny_patch16_224", depth=1, num_classes=3)
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
    "resnet18-small": (10, {"conv1": 0, "bn1": 0, "layer1.0": 1, "layer1.1": 2, "layer4.1": 8, "fc": 9}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_ids_orders_blocks_from_stem_to_head(name: str) -> None:
    count, expected = LAYERS[name]
    if name == "resnet18-small":
        model = SmallResNet18(1, 3)
    elif name.startswith("timm "):
        model = timm_model(name.removeprefix("timm "))
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
    saved_state = {
        key: optimizer.state[parameter]
        for group in optimizer.param_groups
        for key, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    model[0].requires_grad_(True)
    later = build_optimizer(after, model)
    fresh = {parameter: dict(state) for parameter, state in later.state.items()}
    restore_optimizer(later, deepcopy(optimizer.state_dict()))
    assert sorted({group["lr_scale"] for group in later.param_groups}) == pytest.approx([0.081, 0.81, 0.9, 1.0])
    for group in later.param_groups:
        for key, parameter in zip(group["param_names"], group["params"], strict=True):
            expected = saved_state.get(key, fresh.get(parameter, {}))
            assert later.state[parameter].keys() == expected.keys()
            assert all(torch.equal(later.state[parameter][field], value) for field, value in expected.items())
    train(model, later)
