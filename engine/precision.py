"""Mixed precision: where autocast applies, and the gradient scaler that fp16 needs."""

from __future__ import annotations

import torch

from engine.config import Precision
from engine.problems import UsageError

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    enabled = precision.amp != "off"
    return torch.autocast(device.type, dtype=_TYPES.get(precision.amp), enabled=enabled)


def gradient_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Passes everything through where no scaling is needed."""
    return torch.amp.GradScaler(device.type, enabled=precision.amp == "fp16")


def skips_of_scaler(precision: Precision) -> int:
    """Steps in a row that the gradient scaler may leave out while it looks for its scale: it begins with 2^16, halves
    it at each, and a gradient that does not fit at 2^-8 is none that scaling helps."""
    return 24 if precision.amp == "fp16" else 0


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raises UsageError where the device cannot compute so."""
    if (
        precision.amp == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UsageError.one("precision.amp", f"{torch.cuda.get_device_name(device)} has no bfloat16; give fp16 or off")
