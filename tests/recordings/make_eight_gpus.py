"""Generate `eight-gpus.jsonl`: twelve seconds of a fictitious host with GPUs in every state that a screen shows.

Rerun after a change of the format: `python tests/recordings/make_eight_gpus.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.gpus.readings import STATIC_READINGS, UNITS
from engine.gpus.snapshot import Gpu, GpuProcess, MigInstance, Reading, Snapshot, SnapshotSource

BEGIN = 1_760_000_000.0
SECONDS = 12
GIB = 2**30
NAME = "NVIDIA H100 80GB HBM3"


def known_reading(value: Any, now: float) -> Reading[Any]:
    return Reading(value, now)


def values(index: int, now: float, busy: float, **changes: Any) -> dict[str, Reading[Any]]:
    """Readings of an H100 at `busy` % utilization; `changes` override them."""
    load = busy / 100
    plain: dict[str, Any] = {
        "name": NAME,
        "pci_bus_id": f"00000000:{0x19 + 0x10 * index:02X}:00.0",
        "busy": round(busy),
        "memory_busy": round(0.6 * busy),
        "sm_active": round(0.84 * busy, 1),
        "tensor_active": round(0.45 * busy, 1),
        "dram_active": round(0.4 * busy, 1),
        "memory_used": int((0.5 + 60 * load) * GIB),
        "memory_total": 85520809984,
        "memory_reserved": 614 << 20,
        "temperature": round(33 + 32 * load),
        "power": round(71 + 560 * load, 1),
        "power_limit": 700.0,
        "sm_clock": 1980 if busy else 345,
        "memory_clock": 2619,
        "max_sm_clock": 1980,
        "max_memory_clock": 2619,
        "performance_state": "P0",
        "throttle": [] if busy else ["idle"],
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "pcie_generation": 5,
        "pcie_width": 16,
        "max_pcie_generation": 5,
        "max_pcie_width": 16,
        "pcie_replays": 0,
        "pcie_sent": round(2.1e6 * load),
        "pcie_received": round(9.4e6 * load),
        "nvlinks": 18,
        "nvlink_sent": round(172e6 * load),
        "nvlink_received": round(171e6 * load),
        "memory_temperature": round(38 + 36 * load),
        "mig": "off",
    }
    plain |= changes
    return {
        name: known_reading(plain[name], now) if plain.get(name) is not None else Reading(None, now, "not supported")
        for name in UNITS
    }


def process(now: float, pid: int, user: str, command: str, used: float, **more: Any) -> GpuProcess:
    return GpuProcess(
        pid,
        more.get("kind", "compute"),
        more.get("instance"),
        known_reading(user, now),
        known_reading(command, now),
        known_reading(int(used * GIB), now),
        known_reading(more.get("cpu", 104.0), now),
        known_reading(int(5.2 * GIB), now),
        more.get("run"),
        more.get("rank"),
    )


def gpu(index: int, now: float, readings: dict[str, Reading[Any]], *processes: GpuProcess, **more: Any) -> Gpu:
    uuid = f"GPU-{index:08x}-5f1e-4c2d-9a7b-0123456789ab"
    return Gpu(index, uuid, "ok", 0.01, now, readings, known_reading(processes, now), **more)


def wave(now: float, index: int, low: float, high: float) -> float:
    return low + (high - low) * (0.5 + 0.5 * math.sin(now / 2 + index))


def snapshot(second: int) -> Snapshot:
    now = BEGIN + second
    gpus = []
    for index in (0, 1):
        rank = process(now, 41200 + index, "alice", "python -c spawn_main", 60, run="fashion-17", rank=index)
        readings = values(index, now, wave(now, index, 92, 99))
        gpus.append(gpu(index, now, readings, rank, runs=("fashion-17",)))
    capped = values(2, now, 100, power=699.2, temperature=71, throttle=["power cap"], sm_clock=1410)
    gpus.append(gpu(2, now, capped, process(now, 9321, "bob", "python train.py --config llm.yaml", 60)))
    gpus.append(gpu(3, now, values(3, now, 0)))
    hot = values(4, now, 88, temperature=91, throttle=["thermal"], sm_clock=990)
    gpus.append(gpu(4, now, hot, process(now, 9377, "bob", "python train.py --config llm.yaml", 52)))
    silent = gpu(5, BEGIN, values(5, BEGIN, 40))
    gpus.append(silent if second < 3 else silent.as_stale(float(second)))
    lost = {
        name: reading if name in STATIC_READINGS else reading.without_value("lost")
        for name, reading in values(6, now, 0).items()
    }
    gpus.append(Gpu(6, gpus[5].uuid.replace("5", "6", 1), "lost", 0.01, now, lost, Reading(None, now, "lost")))  # type: ignore[union-attr]
    parts = tuple(
        MigInstance(
            f"MIG-{instance:08x}-77aa-4c2d-9a7b-0123456789ab",
            instance,
            0,
            known_reading(f"{NAME} MIG 3g.40gb", now),
            known_reading(int(used * GIB), now),
            known_reading(int(39.5 * GIB), now),
        )
        for instance, used in ((1, 11.0), (2, 0.1))
    )
    divided = values(7, now, 0, mig="on", memory_busy=None, memory_used=int(11.1 * GIB))
    divided |= dict.fromkeys(("busy", "sm_active", "tensor_active", "dram_active"), Reading(None, now, "not supported"))
    notebook = process(now, 5120, "carol", "jupyter-lab", 11, instance=1, cpu=3.0)
    gpus.append(gpu(7, now, divided, notebook, instances=parts))
    source = SnapshotSource("recording", made_up=True)
    return Snapshot(
        now, "made-up-host", known_reading("580.95.05", now), known_reading("13.0", now), tuple(gpus), None, source
    )


if __name__ == "__main__":
    lines = [snapshot(second).to_line() for second in range(SECONDS)]
    Path(__file__).with_name("eight-gpus.jsonl").write_text("\n".join(lines) + "\n")
