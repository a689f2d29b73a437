"""TF32 on the device of a rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from engine.config.training_sections import PrecisionConfig
from engine.train.models.precision import set_tf32, tf32_is_on


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.parametrize(("capability", "used"), [((9, 0), True), ((7, 0), False)])
def test_tf32_auto_follows_gpu_and_stays_readable(capability: tuple[int, int], used: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_tf32(PrecisionConfig(), torch.device("cuda"), capability)
        assert tf32_is_on(torch.device("cuda")) == used
        # What Inductor reads, which fails after a write to `fp32_precision`.
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == used
        assert torch.get_float32_matmul_precision() == ("high" if used else "highest")
