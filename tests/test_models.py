"""Models by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.catalogue import BUILTIN_MODELS, check_model_name, torchvision_models
from engine.config import Model
from engine.models import build_model, check_model, count_parameters, torchvision_names
from engine.problems import UsageError


def build(name: str, channels: int = 3, classes: int = 10, size: int = 32, **more: object) -> nn.Module:
    model = build_model(Model(name=name, **more), channels, classes, size)  # type: ignore[arg-type]
    check_model(model, name, channels, size, classes)
    return model


def test_resnet18_small_has_the_stated_stem_and_stages() -> None:
    model = build("resnet18-small", channels=1, classes=7)
    stem = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    assert (stem.kernel_size, stem.stride, stem.padding, stem.in_channels) == ((3, 3), (1, 1), (1, 1), 1)
    assert not any(isinstance(part, nn.MaxPool2d) for part in model.modules())
    # The published ResNet-18 for CIFAR-10 has 11,173,962 parameters with three channels and ten classes.
    assert count_parameters(build("resnet18-small")) == 11_173_962
    features = model[:-3](torch.zeros(1, 1, 32, 32))  # type: ignore[index]
    assert features.shape == (1, 512, 4, 4)


def test_cnn_has_the_stated_layers() -> None:
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
def test_torchvisions_models_fit_the_datas_classes_and_channels(name: str, channels: int, size: int) -> None:
    build(name, channels, 5, size)


@pytest.mark.parametrize(("name", "size"), [("googlenet", 32), ("inception_v3", 80)])
def test_models_with_side_outputs_give_one_output_in_training_too(name: str, size: int) -> None:
    model = build(name, 1, 4, size).train()
    assert model(torch.rand(2, 1, size, size)).shape == (2, 4)


def test_images_too_small_for_a_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"alexnet cannot take images of 3x8x8.*change model.name or data.image_size"):
        build("alexnet", size=8)
    with pytest.raises(UsageError, match=r"cnn halves its images twice"):
        build("cnn", size=3)


def test_normal_weights_have_the_given_deviation() -> None:
    model = build("resnet18-small", init="normal", init_std=0.05)
    convolution = next(part for part in model.modules() if isinstance(part, nn.Conv2d) and part.in_channels == 512)
    assert convolution.weight.std().item() == pytest.approx(0.05, rel=0.01)
    assert convolution.weight.mean().item() == pytest.approx(0, abs=0.001)
    assert model[-1].bias.abs().max().item() == 0  # type: ignore[index]


def test_the_catalogue_lists_what_torchvision_has(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    names = torchvision_models()
    assert names == torchvision_names()
    assert "resnet50" in names
    monkeypatch.setattr("engine.catalogue._PROGRAM", "raise SystemExit(1)")
    assert torchvision_models() == names, "the second time it comes from the cache"
    for name in (*BUILTIN_MODELS, "resnet50"):
        check_model_name(name)
    with pytest.raises(UsageError, match="did you mean resnet50"):
        check_model_name("resnet500")
