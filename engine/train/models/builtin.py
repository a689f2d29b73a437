"""Built-in networks for small images, used by `engine.train.models.factory`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from engine.base.errors import UsageError

# One SGD step changes the logits in proportion to the squared norm of the classifier's input, which is about its number
# of features. With the default learning rate, training on larger images would diverge.
MAX_FEATURE_NORM_SQUARED = 256


class BasicBlock(nn.Module):
    """Basic ResNet block: two 3x3 convolutions and a shortcut, a 1x1 convolution where the shape changes (He et al.,
    2015). Layers have the names of torchvision's block."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class SmallResNet18(nn.Module):
    """ResNet-18 for small images: a 3x3 stem with stride 1, no max-pool, four stages of two blocks. `width` is the
    number of channels of the first stage and doubles with each stage.

    Layers have the names of torchvision's ResNet-18.
    """

    def __init__(self, channels: int, classes: int, width: int = 64) -> None:
        super().__init__()
        _check_width(width)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(width, width, 1)
        self.layer2 = _stage(width, 2 * width, 2)
        self.layer3 = _stage(2 * width, 4 * width, 2)
        self.layer4 = _stage(4 * width, 8 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.fc(self.avgpool(out).flatten(1))
        return logits


def _stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(in_channels, out_channels, stride), BasicBlock(out_channels, out_channels, 1))


class ScaledFlatten(nn.Module):
    """Flatten each image to a vector and multiply it by `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * self.scale


def _flatten(features: int) -> nn.Module:
    """Return a layer that flattens to `features` values, scaled so that their squared norm is at most
    `MAX_FEATURE_NORM_SQUARED` if each has variance 1."""
    if features <= MAX_FEATURE_NORM_SQUARED:
        return nn.Flatten()
    return ScaledFlatten(math.sqrt(MAX_FEATURE_NORM_SQUARED / features))


def cnn(channels: int, classes: int, size: int, width: int = 32, dropout: float = 0.0) -> nn.Module:
    """Two 3x3 convolutions with `width` and `2 * width` channels, each with BatchNorm, ReLU and 2x2 max-pool, then
    dropout and a linear layer. Its input is scaled down for images larger than 8x8. Raises UsageError if images are
    smaller than 4x4."""
    _check_width(width)
    if size < 4:
        raise UsageError.one(
            "data.image_size", f"cnn needs images of at least 4x4, not {size}x{size}", code="too-small"
        )
    features = 2 * width * (size // 4) ** 2
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), _flatten(features)),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(features, classes),
    )


def linear(channels: int, classes: int, size: int) -> nn.Module:
    """Logistic regression on the pixels, as a baseline. Those of larger images are scaled down."""
    pixels = channels * size * size
    return nn.Sequential(_flatten(pixels), nn.Linear(pixels, classes))


def _check_width(width: int) -> None:
    if not isinstance(width, int) or width < 1:
        raise UsageError.one(
            "model.options", f"width must be an integer of at least 1, not {width!r}", code="invalid-value"
        )


BUILTIN_BUILDERS: dict[str, Callable[..., nn.Module]] = {"cnn": cnn, "linear": linear, "resnet18-small": SmallResNet18}
