"""`build_model`: every source of models, and its options."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from engine.base.errors import Problem, UsageError
from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.train.data.sources.base import ImageFormat
from engine.train.models.factory import build_model, check_model
from engine.train.optim.param_groups import count_parameters
from support.messages import has_problem, raises_problem


def build(name: str, channels: int = 3, classes: int = 10, size: int = 32, **more: Any) -> nn.Module:
    config = Config(model=ModelConfig(name=name, **more))
    model = build_model(config, channels, classes, size)
    check_model(model, config, image_format(channels), size, classes)
    return model


def image_format(channels: int, dtype: Literal["uint8", "float32"] = "uint8") -> ImageFormat:
    return ImageFormat(32, channels, (0.0,) * channels, (1.0,) * channels, dtype=dtype)


def test_resnet18_small_names_layers_like_torchvision() -> None:
    ours, theirs = build("resnet18-small").state_dict(), build("resnet18").state_dict()
    assert list(ours) == list(theirs)
    different = {name for name in ours if ours[name].shape != theirs[name].shape}
    assert different == {"conv1.weight"}  # 3x3 instead of 7x7


def test_cnn_has_documented_layers() -> None:
    model = build("cnn", channels=1, size=28)
    assert [type(part).__name__ for part in model] == [
        *["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"] * 2,
        *["ScaledFlatten", "Linear"],
    ]
    assert count_parameters(model) == 1 * 32 * 9 + 32 + 64 + 32 * 64 * 9 + 64 + 128 + 64 * 49 * 10 + 10


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("resnet18", 1, 32),
        ("mobilenet_v3_small", 3, 32),
        ("vit_b_16", 1, 32),
        ("squeezenet1_1", 1, 32),
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
    with raises_problem("not-supported", "model.name", "alexnet ", " 3x8x8 ", "model.name", "data.image_size"):
        build("alexnet", size=8)
    with raises_problem("too-small", "data.image_size", "cnn ", " 4x4, ", " 3x3"):
        build("cnn", size=3)


@pytest.mark.parametrize(("takes", "channels"), [(1, 3), (3, 1)])
def test_check_model_names_number_of_channels_that_the_model_takes(takes: int, channels: int) -> None:
    model, config = nn.Sequential(nn.Conv2d(takes, 4, 32), nn.Flatten()), Config(model=ModelConfig(name="own"))
    with raises_problem("not-supported", "model.name", "own ", f" {takes} ", f" {channels};", f"data.channels={takes}"):
        check_model(model, config, image_format(channels), 32, 4)
    # data.channels converts no tensors of the user.
    with raises_problem("not-supported", "model.name", f" {channels}x32x32 "):
        check_model(model, config, image_format(channels, "float32"), 32, 4)


def test_build_model_normal_init_has_requested_std() -> None:
    model = build("resnet18-small", init="normal", init_std=0.05)
    convolution = next(part for part in model.modules() if isinstance(part, nn.Conv2d) and part.in_channels == 512)
    assert convolution.weight.std().item() == pytest.approx(0.05, rel=0.01)
    assert convolution.weight.mean().item() == pytest.approx(0, abs=0.001)
    assert model.get_parameter("fc.bias").abs().max().item() == 0


def refusal(name: str, **more: Any) -> list[Problem]:
    with pytest.raises(UsageError) as refused:
        build(name, **more)
    return refused.value.problems


def test_build_model_uses_first_library_with_name_unless_source_is_set() -> None:
    assert type(build("resnet18")).__module__.startswith("torchvision.")
    assert type(build("resnet18", source="timm")).__module__.startswith("timm.")
    assert type(build("test_resnet")).__module__.startswith("timm.")
    unknown = ("unknown-value", "model.name")
    assert has_problem(refusal("test_resnet", source="torchvision"), *unknown, " torchvision ", "'test_resnet'")
    assert has_problem(refusal("resnet18", source="builtin"), *unknown, " builtin ", "'resnet18'", "resnet18-small?")
    assert has_problem(refusal("test_resnett"), *unknown, "'test_resnett'", "test_resnet?")


@pytest.mark.parametrize(("name", "size"), [("test_resnet", 32), ("test_vit", 48), ("test_efficientnet", 32)])
def test_timm_model_fits_classes_channels_and_size(name: str, size: int) -> None:
    build(name, 1, 5, size)


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
    ("name", "options", "code", "values"),
    [
        ("cnn", {"widht": 3}, "unknown-key", ["cnn ", "'widht'", "width?"]),
        ("linear", {"depth": 3}, "unknown-key", ["linear ", "'depth'"]),
        ("cnn", {"width": 0}, "invalid-value", ["width ", " 1, ", " 0"]),
        ("cnn", {"dropout": 2}, "invalid-value", ["cnn ", "{'dropout': 2}"]),
        ("resnet18", {"depth": 3}, "invalid-value", ["resnet18 ", "'depth'"]),
        ("efficientnet_b0", {"dropout": "much"}, "invalid-value", ["efficientnet_b0 ", " 32x32 "]),
        ("test_vit", {"drop_rat": 0.3}, "invalid-value", ["test_vit ", "'drop_rat'"]),
        ("resnet18", {"weights": "DEFAULT"}, "fixed-value", ["weights "]),
        ("test_vit", {"checkpoint_path": "w.pt"}, "fixed-value", ["checkpoint_path "]),
    ],
)
def test_build_model_rejects_invalid_options(
    name: str, options: dict[str, object], code: str, values: list[str]
) -> None:
    [problem] = refusal(name, options=options)
    assert has_problem([problem], code, "model.options", *values)
    assert "\n" not in str(problem)
