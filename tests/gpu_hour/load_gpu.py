"""Keep the first GPU at a steady load until killed, for at most five minutes: matrix products, and copies over PCIe in
both directions."""

from __future__ import annotations

import os
import time

import torch

SIZE, COPY_BYTES, PRODUCTS = 8192, 2**26, 4
MAX_SECONDS = 300


def main() -> None:
    # The GPU that nvidia-smi numbers 0.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    device = torch.device("cuda", 0)
    factors = [torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)]
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    copied = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    end = time.monotonic() + MAX_SECONDS
    while time.monotonic() < end:
        for _ in range(PRODUCTS):
            torch.mm(*factors)
        copied.copy_(host, non_blocking=True)
        host.copy_(copied, non_blocking=True)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
