"""What counts as use of a GPU: processes and memory, but neither a desktop nor an MPS server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.gpus import nvml
from engine.gpus.device_preview import preview_allocation
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, sample_gpus
from support.messages import has_problem, raises_problem
from support.runs.trained_run import call

NO_PROCESS_LIST = "fault 0 nvmlDeviceGetComputeRunningProcesses_v3 3"
XORG = f"process 0 {UNKNOWN_PID} -1 graphics"
NO_MEMORY = ["fault 0 nvmlDeviceGetMemoryInfo_v2 3", "fault 0 nvmlDeviceGetMemoryInfo 3"]


def first_device() -> CudaDevice:
    return cuda_devices(sample_gpus())[0]


@pytest.mark.parametrize(
    "driver", [{"display": 1, "scene": XORG}, {"display": -1, "scene": NO_PROCESS_LIST}], ids=["X11", "unlisted"]
)
def test_auto_uses_gpu_of_desktop_and_says_so(loaded_gpu_host: FakeGpuHost, driver: dict[str, object]) -> None:
    gpu = gpu_line(0, total=24576, used=2500, util=12, display=driver["display"])
    loaded_gpu_host.set_scene(gpu, str(driver["scene"]))
    allocation = preview_allocation("auto", sample_gpus(), wait=False)
    assert [device.index for device in allocation.devices] == [0]
    assert allocation.cpu_fallback is None
    [warning] = allocation.warnings
    assert has_problem([warning], "gpu-in-use", "", "GPU 0: memory in use")


def test_free_gpu_of_windows_is_chosen_in_wsl(loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "WSL_DEVICE", Path("/dev/null"))
    # Xwayland has no memory of its own, and Windows may use a GPU without a display.
    loaded_gpu_host.set_scene(gpu_line(0, total=24576, used=2500, util=-1), f"process 0 {UNKNOWN_PID} -1 graphics")
    allocation = preview_allocation("free:1", sample_gpus(), wait=False)
    assert [device.index for device in allocation.devices] == [0]
    assert has_problem(allocation.warnings, "gpu-in-use", "", "GPU 0: ", "Windows")


@pytest.mark.parametrize("values", [{"used": 9000}, {"used": 2500, "util": 97}], ids=["memory", "util"])
def test_gpu_of_desktop_that_may_train_is_named_in_the_advice(
    loaded_gpu_host: FakeGpuHost, values: dict[str, object]
) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, total=24576, display=1, **values), XORG)
    snapshot = sample_gpus()
    allocation = preview_allocation("auto", snapshot, wait=False)
    assert allocation.devices == []
    assert allocation.cpu_fallback is not None
    assert has_problem([allocation.cpu_fallback], "gpu-fallback", "", "GPU 0: ", "--gpus", "--queue")
    with raises_problem("gpu-in-use", "device.gpus", "--gpus", "--queue", kind=NotFreeError):
        preview_allocation("free:1", snapshot, wait=False)
    assert [device.index for device in preview_allocation("0", snapshot, wait=False).devices] == [0]


@pytest.mark.parametrize(
    ("gpu", "others"),
    [
        ({"used": 2500}, []),
        # More than a desktop has.
        ({"used": 12000, "util": 25}, [NO_PROCESS_LIST]),
        # In a container, beside an active display.
        ({"used": 18000, "util": 20, "display": 1}, []),
    ],
)
def test_unlisted_memory_is_use(loaded_gpu_host: FakeGpuHost, gpu: dict[str, int], others: list[str]) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, **gpu), others)
    assert not first_device().is_free


@pytest.mark.parametrize(("util", "is_free"), [(-1, False), (5, True), (95, False)])
def test_gpu_whose_driver_reports_no_use_is_free_while_idle(
    loaded_gpu_host: FakeGpuHost, util: int, is_free: bool
) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, util=util), NO_PROCESS_LIST, NO_MEMORY)
    device = first_device()
    assert device.is_free is is_free
    assert device.doubt == ("the driver reports neither its processes nor its memory use" if is_free else "")


@pytest.mark.parametrize(("util", "is_free"), [(-1, False), (30, True), (31, False)])
def test_utilization_is_use_where_driver_lists_no_process_and_no_memory(
    loaded_gpu_host: FakeGpuHost, util: int, is_free: bool
) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, util=util), NO_MEMORY)
    assert first_device().is_free is is_free


def test_gpu_in_mig_mode_without_instance_cannot_be_used(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1), gpu_line(1))
    snapshot = sample_gpus()
    assert [device.index for device in preview_allocation("auto", snapshot, wait=False).devices] == [1]
    for selection, code in (("0", "gpu-failed"), ("free:2", "too-few-gpus")):
        with raises_problem(code, "device.gpus", "GPU 0", "MIG mode"):
            preview_allocation(selection, snapshot, wait=False)
    shown = call("gpus").stdout
    assert "0 x MIG  no device" in shown and "free" in shown
    loaded_gpu_host.set_scene(gpu_line(0, mig=1))
    fallback = preview_allocation("auto", sample_gpus(), wait=False).cpu_fallback
    assert fallback is not None and "gputrain doctor" in fallback.advice


@pytest.fixture
def mps_server(tmp_path: Path) -> Iterator[int]:
    """PID of a process with the name of an MPS server."""
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(str(shutil.which("sleep")), program)
    with subprocess.Popen([program, "60"]) as process:
        yield process.pid
        process.kill()


def test_mps_server_is_no_use_and_its_clients_are(loaded_gpu_host: FakeGpuHost, mps_server: int) -> None:
    idle = [gpu_line(0, used=130), f"process 0 {mps_server} 30 compute"]
    loaded_gpu_host.set_scene(idle)
    snapshot = sample_gpus()
    assert cuda_devices(snapshot)[0].is_free
    assert [process.kind for process in snapshot.gpus[0].processes.value or ()] == ["mps server"]
    loaded_gpu_host.set_scene(idle, f"process 0 {UNKNOWN_PID} 90 mps")
    assert not first_device().is_free


def test_process_with_the_name_of_an_mps_server_does_not_hide_its_memory(
    loaded_gpu_host: FakeGpuHost, mps_server: int
) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, used=9100), f"process 0 {mps_server} 9000 compute")
    assert not first_device().is_free
