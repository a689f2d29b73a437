"""Names and units of all readings of a GPU. Every part of gputrain that names a reading uses them."""

from __future__ import annotations

# Every reading of a GPU and its unit. In backticks the field of `nvidia-smi --query-gpu=` with the same meaning;
# `engine.gpus.nvml` has the NVML calls.
UNITS = {
    # Product name (`name`).
    "name": "",
    # domain:bus:device.function (`pci.bus_id`).
    "pci_bus_id": "",
    # Compute capability of CUDA, such as 9.0 (`compute_cap`).
    "compute_capability": "",
    # Percent of the sampling period with at least one kernel running (`utilization.gpu`). NVML's sampling period is
    # 1/6 s to 1 s, depending on the product.
    "busy": "%",
    # Percent of the sampling period in which device memory was read or written (`utilization.memory`).
    "memory_busy": "%",
    # Percent of SMs that were busy, averaged over the sampling interval (GPM metric 2).
    "sm_active": "%",
    # Percent of time that the SMs executed tensor core operations of any type (GPM metric 5).
    "tensor_active": "%",
    # Percent of the theoretical DRAM bandwidth in use (GPM metric 10).
    "dram_active": "%",
    # Allocated device memory, without `memory_reserved` (`memory.used`).
    "memory_used": "B",
    # Physical device memory (`memory.total`).
    "memory_total": "B",
    # Device memory reserved by the driver and firmware (`memory.reserved`).
    "memory_reserved": "B",
    # Core temperature (`temperature.gpu`).
    "temperature": "°C",
    # Temperature of the device memory (`temperature.memory`).
    "memory_temperature": "°C",
    # Power draw of the GPU and its memory (`power.draw`).
    "power": "W",
    # Power limit in force, the lowest of all that apply (`enforced.power.limit`).
    "power_limit": "W",
    # Current SM clock (`clocks.sm`).
    "sm_clock": "MHz",
    # Current memory clock (`clocks.mem`).
    "memory_clock": "MHz",
    # Highest possible SM clock (`clocks.max.sm`).
    "max_sm_clock": "MHz",
    # Highest possible memory clock (`clocks.max.mem`).
    "max_memory_clock": "MHz",
    # Intended fan speed, in percent of the maximum; not measured (`fan.speed`).
    "fan": "%",
    # P0 (highest performance) to P15 (`pstate`).
    "performance_state": "",
    # List of the active throttle reasons, as named in `nvml.THROTTLE_REASONS` (`clocks_throttle_reasons.active`).
    "throttle": "",
    # ECC errors since the driver was loaded (`ecc.errors.corrected.volatile.total`, and `uncorrected`).
    "ecc_corrected": "errors",
    "ecc_uncorrected": "errors",
    # Current PCIe link (`pcie.link.gen.current` and `pcie.link.width.current`); it drops when the GPU is idle.
    "pcie_generation": "",
    "pcie_width": "lanes",
    # Highest PCIe link that this GPU and the host support (`pcie.link.gen.max` and `pcie.link.width.max`).
    "max_pcie_generation": "",
    "max_pcie_width": "lanes",
    # PCIe packets that were sent again (`Replays Since Reset` of `nvidia-smi -q`).
    "pcie_replays": "replays",
    # PCIe throughput from and to the GPU, 1 KB = 1000 B. With GPM: since the last sample (metrics 20 and 21). Without
    # GPM: over 20 ms (`txpci` and `rxpci` of `nvidia-smi dmon -s t`).
    "pcie_sent": "KB/s",
    "pcie_received": "KB/s",
    # Number of active NVLinks (`nvidia-smi nvlink --status`).
    "nvlinks": "links",
    # Throughput of all NVLinks from and to the GPU since the last sample, 1 KB = 1000 B. With GPM: metrics 61 and 60.
    # Without GPM: change of the data counters (`nvidia-smi nvlink -gt d`).
    "nvlink_sent": "KB/s",
    "nvlink_received": "KB/s",
    # Current MIG mode, "on" or "off" (`mig.mode.current`).
    "mig": "",
    # Who may use the GPU for graphics: "desktop" (`display_active`), "Windows" in WSL 2, or "none".
    "display": "",
}
# Independent of the load, so still valid for a GPU that does not answer.
STATIC_READINGS = {
    "name", "pci_bus_id", "compute_capability", "max_sm_clock", "max_memory_clock", "max_pcie_generation",
    "max_pcie_width",
}  # fmt: skip
