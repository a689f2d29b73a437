"""Other hosts for tests of the monitor, whose readings never change."""

from __future__ import annotations

from collections.abc import Sequence

from engine.gpus.snapshot import DRIVER, Measurement
from engine.jobs.hosts.reading import HostReading, HostState
from engine.jobs.hosts.watch import HostWatch
from engine.runs.run_row import RunRow
from support.replace import replace
from support.runs.factories import make_row
from support.screen.demo_app import FROZEN_NOW, demo_snapshot
from support.screen.holders import holder_snapshot


class FrozenHosts(HostWatch):
    """Hosts without ssh. `retried` has the names of those that were to be connected again."""

    def __init__(self, readings: Sequence[HostReading]) -> None:
        self.shown, self.retried = tuple(readings), list[str]()

    def readings(self) -> tuple[HostReading, ...]:
        return self.shown

    def retry(self, name: str) -> None:
        self.retried.append(name)

    def close(self) -> None:
        pass


def make_reading(name: str, gpus: int = 8, *rows: RunRow, model: str = "NVIDIA H100 80GB HBM3") -> HostReading:
    """Return the reading of a host with some of the GPUs of the demo, whose first one is held by idle processes."""
    snapshot = holder_snapshot()
    shown = [
        replace(gpu, name=Measurement(model, FROZEN_NOW), run_owners=dict.fromkeys(gpu.runs, "alice"))
        for gpu in snapshot.gpus[:gpus]
    ]
    snapshot = replace(snapshot, host=f"{name}.example", source=DRIVER, gpus=tuple(shown))
    return HostReading(name, HostState.OK, snapshot=snapshot, rows=rows, has_gputrain=True)


def make_readings() -> list[HostReading]:
    """Return hosts in each state: two that answer, with runs, one that is lost, one that asks, and one without GPUs."""
    night = make_row("lab1:night", "running", "/home/me/runs/night")
    old = make_row("lab2:old", "finished", "/home/me/runs/old")
    lost = replace_state(make_reading("lab3"), HostState.DOWN, "Connection refused", 754)
    unknown: Measurement[str] = Measurement(None, FROZEN_NOW, "no driver")
    empty = replace(demo_snapshot(FROZEN_NOW), host="lab5.example", source=DRIVER, driver=unknown, gpus=())
    return [
        make_reading("lab1", 6, night),
        make_reading("lab2", 4, old, model="NVIDIA A100-SXM4-40GB"),
        lost,
        HostReading("lab4", HostState.DOWN, "Permission denied (publickey,password).", must_ask=True),
        HostReading("lab5", HostState.OK, "NVML: no driver", snapshot=empty),
    ]


def replace_state(reading: HostReading, state: HostState, reason: str, age_s: int) -> HostReading:
    return HostReading(reading.name, state, reason, age_s, reading.snapshot, reading.rows, has_gputrain=True)
