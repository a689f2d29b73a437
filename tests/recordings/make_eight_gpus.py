"""Generate `eight-gpus.jsonl`: twelve seconds of a fictitious host with GPUs in every state that a screen shows.

Rerun after a change of the format: `python tests/recordings/make_eight_gpus.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from engine.base.codec import encode
from engine.gpus.snapshot import (
    STATIC_READINGS,
    UNITS,
    Gpu,
    GpuProcess,
    Measurement,
    MigInstance,
    Snapshot,
    SnapshotSource,
    with_units,
)

BEGIN = 1_760_000_000.0
SECONDS = 12
GIB = 2**30
NAME = "NVIDIA H100 80GB HBM3"


def known_reading(value: Any, now: float, unit: str = "") -> Measurement[Any]:
    return Measurement(value, now, unit=unit)


def values(index: int, now: float, util: float, **changes: Any) -> dict[str, Measurement[Any]]:
    """Readings of an H100 at `util` % utilization; `changes` override them."""
    load = util / 100
    plain: dict[str, Any] = {
        "name": NAME,
        "pci_bus_id": f"00000000:{0x19 + 0x10 * index:02X}:00.0",
        "util": round(util),
        "memory_util": round(0.6 * util),
        "sm_active": round(0.84 * util, 1),
        "tensor_active": round(0.45 * util, 1),
        "dram_active": round(0.4 * util, 1),
        "memory_used": int((0.5 + 60 * load) * GIB),
        "memory_total": 85520809984,
        "memory_reserved": 614 << 20,
        "temperature": round(33 + 32 * load),
        "power": round(71 + 560 * load, 1),
        "power_limit": 700.0,
        "sm_clock": 1980 if util else 345,
        "memory_clock": 2619,
        "max_sm_clock": 1980,
        "max_memory_clock": 2619,
        "performance_state": "P0",
        "throttle": [] if util else ["idle"],
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
    return with_units(
        {
            name: known_reading(plain[name], now)
            if plain.get(name) is not None
            else Measurement(None, now, "not supported")
            for name in UNITS
        }
    )


def process(now: float, pid: int, user: str, command: str, used: float, **more: Any) -> GpuProcess:
    return GpuProcess(
        pid=pid,
        kind=more.get("kind", "compute"),
        instance=more.get("instance"),
        user=known_reading(user, now),
        command=known_reading(command, now),
        gpu_memory=known_reading(int(used * GIB), now, "B"),
        cpu=known_reading(more.get("cpu", 104.0), now, "%"),
        memory=known_reading(int(5.2 * GIB), now, "B"),
        run=more.get("run"),
        rank=more.get("rank"),
        **({"run_time": known_reading(more["run_time"], now, "s")} if "run_time" in more else {}),
    )


def gpu(index: int, now: float, readings: dict[str, Measurement[Any]], *processes: GpuProcess, **more: Any) -> Gpu:
    uuid = f"GPU-{index:08x}-5f1e-4c2d-9a7b-0123456789ab"
    state = {"index": index, "uuid": uuid, "state": "ok", "age": 0.01, "time": now}
    return Gpu(**(state | readings | {"processes": known_reading(processes, now)} | more))


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
    gpus.append(gpu(6, now, lost, state="lost", processes=Measurement(None, now, "lost")))
    parts = tuple(
        MigInstance(
            uuid=f"MIG-{instance:08x}-77aa-4c2d-9a7b-0123456789ab",
            gpu_instance=instance,
            compute_instance=0,
            name=known_reading(f"{NAME} MIG 3g.40gb", now),
            memory_used=known_reading(int(used * GIB), now, "B"),
            memory_total=known_reading(int(39.5 * GIB), now, "B"),
        )
        for instance, used in ((1, 11.0), (2, 0.1))
    )
    divided = values(7, now, 0, mig="on", memory_util=None, memory_used=int(11.1 * GIB))
    divided |= dict.fromkeys(
        ("util", "sm_active", "tensor_active", "dram_active"), Measurement(None, now, "not supported", "%")
    )
    notebook = process(now, 5120, "carol", "jupyter-lab", 11, instance=1, cpu=3.0)
    gpus.append(gpu(7, now, divided, notebook, instances=parts))
    return Snapshot(
        time=now,
        host="made-up-host",
        source=SnapshotSource(kind="recording", made_up=True),
        driver=known_reading("580.95.05", now),
        cuda=known_reading("13.0", now),
        gpus=tuple(gpus),
    )


if __name__ == "__main__":
    lines = [encode(snapshot(second)) + b"\n" for second in range(SECONDS)]
    Path(__file__).with_name("eight-gpus.jsonl").write_bytes(b"".join(lines))
