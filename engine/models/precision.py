"""What numbers a model computes with: autocast, gradient scaling, and models of half precision.

`off` and `O0` are float32; `bf16` is autocast to bfloat16; `fp16` and `O1` are autocast to float16 with a gradient
scaler; `O2` is a float16 model with BatchNorm and master weights in float32 and a scaler; `O3` is all float16. The
levels are those of NVIDIA's Apex.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from engine.config.training_sections import PrecisionConfig
from engine.utils.errors import Problem

_AUTOCAST_DTYPES = {"fp16": torch.float16, "O1": torch.float16, "bf16": torch.bfloat16}
_GRAD_SCALER_MODES = {"fp16", "O1", "O2"}
# Compute capability of the first GPUs with TF32, Ampere's.
_TF32_MIN_CAPABILITY = (8, 0)


def autocast(precision: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Does nothing where all is computed in the model's own type."""
    dtype = _AUTOCAST_DTYPES.get(precision.amp)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def build_grad_scaler(precision: PrecisionConfig, device: torch.device) -> torch.amp.GradScaler:
    """Passes everything through where no scaling is needed."""
    return torch.amp.GradScaler(device.type, enabled=precision.amp in _GRAD_SCALER_MODES)


def max_scaler_skips(precision: PrecisionConfig) -> int:
    """Steps in a row that the gradient scaler may leave out while it looks for its scale: it begins with 2^16, halves
    it at each, and a gradient that does not fit at 2^-8 is none that scaling helps."""
    return 24 if precision.amp in _GRAD_SCALER_MODES else 0


def input_dtype(precision: PrecisionConfig) -> torch.dtype:
    """What images are given to the model in."""
    return torch.float16 if precision.amp in ("O2", "O3") else torch.float32


def apply_half_precision(model: nn.Module, precision: PrecisionConfig) -> nn.Module | None:
    """Bring a float32 model to the type that its level asks for, and give a float32 copy that is to be trained in its
    place where there is to be one: the master weights of O2."""
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
    """Those of the model to its master."""
    for mine, own in zip(model.parameters(), master.parameters(), strict=True):
        own.grad = None if mine.grad is None else mine.grad.float()


@torch.no_grad()
def master_params_to_model_params(model: nn.Module, master: nn.Module) -> None:
    """Those of the master back to the model."""
    torch._foreach_copy_(list(model.parameters()), list(master.parameters()))


def full_precision_state_dict(model: nn.Module, master: nn.Module | None) -> dict[str, Tensor]:
    """The model's state dict in float32: its master's weights where it has one, and its own buffers."""
    state = {
        name: value.float() if value.dtype == torch.float16 else value for name, value in model.state_dict().items()
    }
    if master is None:
        return state
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: state[name] if name in buffers else value for name, value in master.state_dict().items()}


def set_tf32(precision: PrecisionConfig) -> None:
    if precision.tf32 != "auto":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision.tf32 == "on"


def precision_problems(precision: PrecisionConfig, device: torch.device) -> list[Problem]:
    """Why the device cannot compute so."""
    problems = []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if (
        precision.amp == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        problems.append(Problem("precision.amp", f"{name} has no bfloat16; give fp16 or off"))
    if precision.tf32 == "on" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < _TF32_MIN_CAPABILITY
    ):
        problems.append(Problem("precision.tf32", f"{name} has no TF32; give auto or off"))
    return problems
