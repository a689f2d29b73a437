"""Frozen layers, and SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.base.errors import UsageError
from engine.config.schema import Config
from engine.train.models.factory import build_model
from engine.train.models.freeze import (
    classifier_paths,
    convert_to_sync_batch_norm,
    freeze,
    nothing_to_synchronize,
    set_train_mode,
)
from support.messages import has_problem, raises_problem

SMALL = {"name": "resnet18-small", "options": {"width": 4}}


def config(**model: Any) -> Config:
    return Config.model_validate({"model": SMALL | model})


def build(channels: int = 1, classes: int = 5, **model: Any) -> nn.Module:
    return build_model(config(**model), channels, classes, 32)


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("name", "classifier"),
    [
        ("resnet18-small", ["fc"]),
        ("cnn", ["9"]),
        ("resnet18", ["fc"]),
        ("squeezenet1_1", ["classifier"]),
        ("mobilenet_v3_small", ["classifier"]),
        ("test_resnet", ["fc"]),
        ("test_vit", ["head"]),
    ],
)
def test_freeze_backbone_trains_only_classifier(name: str, classifier: list[str]) -> None:
    model = build(3, name=name, options={})
    assert classifier_paths(model) == classifier
    freeze(model, config(name=name, freeze="backbone").model)
    trainable = {name for name, weights in model.named_parameters() if weights.requires_grad}
    assert trainable == {
        name for name, _ in model.named_parameters() if name.startswith(tuple(f"{head}." for head in classifier))
    }


def test_freeze_reports_all_unknown_names() -> None:
    with pytest.raises(UsageError) as refused:
        freeze(build(3, name="resnet18", options={}), config(freeze=["layer", "layer1", "head"]).model)
    names = "conv1, bn1, layer1, layer2, layer3, layer4, fc, or backbone"
    for problem, values in zip(refused.value.problems, (("'layer'", "layer1?"), ("'head'", names)), strict=True):
        assert has_problem([problem], "unknown-value", "model.freeze", *values)


class Statistics(nn.Module):
    """BatchNorm without affine weights beside a trainable layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.InstanceNorm2d(1, track_running_stats=True))
        self.free = nn.BatchNorm2d(1, affine=False)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.free(self.body(x)).flatten(1))
        return out


def test_freeze_keeps_running_statistics_of_layers_without_weights() -> None:
    model = Statistics()
    frozen = freeze(model, config(freeze=["body"]).model)
    assert frozen == [model.body[0], model.body[1]]
    before = {name: value.clone() for name, value in model.body.state_dict().items()}
    set_train_mode(model, frozen)
    model(torch.rand(3, 1, 4, 4))
    assert same(model.body, before)
    assert model.free.num_batches_tracked == 1


# BatchNorm over all ranks


def test_sync_batch_norm_converts_trainable_layers_and_keeps_parameters() -> None:
    model = build()
    own = list(model.parameters())
    frozen = freeze(model, config(freeze=["bn1"]).model)
    model = convert_to_sync_batch_norm(model, frozen)
    kinds = [type(part) for part in model.modules() if hasattr(part, "running_mean")]
    assert kinds[0] is nn.BatchNorm2d
    assert set(kinds[1:]) == {nn.SyncBatchNorm}
    assert len(kinds) == 20
    assert all(before is after for before, after in zip(own, model.parameters(), strict=True))


def test_sync_batch_norm_keeps_timm_activation() -> None:
    model = build(3, name="test_efficientnet", options={}).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        before = model(images)
        after = convert_to_sync_batch_norm(model, [])(images)
    assert {type(part).__name__ for part in model.modules() if hasattr(part, "running_mean")} == {"SyncBatchNormAct"}
    assert torch.equal(before, after)


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        return 2 * super().forward(input)


def test_sync_batch_norm_rejects_layer_with_its_own_forward() -> None:
    with raises_problem("not-supported", "model.sync_bn", "0 ", " Doubled "):
        convert_to_sync_batch_norm(nn.Sequential(Doubled(1)), [])


def test_sync_batch_norm_leaves_model_without_trainable_batch_norm_unchanged() -> None:
    linear = build(name="linear", options={})
    assert nothing_to_synchronize(linear, []) == "on a model without BatchNorm"
    assert convert_to_sync_batch_norm(linear, []) is linear
    model = build()
    frozen = freeze(model, config(freeze="backbone").model)
    assert nothing_to_synchronize(model, frozen) == "on a model whose BatchNorm layers are all frozen"
    assert not any(isinstance(part, nn.SyncBatchNorm) for part in convert_to_sync_batch_norm(model, frozen).modules())
    assert nothing_to_synchronize(model, []) == ""
