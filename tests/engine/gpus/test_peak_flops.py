"""Peak TFLOPS of GPU models."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.training_sections import PrecisionConfig
from engine.gpus.peak_flops import PEAK_TFLOPS, peak_tflops


@pytest.mark.parametrize(
    ("name", "amp", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "off", 494.7),
        ("NVIDIA H100 PCIe", "O2", 756),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "off", 156),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H20", "off", 74),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA B300 SXM6 AC", "off", 1125),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("Tesla V100-SXM2-16GB", "O1", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("Some Card", "off", None),
    ],
)
def test_peak_tflops_depends_on_gpu_and_precision(name: str, amp: Any, tflops: float | None) -> None:
    assert peak_tflops(name, PrecisionConfig(amp=amp), tf32=True) == tflops


def test_peak_tflops_table_has_no_sparse_values() -> None:
    """Dense tensor cores have twice the throughput in 16 bits as in TF32; sparse values would be four times as high."""
    for peak in PEAK_TFLOPS.values():
        assert peak.bf16 is None or peak.tf32 is None or peak.bf16 <= 2.06 * peak.tf32
        assert peak.fp32 <= peak.fp16
