"""GPUs whose processes hold memory without computing, for tests of the screens that name them."""

from __future__ import annotations

from engine.gpus.snapshot import GpuProcess, Measurement, Snapshot
from support.replace import replace
from support.screen.demo_app import FROZEN_NOW, FrozenGpuFeed, demo_snapshot


def make_holder(pid: int, user: str, command: str, gib: int, idle_s: float, **fields: object) -> GpuProcess:
    """Return a process that has been idle for `idle_s` seconds."""
    return GpuProcess(
        pid=pid,
        kind="compute",
        instance=None,
        user=Measurement(user, FROZEN_NOW),
        command=Measurement(command, FROZEN_NOW),
        gpu_memory=Measurement(gib << 30, FROZEN_NOW, unit="B"),
        cpu=Measurement(1.0, FROZEN_NOW, unit="%"),
        memory=Measurement(2 << 30, FROZEN_NOW, unit="B"),
        idle=Measurement(idle_s, FROZEN_NOW, unit="s"),
        **fields,
    )


def holder_feed() -> FrozenGpuFeed:
    return FrozenGpuFeed(holder_snapshot())


def holder_snapshot() -> Snapshot:
    """Return the GPUs of the demo. Two idle processes hold the first one."""
    snapshot = demo_snapshot(FROZEN_NOW)
    processes = (
        make_holder(4711, "ana", "python train.py --lr 0.1", 61, 2520.0),
        make_holder(4712, "bob", "python -m notebook", 9, 430.0, idle_at_least=True),
        make_holder(4713, "eva", "python serve.py", 2, 4.0),
    )
    idle = {"util": Measurement(0, FROZEN_NOW, unit="%"), "memory_used": Measurement(73 << 30, FROZEN_NOW, unit="B")}
    first = replace(snapshot.gpus[0], processes=Measurement(processes, FROZEN_NOW), runs=(), **idle)
    return replace(snapshot, gpus=(first, *snapshot.gpus[1:]))
