"""A model that hangs or runs out of memory on the GPU at a step: user code of stage e."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ENDLESS_CYCLES = 10**12  # eight minutes at 2 GHz
CHUNK_BYTES = 2**28


class Model(nn.Module):
    """A linear classifier with a fault at one training step."""

    def __init__(self, size: int, channels: int, classes: int, fault: str, step: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, classes))
        self.fault, self.fault_step, self.steps = fault, step, 0
        self.kept: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.steps += self.training
        if self.training and self.steps >= self.fault_step:
            if self.fault == "hang":
                torch.cuda._sleep(ENDLESS_CYCLES)
            while self.fault == "memory":
                self.kept.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=images.device))
        logits: Tensor = self.layers(images)
        return logits
