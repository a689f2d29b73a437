"""Mixed precision: autocast, gradient scaling and half-precision models; and the memory format, which follows from it.

`off` and `O0` compute in float32. `bf16` is autocast to bfloat16. `fp16` and `O1` are autocast to float16 with a
gradient scaler. `O2` is a float16 model with float32 BatchNorm, float32 master weights and a scaler. `O3` is all
float16. The levels are those of NVIDIA Apex.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from engine.base.errors import Problem
from engine.config.precision import Capability, uses_tf32
from engine.config.schema import Config
from engine.config.training_sections import PrecisionConfig
from engine.config.user_code import is_user_code

_AUTOCAST_DTYPES = {"fp16": torch.float16, "O1": torch.float16, "bf16": torch.bfloat16}
_GRAD_SCALER_MODES = {"fp16", "O1", "O2"}


def autocast(precision: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context, a null context if the level does not use autocast."""
    dtype = _AUTOCAST_DTYPES.get(precision.amp)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def build_grad_scaler(precision: PrecisionConfig, device: torch.device) -> torch.amp.GradScaler:
    """Return a gradient scaler, disabled for levels without loss scaling."""
    return torch.amp.GradScaler(device.type, enabled=precision.amp in _GRAD_SCALER_MODES)


def max_scaler_skips(precision: PrecisionConfig) -> int:
    """Consecutive steps that the gradient scaler may skip while it searches its scale. It starts at 2^16 and halves the
    scale at each skip; a gradient that overflows at 2^-8 cannot be scaled."""
    return 24 if precision.amp in _GRAD_SCALER_MODES else 0


def input_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Data type of the images that the model receives."""
    return torch.float16 if precision.amp in ("O2", "O3") else torch.float32


def apply_half_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module | None:
    """Convert a float32 model for its precision level. For O2, return a float32 copy to train instead: the master
    weights."""
    if precision.amp == "O3":
        model.half()
    if precision.amp != "O2":
        return None
    master = deepcopy(model)
    for part in model.modules():
        if not isinstance(part, _BatchNorm):
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.half()
    return master


def model_grads_to_master_grads(model: nn.Module, master: nn.Module) -> None:
    """Copy the gradients of the model to the master weights in float32."""
    for mine, own in zip(model.parameters(), master.parameters(), strict=True):
        own.grad = None if mine.grad is None else mine.grad.float()


@torch.no_grad()
def master_params_to_model_params(model: nn.Module, master: nn.Module) -> None:
    """Copy the master weights back to the model."""
    torch._foreach_copy_(list(model.parameters()), list(master.parameters()))


def full_precision_state_dict(model: nn.Module, master: nn.Module | None) -> dict[str, Tensor]:
    """Return the state dict in float32: the master weights if there are any, and the model's own buffers."""
    state = {
        name: value.float() if value.dtype == torch.float16 else value for name, value in model.state_dict().items()
    }
    if master is None:
        return state
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: state[name] if name in buffers else value for name, value in master.state_dict().items()}


def device_capability(device: torch.device) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else None


def set_tf32(precision: PrecisionConfig, device: torch.device, capability: Capability | None) -> None:
    """Switch TF32 on or off for the matrix products and convolutions of a GPU. `capability` is the lowest of the GPUs
    of all ranks: the memory format follows from TF32, and DDP needs the same on all ranks.

    Only the legacy switches: after a write to `fp32_precision`, Inductor fails to read them (pytorch#166387). On the
    CPU nothing is set, because there `high` lets oneDNN round to bfloat16 or TF32."""
    if device.type == "cuda":
        tf32 = uses_tf32(precision, capability)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32


def tf32_is_on(device: torch.device) -> bool:
    """Whether this process computes float32 matrix products of the device in TF32, as `set_tf32` has chosen."""
    return device.type == "cuda" and torch.get_float32_matmul_precision() == "high"


def precision_problems(precision: PrecisionConfig, device: torch.device) -> Iterator[Problem]:
    """Yield why the device does not support the precision."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else "the CPU"
    if precision.amp == "bf16" and is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        reason = f"{name} does not support bfloat16; set precision.amp to fp16 or off"
        yield Problem("precision.amp", reason, code="not-supported")
    if precision.tf32 == "on" and not uses_tf32(precision, device_capability(device)):
        reason = f"{name} does not support TF32; set precision.tf32 to auto or off"
        yield Problem("precision.tf32", reason, code="not-supported")


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
