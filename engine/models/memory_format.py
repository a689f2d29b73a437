"""Memory format of images and convolution weights: contiguous (NCHW) or channels_last (NHWC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.models.precision import tf32_is_on


def resolve_memory_format(config: Config, model: nn.Module, device: torch.device) -> torch.memory_format:
    """Return the memory format for `model.channels_last`. `auto` selects channels_last for models with 2d convolutions
    where it is faster: on GPUs with mixed precision or TF32, whose tensor cores need NHWC, and on the CPU. Measured on
    one CPU core in float32, forward and backward: 0.67 to 0.75 of the time for cnn at 28x28, 0.70 and 0.74 for
    SqueezeNet and MobileNetV3 at 64x64 (max-pools and depthwise convolutions gain most), 0.99 to 1.1 for VGG-11 and
    ResNet-18.

    `auto` leaves user models contiguous: the common `view(len(x), -1)` fails on channels_last tensors.
    """
    setting = config.model.channels_last
    if setting == "auto":
        convolves = any(isinstance(part, nn.Conv2d) for part in model.modules())
        on_tensor_cores = config.precision.amp not in ("off", "O0") or tf32_is_on(device)
        faster = device.type == "cpu" or on_tensor_cores
        is_user_model = config.model.source == "auto" and is_user_code(config.model.name)
        setting = "on" if convolves and faster and not is_user_model else "off"
    return torch.channels_last if setting == "on" else torch.contiguous_format


def apply_memory_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Convert the 4-dimensional weights; the parameters stay the same objects."""
    if memory_format is torch.channels_last:
        model.to(memory_format=memory_format)


def contiguous_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict in contiguous format, so that files do not depend on the memory format."""
    return {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in state.items()}
