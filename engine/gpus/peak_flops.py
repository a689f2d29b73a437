"""Peak dense TFLOPS of GPUs by NVML product name, the denominator of model FLOPs utilization (MFU).

Called by `engine.train.loop.warmup`. Tensor core figures are with float32 accumulation. Where a datasheet lists figures
with sparsity, the dense figure is half of it. Sources: NVIDIA's datasheets of HGX B300, HGX B200, H200, GH200, H100,
H800, H20, A100, A800, A30, A10, A40, RTX A6000, L4, L40, L40S, V100, V100S and T4, and its whitepapers: "Ampere GA102
GPU Architecture" (RTX 3090), "Ada GPU Architecture" (RTX 4090, RTX 6000 Ada) and "RTX Blackwell GPU Architecture"
(RTX 5090).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config.rules import FLOAT16_LEVELS
from engine.config.training_sections import PrecisionConfig


@dataclass(frozen=True)
class PeakTflops:
    """Peak dense TFLOPS per precision. `fp32` is without tensor cores; None means that its tensor cores lack it."""

    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None


# Regular expressions for the whole product name without "NVIDIA", "Tesla" and "GeForce". MIG instances are not listed,
# because they have only part of a GPU's SMs.
PEAK_TFLOPS: dict[str, PeakTflops] = {
    r"B300( SXM6 AC)?": PeakTflops(75, 1125, 2250, 2250),
    r"B200": PeakTflops(75, 1125, 2250, 2250),
    r"H200|GH200 (120GB|480GB|144G HBM3e)|H100 80GB HBM3|H800": PeakTflops(67, 494.7, 989.4, 989.4),
    r"H200 NVL|H100 NVL": PeakTflops(60, 417.5, 835.5, 835.5),
    r"H20(-3e)?": PeakTflops(44, 74, 148, 148),
    r"(H100|H800) PCIe": PeakTflops(51, 378, 756, 756),
    r"A[18]00-(SXM4?|PCIE)-(40|80)GB|A[18]00 80GB PCIe|A800 40GB Active": PeakTflops(19.5, 156, 312, 312),
    r"A30": PeakTflops(10.3, 82, 165, 165),
    r"A10": PeakTflops(31.2, 62.5, 125, 125),
    r"A40": PeakTflops(37.4, 74.8, 149.7, 149.7),
    r"RTX A6000": PeakTflops(38.7, 77.4, 154.8, 154.8),
    r"L4": PeakTflops(30.3, 60, 121, 121),
    r"L40": PeakTflops(90.5, 90.5, 181, 181),
    r"L40S": PeakTflops(91.6, 183, 362, 362),
    r"V100-SXM[23]-(16|32)GB(-LS)?": PeakTflops(15.7, None, 125, None),
    r"V100-PCIE-(16|32)GB": PeakTflops(14, None, 112, None),
    r"V100S-PCIE-32GB": PeakTflops(16.4, None, 130, None),
    r"T4": PeakTflops(8.1, None, 65, None),
    r"RTX 3090": PeakTflops(35.6, 35.6, 71, 71),
    r"RTX 6000 Ada Generation": PeakTflops(91.1, 182.1, 364.2, 364.2),
    r"RTX 4090": PeakTflops(82.6, 82.6, 165.2, 165.2),
    r"RTX 5090": PeakTflops(104.8, 104.8, 209.5, 209.5),
}
_AMP_DTYPES = {"bf16": "bf16"} | dict.fromkeys(FLOAT16_LEVELS, "fp16")


def peak_tflops(name: str, precision: PrecisionConfig, *, tf32: bool) -> float | None:
    """Return the peak TFLOPS of one GPU at the precision that a run computes in, None if the GPU is unknown.

    `tf32` says whether float32 math uses TF32, see `engine.config.precision`.
    """
    short = re.sub(r"^(NVIDIA )?((Tesla|GeForce) )?", "", name.strip())
    peak = next((peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, short)), None)
    if peak is None:
        return None
    if precision.amp in _AMP_DTYPES:
        half: float | None = getattr(peak, _AMP_DTYPES[precision.amp])
        return half
    return peak.tf32 if tf32 else peak.fp32
