"""A host that cannot run the rehearsal skips it, and says why."""

from __future__ import annotations

import pytest

from support.gpu.fake_cuda import SERVED_TORCH, reason_to_skip


@pytest.mark.parametrize(
    ("compiler", "torch_version", "cuda_version", "reason"),
    [
        ("/usr/bin/cc", f"{SERVED_TORCH[-1]}.0+cu130", "13.0", None),
        (None, f"{SERVED_TORCH[-1]}.0+cu130", "13.0", "no C compiler, which the fake CUDA runtime needs"),
        ("/usr/bin/cc", f"{SERVED_TORCH[-1]}.0+cpu", None, f"torch {SERVED_TORCH[-1]}.0+cpu is not a CUDA build"),
        ("/usr/bin/cc", "2.6.0", "12.4", "the fake CUDA runtime serves torch 2.9, 2.11, 2.14 and 2.15, not 2.6.0"),
    ],
)
def test_rehearsal_is_skipped_with_reason(
    compiler: str | None, torch_version: str, cuda_version: str | None, reason: str | None
) -> None:
    assert reason_to_skip(compiler, torch_version, cuda_version) == reason
