"""GPUs of a command, on fake GPUs: its numbers and UUIDs, placeholders, and use of GPUs that are not reserved."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.gpus.selection import CudaDevice, cuda_devices
from engine.gpus.snapshot import Snapshot
from engine.gpus.visible_devices import visible_devices
from engine.jobs.command.devices import (
    DeviceNames,
    device_environment,
    expand,
    misplaced_use,
    name_devices,
)
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, gpu_uuid, sample_gpus
from support.messages import says

MIG_UUIDS = ["MIG-11aa", "MIG-22bb"]
INSTANCES = [f"instance 0 uuid={uuid} gi={gi} ci=0" for gi, uuid in enumerate(MIG_UUIDS, 1)]


def four_gpus(host: FakeGpuHost, *lines: str) -> Snapshot:
    host.set_scene([gpu_line(index) for index in range(4)], *lines)
    return sample_gpus()


def chosen(snapshot: Snapshot, *uuids: str) -> list[CudaDevice]:
    return [device for device in cuda_devices(snapshot) if device.uuid in uuids]


def test_command_gets_numbers_in_pci_order(loaded_gpu_host: FakeGpuHost) -> None:
    snapshot = four_gpus(loaded_gpu_host)
    names = name_devices(chosen(snapshot, gpu_uuid(1), gpu_uuid(3)), snapshot)
    assert names == DeviceNames(("1", "3"), (gpu_uuid(1), gpu_uuid(3)))
    assert device_environment(names) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,3"}


def test_numbers_are_those_at_start_if_order_changed_since_reservation(loaded_gpu_host: FakeGpuHost) -> None:
    device = chosen(four_gpus(loaded_gpu_host), gpu_uuid(1))
    loaded_gpu_host.set_scene([gpu_line(index) for index in (3, 2, 1)])
    assert name_devices(device, sample_gpus()).ids == ("2",)


def test_numbers_count_all_gpus_within_inherited_allocation(loaded_gpu_host: FakeGpuHost) -> None:
    snapshot = four_gpus(loaded_gpu_host)
    environ = {"CUDA_VISIBLE_DEVICES": "3,2"}
    devices = visible_devices(cuda_devices(snapshot), environ)
    names = name_devices(devices, snapshot)
    assert device_environment(names) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,2"}


def test_mig_instance_is_named_by_full_uuid(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1), INSTANCES)
    snapshot = sample_gpus()
    names = name_devices(chosen(snapshot, MIG_UUIDS[1]), snapshot)
    assert names.ids == names.uuids == (MIG_UUIDS[1],)


def test_uuids_name_gpus_behind_one_in_mig_mode(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1), INSTANCES, gpu_line(1))
    snapshot = sample_gpus()
    assert name_devices(chosen(snapshot, gpu_uuid(1)), snapshot).ids == (gpu_uuid(1),)


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("{gpus}", "2"),
        ("--include=localhost:{ids}", "--include=localhost:1,3"),
        ('"device={uuids}"', '"device=GPU-a,GPU-b"'),
        ("{folder}/out-{run}", "/runs/q/out-q"),
        ('{"gpus":{gpus}}', '{"gpus":2}'),
        ('{"lr": 0.1, "run": {"id": 1}}', '{"lr": 0.1, "run": {"id": 1}}'),
        ("{print $1} {} {0} {GPUS} {gpu}", "{print $1} {} {0} {GPUS} {gpu}"),
        ("echo ${run} {{gpus}}", "echo ${run} {{gpus}}"),
    ],
)
def test_expand_replaces_known_placeholders_only(word: str, expanded: str) -> None:
    names = DeviceNames(("1", "3"), ("GPU-a", "GPU-b"))
    assert expand([word], names, "q", Path("/runs/q")) == [expanded]


def test_expand_on_cpu_gives_no_gpus() -> None:
    assert expand(["{gpus}", "{ids}"], DeviceNames(), "q", Path("/runs/q")) == ["0", ""]


def test_misplaced_use_names_used_and_reserved_gpus(loaded_gpu_host: FakeGpuHost) -> None:
    snapshot = four_gpus(loaded_gpu_host, "process 0 77 900 compute", "process 3 77 900 compute")
    problem = misplaced_use(snapshot, {77}, {gpu_uuid(3)}, "q-12")
    assert problem is not None
    assert says(str(problem), problem.code, "run q-12 computes on GPU 0, reserved 3")


def test_misplaced_use_of_cpu_run_has_no_reserved_gpu(loaded_gpu_host: FakeGpuHost) -> None:
    snapshot = four_gpus(loaded_gpu_host, "process 2 77 900 compute")
    assert "computes on GPU 2, reserved none" in str(misplaced_use(snapshot, {77}, (), "q"))


@pytest.mark.parametrize(
    "process", ["3 77 900 compute", "0 78 900 compute", "0 77 10 graphics", f"0 {UNKNOWN_PID} 900 compute"]
)
def test_misplaced_use_ignores_reserved_gpu_other_processes_and_graphics(
    loaded_gpu_host: FakeGpuHost, process: str
) -> None:
    snapshot = four_gpus(loaded_gpu_host, f"process {process}")
    assert misplaced_use(snapshot, {77}, {gpu_uuid(3)}, "q") is None
