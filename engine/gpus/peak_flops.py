"""Peak dense TFLOPS of GPUs by NVML product name, the denominator of model FLOPs utilization (MFU).

Called by `engine.training.warmup`. Tensor core figures are with float32 accumulation. Where a datasheet lists figures
with sparsity, the dense figure is half of it. Sources: NVIDIA's datasheets of HGX B200, H200, GH200, H100, A100, A30,
A10, A40, RTX A6000, L4, L40, L40S, V100, V100S and T4, and its GA102 and Ada architecture whitepapers for GeForce GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    r"B200": PeakTflops(75, 1100, 2250, 2250),
    r"H200|GH200 (480GB|144G HBM3e)|H100 80GB HBM3": PeakTflops(67, 494.7, 989.4, 989.4),
    r"H200 NVL|H100 NVL": PeakTflops(60, 417.5, 835.5, 835.5),
    r"H100 PCIe": PeakTflops(51, 378, 756, 756),
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": PeakTflops(19.5, 156, 312, 312),
    r"A30": PeakTflops(10.3, 82, 165, 165),
    r"A10": PeakTflops(31.2, 62.5, 125, 125),
    r"A40": PeakTflops(37.4, 74.8, 149.7, 149.7),
    r"RTX A6000": PeakTflops(38.7, 77.4, 154.8, 154.8),
    r"L4": PeakTflops(30.3, 60, 121, 121),
    r"L40": PeakTflops(90.5, 90.5, 181, 181),
    r"L40S": PeakTflops(91.6, 183, 362, 362),
    r"V100-SXM2-(16|32)GB(-LS)?": PeakTflops(15.7, None, 125, None),
    r"V100-PCIE-(16|32)GB": PeakTflops(14, None, 112, None),
    r"V100S-PCIE-32GB": PeakTflops(16.4, None, 130, None),
    r"T4": PeakTflops(8.1, None, 65, None),
    r"RTX 3090": PeakTflops(35.6, 35.6, 71, 71),
    r"RTX 4090": PeakTflops(82.6, 82.6, 165.2, 165.2),
}
_AMP_DTYPES = {"bf16": "bf16", "fp16": "fp16", "O1": "fp16", "O2": "fp16", "O3": "fp16"}


def peak_tflops(name: str, precision: PrecisionConfig) -> float | None:
    """Return the peak TFLOPS of one GPU at the precision that a run computes in, None if the GPU is unknown.

    float32 counts as TF32 unless `precision.tf32` is "off", because cuDNN convolutions use TF32 by default.
    """
    short = re.sub(r"^(NVIDIA )?((Tesla|GeForce) )?", "", name.strip())
    peak = next((peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, short)), None)
    if peak is None:
        return None
    if precision.amp in _AMP_DTYPES:
        half: float | None = getattr(peak, _AMP_DTYPES[precision.amp])
        return half
    return peak.fp32 if precision.tf32 == "off" or peak.tf32 is None else peak.tf32
