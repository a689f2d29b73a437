"""For how long a process on a GPU has been idle, as far as it was watched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from engine.gpus import nvml, nvml_processes
from engine.gpus.nvml_processes import ProcessActivity
from engine.gpus.snapshot import Measurement
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line

FIRST, SECOND = 101, 102


class Watch:
    """Watches two processes on a GPU; `clock` is how many seconds later than now it is."""

    def __init__(self, host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self._host, self._began, self._clock = host, time.time(), 0.0
        self._activity = ProcessActivity()
        monkeypatch.setattr(nvml_processes, "current_time", lambda: self._began + self._clock)

    def for_seconds(self, seconds: int, util: int | None = 0, busy: int = 0, **gpu: object) -> list[tuple[float, bool]]:
        """Watch for a time in which the GPU has this utilization, and one process may compute. Return the idle time of
        both, and whether each may have been idle for longer."""
        lines = [f"process 0 {pid} 61000 compute" for pid in (FIRST, SECOND)]
        # The fake driver has the time of this host.
        self._host.set_scene(gpu_line(0, **gpu), lines, [f"busy {busy} 40"] if busy else [])
        handle, _ = nvml.open_gpu(0)
        step = min(seconds, 10)
        for _ in range(0, seconds, step):
            self._clock += step
            idle = self._activity.update(handle, Measurement(util, 1.0, unit="%"), [FIRST, SECOND])
        assert all(each.seconds.value is not None or each.seconds.reason for each in idle.values())
        return [(each.seconds.value if each.seconds.value is not None else -1, each.at_least) for each in idle.values()]


@pytest.fixture
def watch(loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    loaded_gpu_host.set_scene(gpu_line(0))
    nvml.initialize()
    yield Watch(loaded_gpu_host, monkeypatch)
    pynvml.nvmlShutdown()


def test_process_that_never_computed_may_have_been_idle_for_longer(watch: Watch) -> None:
    assert watch.for_seconds(610) == [(600, True), (600, True)]


def test_processes_of_gpu_that_computed_are_idle_since_then(watch: Watch) -> None:
    watch.for_seconds(20)
    assert watch.for_seconds(10, util=90) == [(0, False), (0, False)]
    assert watch.for_seconds(300) == [(300, False), (300, False)]


def test_process_is_idle_beside_one_that_computes(watch: Watch) -> None:
    watch.for_seconds(10, sampling=1)
    (first, _), (second, may_be_longer) = watch.for_seconds(300, util=90, busy=FIRST, sampling=1)
    # The samples have the time of this host.
    assert second == 300 and may_be_longer
    assert first <= 310


def test_process_that_decodes_is_not_idle(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.for_seconds(10)

    def read_samples(*_: object) -> list[SimpleNamespace]:
        now_us = nvml_processes.current_time() * 1e6
        return [SimpleNamespace(pid=FIRST, timeStamp=now_us, smUtil=0, memUtil=0, encUtil=0, decUtil=40)]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", read_samples)
    (first, _), (second, _) = watch.for_seconds(300)
    assert (round(first), second) == (0, 300)


def test_gpu_that_computes_without_a_sample_of_a_process_makes_all_busy(watch: Watch) -> None:
    watch.for_seconds(100, sampling=1)
    assert watch.for_seconds(10, util=90, sampling=1) == [(0, False), (0, False)]


def test_idle_time_is_unknown_without_utilization(watch: Watch) -> None:
    watch.for_seconds(100)
    assert watch.for_seconds(10, util=None) == [(-1, False), (-1, False)]
    assert watch.for_seconds(10) == [(0, True), (0, True)]


def test_idle_time_begins_anew_after_a_gap(watch: Watch) -> None:
    watch.for_seconds(100)
    watch._clock += 60
    assert watch.for_seconds(10) == [(0, True), (0, True)]
