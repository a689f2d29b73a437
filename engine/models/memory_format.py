"""How images and the weights of convolutions lie in memory: channel by channel, or the channels of each pixel together
(channels_last)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.schema import Config
from engine.config.user_code import is_user_code


def resolve_memory_format(config: Config, model: nn.Module, device: torch.device) -> torch.memory_format:
    """What `model.channels_last` asks for. With `auto` the channels lie together where that is faster: in models with
    two-dimensional convolutions, on GPUs in half precision, whose tensor cores want it so, and on the CPU. On one core,
    forward and back in float32, cnn on 28x28 was measured to take 0.67 to 0.75 of the time, SqueezeNet and MobileNetV3
    on 64x64 0.70 and 0.74 (max-pools and depthwise convolutions gain the most), VGG-11 and ResNet-18 0.99 to 1.1.

    A model of the user's own is left as it is by `auto`: `view(len(x), -1)`, which many have, fails on such images.
    """
    wanted = config.model.channels_last
    if wanted == "auto":
        convolves = any(isinstance(part, nn.Conv2d) for part in model.modules())
        faster = device.type == "cpu" or config.precision.amp not in ("off", "O0")
        own = config.model.source == "auto" and is_user_code(config.model.name)
        wanted = "on" if convolves and faster and not own else "off"
    return torch.channels_last if wanted == "on" else torch.contiguous_format


def apply_memory_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Only weights of four dimensions are touched. The parameters stay the same objects."""
    if memory_format is torch.channels_last:
        model.to(memory_format=memory_format)


def contiguous_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as it would be without: a file says nothing of how the model lay in memory."""
    return {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in state.items()}
