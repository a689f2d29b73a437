"""`build_model`: every source of models, and its options."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.models.factory import build_model, check_model, count_parameters
from engine.utils.errors import UsageError


def build(name: str, channels: int = 3, classes: int = 10, size: int = 32, **more: Any) -> nn.Module:
    config = Config(model=ModelConfig(name=name, **more))
    model = build_model(config, channels, classes, size)
    check_model(model, config, channels, size, classes)
    return model


def test_resnet18_small_has_documented_stem_and_stages() -> None:
    model = build("resnet18-small", channels=1, classes=7)
    stem = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    assert (stem.kernel_size, stem.stride, stem.padding, stem.in_channels) == ((3, 3), (1, 1), (1, 1), 1)
    assert not any(isinstance(part, nn.MaxPool2d) for part in model.modules())
    # The published ResNet-18 for CIFAR-10 has 11,173,962 parameters with three channels and ten classes.
    assert count_parameters(build("resnet18-small")) == 11_173_962
    features: list[torch.Size] = []
    model.get_submodule("layer4").register_forward_hook(lambda _, inputs, output: features.append(output.shape))
    model(torch.zeros(1, 1, 32, 32))
    assert features == [(1, 512, 4, 4)]


def test_resnet18_small_names_layers_like_torchvision() -> None:
    ours, theirs = build("resnet18-small").state_dict(), build("resnet18").state_dict()
    assert list(ours) == list(theirs)
    different = {name for name in ours if ours[name].shape != theirs[name].shape}
    assert different == {"conv1.weight"}  # 3x3 instead of 7x7


def test_cnn_has_documented_layers() -> None:
    model = build("cnn", channels=1, size=28)
    assert [type(part).__name__ for part in model] == [
        *["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"] * 2,
        *["Flatten", "Linear"],
    ]
    assert count_parameters(model) == 1 * 32 * 9 + 32 + 64 + 32 * 64 * 9 + 64 + 128 + 64 * 49 * 10 + 10


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("resnet18", 1, 32),
        ("mobilenet_v3_small", 3, 32),
        ("vit_b_16", 1, 32),
        ("squeezenet1_1", 1, 32),
        ("densenet121", 1, 32),
    ],
)
def test_torchvision_model_fits_classes_and_channels(name: str, channels: int, size: int) -> None:
    build(name, channels, 5, size)


@pytest.mark.parametrize(
    ("name", "size"), [("googlenet", 32), pytest.param("inception_v3", 80, marks=pytest.mark.nightly)]
)
def test_model_with_auxiliary_outputs_returns_single_output(name: str, size: int) -> None:
    model = build(name, 1, 4, size).train()
    assert model(torch.rand(2, 1, size, size)).shape == (2, 4)


def test_build_model_rejects_too_small_images() -> None:
    with pytest.raises(UsageError, match=r"alexnet does not accept 3x8x8 images.*change model.name or data.image_size"):
        build("alexnet", size=8)
    with pytest.raises(UsageError, match=r"cnn needs images of at least 4x4"):
        build("cnn", size=3)


def test_build_model_normal_init_has_requested_std() -> None:
    model = build("resnet18-small", init="normal", init_std=0.05)
    convolution = next(part for part in model.modules() if isinstance(part, nn.Conv2d) and part.in_channels == 512)
    assert convolution.weight.std().item() == pytest.approx(0.05, rel=0.01)
    assert convolution.weight.mean().item() == pytest.approx(0, abs=0.001)
    assert model.get_parameter("fc.bias").abs().max().item() == 0


def refusal(name: str, **more: Any) -> str:
    with pytest.raises(UsageError) as refused:
        build(name, **more)
    return str(refused.value)


def test_build_model_uses_first_library_with_name_unless_source_is_set() -> None:
    assert type(build("resnet18")).__module__.startswith("torchvision.")
    assert type(build("resnet18", source="timm")).__module__.startswith("timm.")
    assert type(build("test_resnet")).__module__.startswith("timm.")
    assert "there is no torchvision model 'test_resnet'" in refusal("test_resnet", source="torchvision")
    assert "no builtin model 'resnet18'; did you mean resnet18-small?" in refusal("resnet18", source="builtin")
    assert "there is no model 'test_resnett'; did you mean test_resnet?" in refusal("test_resnett")


@pytest.mark.parametrize(("name", "size"), [("test_resnet", 32), ("test_vit", 48), ("test_efficientnet", 32)])
def test_timm_model_fits_classes_channels_and_size(name: str, size: int) -> None:
    build(name, 1, 5, size)


def test_build_model_reports_missing_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.factory.find_spec", lambda name: None)
    monkeypatch.setattr("engine.utils.libraries.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert refusal("test_vit", source="timm") == ("model.source: timm is not installed: pip install timm")
    assert refusal("test_vit").startswith("model.name: there is no model 'test_vit'")


@pytest.mark.parametrize(
    ("name", "options", "kind", "attribute", "value"),
    [
        ("cnn", {"dropout": 0.3}, nn.Dropout, "p", 0.3),
        ("resnet18-small", {"width": 4}, nn.Linear, "in_features", 32),
        ("mobilenet_v3_small", {"dropout": 0.3}, nn.Dropout, "p", 0.3),
        ("test_vit", {"pos_drop_rate": 0.3}, nn.Dropout, "p", 0.3),
    ],
)
def test_build_model_passes_options_to_constructor(
    name: str, options: dict[str, object], kind: type[nn.Module], attribute: str, value: float
) -> None:
    parts = [part for part in build(name, options=options).modules() if isinstance(part, kind)]
    assert value in [getattr(part, attribute) for part in parts]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("cnn", {"widht": 3}, "cnn has no option 'widht'; did you mean width?"),
        ("linear", {"depth": 3}, "linear has no option 'depth'; it has no options"),
        ("cnn", {"width": 0}, "width must be an integer of at least 1, not 0"),
        ("cnn", {"dropout": 2}, "cnn cannot be built with {'dropout': 2}"),
        ("resnet18", {"depth": 3}, "resnet18 has no option 'depth'; it has zero_init_residual, groups"),
        ("mobilenet_v3_small", {"dropuot": 0.3}, "mobilenet_v3_small has no option 'dropuot'; did you mean dropout?"),
        ("efficientnet_b0", {"dropout": "much"}, "efficientnet_b0 cannot be built for 32x32 images with"),
        ("test_vit", {"drop_rat": 0.3}, "test_vit has no option 'drop_rat'; did you mean drop_rate?"),
        ("resnet18", {"weights": "DEFAULT"}, "weights is derived from the data and other keys; remove it"),
        ("test_vit", {"checkpoint_path": "w.pt"}, "checkpoint_path is derived from the data and other keys"),
    ],
)
def test_build_model_rejects_invalid_options(name: str, options: dict[str, object], expected: str) -> None:
    refused = refusal(name, options=options)
    assert refused.startswith(f"model.options: {expected}")
    assert "\n" not in refused


def test_build_model_reports_all_invalid_options_together() -> None:
    assert refusal("cnn", options={"classes": 3, "layers": 3}) == (
        "model.options: classes is derived from the data and other keys; remove it\n"
        "model.options: cnn has no option 'layers'; it has width, dropout"
    )
