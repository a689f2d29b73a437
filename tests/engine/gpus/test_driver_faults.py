"""Driver faults (hangs, lost GPUs, missing functions, implausible values) as `gputrain gpus` reports them.

There is never a traceback, an unknown value is never shown as 0, and healthy GPUs are not affected.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from engine.base.codec import encode
from engine.gpus.monitor import DriverMonitor
from engine.gpus.snapshot import SamplerOptions
from support.gpu.fake_gpu_host import (
    COMPILER,
    NO_COMPILER,
    NVML_LIBRARY,
    UNKNOWN_PID,
    FakeGpuHost,
    gpu_line,
    gpu_uuid,
    parse_gpus_json,
)
from support.gputrain_command import Gputrain
from tui.cli.main import app

DYNAMIC = ("util", "memory_used", "power", "temperature", "sm_clock", "throttle")


def run_gpus(gputrain: Gputrain, host: FakeGpuHost, *arguments: str) -> Result:
    """Call the command in this process; its sampler is a process."""
    done = CliRunner(env=gputrain.environment | host.environment).invoke(app, ["gpus", *arguments])
    assert done.exit_code == 0, done.exception
    return done


def gpus_json(gputrain: Gputrain, host: FakeGpuHost) -> list[dict[str, Any]]:
    return parse_gpus_json(run_gpus(gputrain, host, "--json").stdout)


def assert_healthy(gpu: dict[str, Any], util: int) -> None:
    assert (gpu["state"], gpu["util"]["value"]) == ("ok", util)
    assert gpu["age"] <= 2.0
    assert time.time() - gpu["util"]["time"] < 10.0


def row(output: str, index: int) -> str:
    return next(line for line in output.splitlines() if line.split()[:1] == [str(index)])


@pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
def test_fake_driver_is_c_library(fake_driver: dict[str, str]) -> None:
    library = ctypes.CDLL(str(Path(fake_driver["LD_LIBRARY_PATH"]) / NVML_LIBRARY))
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(ctypes.c_uint())) == 1  # NVML_ERROR_UNINITIALIZED


def test_gpus_command_with_driver_library_version_mismatch(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0), "fault * nvmlInitWithFlags 18")
    assert "driver/library version mismatch; reboot to load" in run_gpus(gputrain, gpu_host).stderr


def test_gpu_lost_before_first_sample(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(
        gpu_line(0, util=50), gpu_line(1), gpu_line(2, util=70), "fault 1 nvmlDeviceGetHandleByIndex_v2 15"
    )
    gpus = gpus_json(gputrain, gpu_host)
    assert [gpu["state"] for gpu in gpus] == ["ok", "lost", "ok"]
    assert all(gpus[1][name] == {**gpus[1][name], "value": None, "reason": "lost"} for name in DYNAMIC)
    assert gpus[1]["uuid"] is None
    assert_healthy(gpus[0], 50)
    assert_healthy(gpus[2], 70)
    assert row(run_gpus(gputrain, gpu_host).stdout, 1).split() == ["1", "–", "lost"]


def test_gpu_lost_while_watched_recovers(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    healthy = [gpu_line(0, util=50), gpu_line(1, util=60)]
    gpu_host.set_scene(healthy)
    with start_watch(gputrain, gpu_host) as watch:
        assert watch.until(lambda gpus: gpus[1]["util"]["value"] == 60)
        gpu_host.set_scene(healthy, "fault 1 * 15")
        gpus_with_lost = watch.until(lambda gpus: gpus[1]["state"] == "lost")
        assert all(gpus_with_lost[1][name]["reason"] == "lost" for name in DYNAMIC)
        assert gpus_with_lost[1]["uuid"] == gpu_uuid(1)
        assert_healthy(gpus_with_lost[0], 50)
        gpu_host.set_scene(healthy)
        assert_healthy(watch.until(lambda gpus: gpus[1]["state"] == "ok")[1], 60)


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetHandleByIndex_v2"])
def test_gpu_call_hanging_from_start_is_stale(gputrain: Gputrain, gpu_host: FakeGpuHost, function: str) -> None:
    gpu_host.set_scene(gpu_line(0, util=50), gpu_line(1), f"fault 1 {function} hang")
    start = time.monotonic()
    gpus = gpus_json(gputrain, gpu_host)
    assert time.monotonic() - start < 10.0
    assert gpus[1]["state"] == "stale"
    assert all(gpus[1][name]["value"] is None for name in DYNAMIC)
    assert gpus[1]["util"]["reason"].startswith("stale: no answer for ")
    assert_healthy(gpus[0], 50)
    assert "no answer for " in row(run_gpus(gputrain, gpu_host).stdout, 1)


def test_driver_initialization_hang_is_reported(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0), "fault * nvmlInitWithFlags hang")
    assert "the NVIDIA driver has not answered for 2 s" in run_gpus(gputrain, gpu_host).stderr


def test_gpus_watch_with_hanging_driver_exits_on_ctrl_c(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0), gpu_line(1), "fault * * hang")
    environment = gputrain.environment | gpu_host.environment
    watch = gputrain.start("gpus", "--watch", "--json", "--interval", "0.25", env=environment)
    assert watch.stdout is not None and watch.stderr is not None
    assert any(all(gpu["state"] == "stale" for gpu in json.loads(line)["gpus"]) for line in watch.stdout)
    start = time.monotonic()
    watch.send_signal(signal.SIGINT)
    assert watch.wait(10) == 0
    assert time.monotonic() - start < 5.0
    assert "Traceback" not in watch.stderr.read()


def test_gpu_without_supported_readings(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0, util=50), gpu_line(1), "fault 1 * 3")
    gpus = gpus_json(gputrain, gpu_host)
    assert all(gpus[1][name] == {**gpus[1][name], "value": None, "reason": "not supported"} for name in DYNAMIC)
    assert gpus[1]["processes"]["value"] is None
    assert_healthy(gpus[0], 50)
    line = row(run_gpus(gputrain, gpu_host).stdout, 1)
    assert "0%" not in line
    assert "0.0" not in line
    assert "free" not in line


def test_gpu_process_with_unknown_pid(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0, used=2000), f"process 0 {UNKNOWN_PID} 1500 compute")
    [process] = gpus_json(gputrain, gpu_host)[0]["processes"]["value"]
    assert process["pid"] == UNKNOWN_PID
    assert process["user"]["value"] is None
    assert process["user"]["reason"].startswith("no such process here")
    table = run_gpus(gputrain, gpu_host, "--processes").stdout
    assert f"pid {UNKNOWN_PID}" in row(table, 0)
    assert "? no such process here; it may be in another container" in table


def test_gpus_watch_follows_added_and_removed_gpus(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0, util=50))
    with start_watch(gputrain, gpu_host) as watch:
        watch.until(lambda gpus: len(gpus) == 1)
        gpu_host.set_scene(gpu_line(0, util=50), gpu_line(1, util=60))
        assert_healthy(watch.until(lambda gpus: len(gpus) == 2 and gpus[1]["state"] == "ok")[1], 60)
        gpu_host.set_scene(gpu_line(1, util=60))
        [remaining] = watch.until(lambda gpus: len(gpus) == 1 and gpus[0]["uuid"] == gpu_uuid(1))
        assert remaining["index"] == 0


def test_implausible_values_are_rejected(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0, util=137, corrected=1 << 60), gpu_line(1, util=100))
    gpus = gpus_json(gputrain, gpu_host)
    errors = gpus[0]["ecc_corrected"]
    assert (errors["value"], errors["reason"]) == (None, f"implausible value from the driver: {1 << 60}")
    assert gpus[0]["util"] == {**gpus[0]["util"], "value": None, "reason": "implausible value from the driver: 137 %"}
    assert_healthy(gpus[1], 100)


def test_driver_reload_is_detected(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    healthy = [gpu_line(0, util=50)]
    gpu_host.set_scene(healthy)
    with start_watch(gputrain, gpu_host) as watch:
        watch.until(lambda gpus: len(gpus) == 1)
        gpu_host.set_scene(healthy, "fault * * 1", "fault * nvmlDeviceGetCount_v2 1")
        assert watch.until(lambda gpus: gpus == []) == []
        assert watch.snapshot["error"] == "uninitialized"
        gpu_host.set_scene(healthy)
        assert_healthy(watch.until(lambda gpus: len(gpus) == 1 and gpus[0]["state"] == "ok")[0], 50)


def test_sampler_process_crash_is_reported_and_restarted(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0, util=50))
    with start_watch(gputrain, gpu_host) as watch:
        watch.until(lambda gpus: len(gpus) == 1)
        [sampler] = [
            process for process in gputrain.processes() if "engine.gpus.sampler" in " ".join(process.cmdline())
        ]
        os.kill(sampler.pid, signal.SIGSEGV)
        watch.until(lambda gpus: gpus == [])
        assert watch.snapshot["error"] == "the process that queries the NVIDIA driver was killed by SIGSEGV"
        assert_healthy(watch.until(lambda gpus: len(gpus) == 1 and gpus[0]["state"] == "ok")[0], 50)


class Watch:
    """Reads the snapshots of a sampler process, as `gputrain gpus --watch --json` prints them."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = pytest.MonkeyPatch()
        for name, value in environment.items():
            self._environment.setenv(name, value)
        # The loader of this process does not look where the fake driver is.
        self._environment.setattr("engine.gpus.driver.has_driver_library", lambda: True)
        self._monitor = DriverMonitor(SamplerOptions(period=0.25))
        self.snapshot: dict[str, Any] = {}

    def until(self, predicate: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Return the GPUs of the first snapshot that satisfies the predicate. Only the test's timeout ends the wait."""
        while True:
            snapshot = self._monitor.read(1.0)
            if snapshot is not None:
                self.snapshot = json.loads(encode(snapshot))
                gpus: list[dict[str, Any]] = self.snapshot["gpus"]
                if predicate(gpus):
                    return gpus

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.close()
        self._environment.undo()


def test_monitor_takes_another_period_at_once(
    gpu_host: FakeGpuHost, gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (gputrain.environment | gpu_host.environment).items():
        monkeypatch.setenv(name, value)
    gpu_host.set_scene(gpu_line(0, util=40))
    monitor = DriverMonitor(SamplerOptions(period=3600.0))
    try:
        assert monitor.read(60.0) is not None
        monitor.set_period(0.25)
        assert monitor.read(60.0) is not None
        assert monitor.read(60.0) is not None
    finally:
        monitor.close()


def test_monitor_looks_for_a_driver_when_its_library_appears(
    gputrain: Gputrain, gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gputrain.folder / NVML_LIBRARY).write_text("")
    for name, value in (gputrain.environment | {"LD_LIBRARY_PATH": str(gputrain.folder)}).items():
        monkeypatch.setenv(name, value)
    library = gputrain.folder / "installed"
    monkeypatch.setattr("engine.gpus.driver.has_driver_library", library.exists)
    monitor = DriverMonitor(SamplerOptions())
    try:
        while (snapshot := monitor.read(60.0)) is None:
            pass
        assert snapshot.error is not None
        monitor.read(1.0)
        for name, value in gpu_host.environment.items():
            monkeypatch.setenv(name, value)
        gpu_host.set_scene(gpu_line(0, util=40))
        library.touch()
        while (snapshot := monitor.read(1.0)) is None or snapshot.error is not None:
            pass
        assert len(snapshot.gpus) == 1
    finally:
        monitor.close()


def start_watch(gputrain: Gputrain, host: FakeGpuHost) -> Watch:
    return Watch(gputrain.environment | host.environment)
