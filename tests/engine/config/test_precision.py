"""The precision of a run follows from its config and the compute capability of its GPUs."""

from __future__ import annotations

import pytest

from engine.config.loader import resolve_config
from engine.config.precision import AmpChoice, Capability, choose_amp, uses_tf32
from engine.config.training_sections import PrecisionConfig

A100, T4 = (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("overrides", "capability", "on_gpu", "choice"),
    [
        (("precision.amp=auto",), A100, True, AmpChoice("bf16", "auto")),
        (("precision.amp=auto",), (12, 0), True, AmpChoice("bf16", "auto")),
        (("precision.amp=auto",), T4, True, AmpChoice("off", "auto: compute capability 7.5 has no bf16")),
        (("precision.amp=auto",), None, True, AmpChoice("off", "auto: the compute capability of the GPU is unknown")),
        (("precision.amp=auto",), None, False, AmpChoice("off", "auto: on the CPU")),
        (
            ("precision.amp=auto", "device.parallel=dp"),
            A100,
            True,
            AmpChoice("off", "auto: device.parallel=dp does not support bf16"),
        ),
        (("precision.amp=fp16",), A100, True, AmpChoice("fp16")),
        (("precision.amp=bf16",), None, False, AmpChoice("bf16")),
    ],
)
def test_choose_amp_takes_bf16_where_gpu_has_it(
    overrides: tuple[str, ...], capability: Capability | None, on_gpu: bool, choice: AmpChoice
) -> None:
    config = resolve_config("digits", overrides).config
    assert choose_amp(config, capability, on_gpu=on_gpu) == choice


@pytest.mark.parametrize(
    ("tf32", "capability", "used"),
    [("auto", A100, True), ("auto", T4, False), ("auto", None, False), ("off", A100, False), ("on", T4, False)],
)
def test_tf32_is_used_where_gpu_has_it(tf32: str, capability: Capability | None, used: bool) -> None:
    assert uses_tf32(PrecisionConfig.model_validate({"tf32": tf32}), capability) == used
