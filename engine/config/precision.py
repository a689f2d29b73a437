"""The precision that a run computes in, chosen from its config and the compute capability of its GPUs.

`engine.jobs.launch.preflight` resolves `precision.amp: auto` once, before the ranks start, so that the config of the
run and of its checkpoints has the level. TF32 depends on nothing but config and GPU: preflight and ranks both ask
`uses_tf32`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.codec import Count
from engine.config.rules import FLOAT16_LEVELS
from engine.config.schema import Config
from engine.config.training_sections import AmpLevel, PrecisionConfig

# Major and minor number; None for the CPU.
Capability = tuple[Count, Count]
# Ampere has the first tensor cores for bfloat16 and TF32.
AMPERE: Capability = (8, 0)


@dataclass(frozen=True)
class AmpChoice:
    """A level of `precision.amp`. `reason` is a clause to print in parentheses; "" if the config sets the level."""

    level: AmpLevel
    reason: str = ""


def choose_amp(config: Config, capability: Capability | None, *, on_gpu: bool) -> AmpChoice:
    """Return the level of `precision.amp`; auto is bf16 on GPUs with tensor cores for it, else off.

    fp16 is never chosen: its loss scaling skips steps, so a run would learn something else on another GPU."""
    level = config.precision.amp
    if level != "auto":
        return AmpChoice(level)
    if not on_gpu:
        return AmpChoice("off", "auto: on the CPU")
    if config.device.parallel == "dp":
        return AmpChoice("off", "auto: device.parallel=dp does not support bf16")
    if capability is None:
        return AmpChoice("off", "auto: the compute capability of the GPU is unknown")
    if capability < AMPERE:
        return AmpChoice("off", f"auto: compute capability {capability[0]}.{capability[1]} has no bf16")
    return AmpChoice("bf16", "auto")


def uses_tf32(precision: PrecisionConfig, capability: Capability | None) -> bool:
    """Whether float32 matrix products and convolutions use TF32, which only NVIDIA GPUs from Ampere on have."""
    return precision.tf32 != "off" and capability is not None and capability >= AMPERE


def describe_precision(amp: AmpChoice, *, tf32: bool, channels_last: bool = False) -> str:
    """Return what a run computes in as one line: `bf16 AMP (auto), TF32, channels_last`."""
    if amp.level in ("off", "O0"):
        level = "float32"
    else:
        level = f"{amp.level} AMP" if amp.level not in FLOAT16_LEVELS - {"fp16"} else f"Apex {amp.level}"
    parts = [f"{level} ({amp.reason})" if amp.reason else level]
    parts += ["TF32"] if tf32 else []
    parts += ["channels_last"] if channels_last else []
    return ", ".join(parts)
