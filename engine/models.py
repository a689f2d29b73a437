"""Models by name: those of small images written out here, and torchvision's with their ends made to fit the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.catalogue import BUILTIN_MODELS
from engine.config import Model
from engine.problems import UsageError, nearest


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


def resnet18_small(channels: int, classes: int) -> nn.Module:
    """ResNet-18 for small images: a 3x3 stem of stride 1 and no max-pool, 64-128-256-512 channels, two blocks each."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
    ]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*layers)


def cnn(channels: int, classes: int, size: int) -> nn.Module:
    """Two 3x3 convolutions, to 32 and 64 channels, each with BatchNorm, ReLU and 2x2 max-pool; one linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(64 * (size // 4) ** 2, classes),
    )


def linear(channels: int, classes: int, size: int) -> nn.Module:
    """One linear layer on the pixels: the baseline."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))


def build_model(model: Model, channels: int, classes: int, size: int) -> nn.Module:
    """The model for images of C x size x size. Raises UsageError for an unknown name or images that do not suit."""
    if model.name == "resnet18-small":
        built = resnet18_small(channels, classes)
    elif model.name == "cnn":
        if size < 4:
            raise UsageError.one(
                "data.image_size", f"cnn halves its images twice, these are {size}x{size}; give 4 or more"
            )
        built = cnn(channels, classes, size)
    elif model.name == "linear":
        built = linear(channels, classes, size)
    else:
        built = torchvision_model(model.name, channels, classes, size)
    if model.init == "normal":
        init_normal(built, model.init_std)
    return built


def torchvision_names() -> list[str]:
    """torchvision's classification models."""
    from torchvision import models

    return [str(name) for name in models.list_models(module=models)]


def torchvision_model(name: str, channels: int, classes: int, size: int) -> nn.Module:
    """torchvision's model with random weights, its head made for `classes` and its stem for `channels`."""
    from torchvision import models

    known = torchvision_names()
    if name not in known:
        raise UsageError.one("model.name", f"there is no model {name!r}{nearest(name, [*BUILTIN_MODELS, *known])}")
    options: dict[str, Any] = {"weights": None, "num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options |= {"image_size": size}
    elif name == "maxvit_t":
        options |= {"input_size": (size, size)}
    try:
        built: nn.Module = models.get_model(name, **options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError.one("model.name", f"{name} cannot be made for images of {size}x{size}: {error}") from error
    if channels != 3:
        replace_stem(built, channels)
    if hasattr(built, "transform_input"):
        setattr(built, "transform_input", False)  # noqa: B010 - a module types its attributes as modules
    return built


def replace_stem(model: nn.Module, channels: int) -> None:
    """Put a fresh convolution that takes `channels` in the place of the model's first."""
    path, stem = next((path, part) for path, part in model.named_modules() if isinstance(part, nn.Conv2d))
    fresh = nn.Conv2d(
        channels,
        stem.out_channels,
        stem.kernel_size,  # type: ignore[arg-type]
        stem.stride,  # type: ignore[arg-type]
        stem.padding,  # type: ignore[arg-type]
        bias=stem.bias is not None,
    )
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)


def init_normal(model: nn.Module, deviation: float) -> None:
    """Weights of convolutions and linear layers from a normal distribution around 0, their biases 0."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.normal_(part.weight, std=deviation)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers."""
    return sum(value.nbytes for value in (*model.parameters(), *model.buffers()))


def check_model(model: nn.Module, name: str, channels: int, size: int, classes: int) -> None:
    """Raises UsageError where the model cannot take the images, or does not give one value a class for each."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            out = model(torch.zeros(1, channels, size, size))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UsageError.one(
            "model.name",
            f"{name} cannot take images of {channels}x{size}x{size}: {error}; change model.name or data.image_size",
        ) from error
    finally:
        model.train(training)
    if not isinstance(out, Tensor) or tuple(out.shape) != (1, classes):
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UsageError.one("model.name", f"{name} gives {shape} for one image where {(1, classes)} is wanted")
