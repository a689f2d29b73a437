"""Simulated hosts for `gputrain-tui --demo --hosts lab1,lab2`: each has GPUs of the recording, at another time."""

from __future__ import annotations

import time

from engine.base.codec import decode, replace
from engine.gpus.snapshot import Snapshot
from engine.jobs.hosts.channel import parse_hosts
from engine.jobs.hosts.reading import HostReading, HostState
from engine.jobs.hosts.watch import HostWatch
from tui.screens.demo.server import recorded

# No GPU of the run that is on the simulated server itself.
MODELS = (("NVIDIA A100-SXM4-80GB", 4), ("NVIDIA H100 80GB HBM3", 5))
SECONDS_APART = 31


class DemoHosts(HostWatch):
    """Hosts without ssh, whose GPUs change with time."""

    def __init__(self, names: str) -> None:
        """Raises UsageError for a name that no host has."""
        self._names = parse_hosts(names)
        self._recording = [decode(line, Snapshot) for line in recorded("gpus.jsonl").splitlines()]
        self._second, self._readings = 0, tuple[HostReading, ...]()

    def readings(self) -> tuple[HostReading, ...]:
        if (second := int(time.time())) != self._second:
            self._second = second
            self._readings = tuple(self._read(name, number) for number, name in enumerate(self._names))
        return self._readings

    def _read(self, name: str, number: int) -> HostReading:
        model, count = MODELS[number % len(MODELS)]
        moment = self._recording[(self._second + (number + 1) * SECONDS_APART) % len(self._recording)]
        gpus = tuple(
            replace(gpu, index=index, name=replace(gpu.name, value=model))
            for index, gpu in enumerate(moment.gpus[-count - 1 : -1])
        )
        return HostReading(name, HostState.OK, snapshot=replace(moment, host=name, gpus=gpus), has_all_rows=True)

    def retry(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass
