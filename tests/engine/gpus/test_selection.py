"""Selection of GPUs by `device.gpus` and CUDA_VISIBLE_DEVICES, and the check that CUDA assigns each rank its GPU."""

from __future__ import annotations

import os

import pytest

from engine.base.errors import UsageError
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices, select, why_not_free
from engine.gpus.visible_devices import visible_devices
from engine.runs.records import RankDevice
from engine.train.distributed.process_group import check_devices_unique
from engine.train.loop.device import WrongDeviceError, check_device
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, gpu_uuid, sample_gpus
from support.gputrain_command import Gputrain
from support.messages import has_problem, raises_problem, says
from support.replace import replace
from support.runs.trained_run import call

FREE, BUSY, LIGHT = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"
MIG = ["MIG-11aa", "MIG-22bb"]
GPUS = [
    CudaDevice(0, FREE, "Fake H100", 5 << 20),
    CudaDevice(
        1, BUSY, "Fake H100", 900 << 20, unavailable=Unavailable(Obstacle.IN_USE, "in use by process 77 (user alice)")
    ),
    CudaDevice(2, LIGHT, "Fake H100", 1 << 20),
]
INSTANCES = [CudaDevice(3, uuid, "MIG 1g.10gb", 0, "GPU-cccc4444", f"{place}/0") for place, uuid in enumerate(MIG, 1)]
LOST = CudaDevice(3, "GPU-dddd5555", "Fake H100", None, unavailable=Unavailable(Obstacle.LOST, "lost"))


@pytest.mark.parametrize(
    ("selection", "uuids"),
    [
        ("auto", [FREE, LIGHT]),
        ("all", [FREE, BUSY, LIGHT]),
        ("cpu", []),
        ("free:1", [LIGHT]),
        ("free:2", [FREE, LIGHT]),
        ("0,2", [FREE, LIGHT]),
        ("2, 1", [LIGHT, BUSY]),
        (BUSY, [BUSY]),
        ("GPU-a", [FREE]),
        (MIG[0], [MIG[0]]),
        ("MIG-2", [MIG[1]]),
    ],
)
def test_select_resolves_selection(selection: str, uuids: list[str]) -> None:
    assert [device.uuid for device in select(selection, GPUS + INSTANCES)] == uuids


@pytest.mark.parametrize(
    ("selection", "code", "values"),
    [
        ("4", "gpu-not-found", ["'4'", "0 (Fake H100"]),
        ("0,0", "duplicate-value", [f"GPU 0 (Fake H100, {FREE})"]),
        ("0,GPU-aaaa", "duplicate-value", [f"GPU 0 (Fake H100, {FREE})"]),
        ("GPU-bbbb", "ambiguous-name", ["'GPU-bbbb'"]),
        ("free:4", "too-few-gpus", ["4 free GPUs", "3"]),
        ("free:0", "out-of-range", ["free:0", "--gpus cpu"]),
        ("gpu0", "gpu-not-found", ["'gpu0'"]),
        ("3", "conflict", ["'3'", "MIG", ", ".join(MIG)]),
        ("GPU-cccc", "conflict", ["'GPU-cccc'", "MIG", ", ".join(MIG)]),
        (",".join(MIG), "not-supported", ["2 devices", "NCCL", "MIG"]),
        (f"0,{MIG[0]}", "not-supported", ["2 devices", "NCCL", "MIG"]),
    ],
)
def test_select_rejects_unavailable_selection(selection: str, code: str, values: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        select(selection, GPUS + INSTANCES)
    assert has_problem(caught.value.problems, code, "device.gpus", *values)
    assert not isinstance(caught.value, NotFreeError)


def test_select_distinguishes_busy_gpus_from_lost_ones() -> None:
    in_use = "GPU 1: in use by process 77 (user alice)"
    with pytest.raises(NotFreeError) as few:
        select("free:3", GPUS)
    assert has_problem(few.value.problems, "gpu-in-use", "device.gpus", "3 free GPUs", "2", in_use)
    with pytest.raises(NotFreeError) as busy:
        select("0,1", GPUS, only_free=True)
    assert has_problem(busy.value.problems, "gpu-in-use", "device.gpus", in_use)
    with pytest.raises(UsageError) as caught:
        select("3", [*GPUS, LOST])
    assert has_problem(caught.value.problems, "gpu-failed", "device.gpus", "GPU 3 ", "lost")
    assert not isinstance(caught.value, NotFreeError)
    assert LOST not in select("auto", [*GPUS, LOST])


@pytest.mark.parametrize("selection", ["auto", "all", "free:2", "3"])
def test_select_waits_for_stale_gpus_and_never_selects_them(selection: str) -> None:
    stale = replace(LOST, unavailable=Unavailable(Obstacle.STALE, "stale: no answer for 9 s"))
    with pytest.raises(NotFreeError) as waiting:
        select(selection, [stale, replace(stale, index=2, uuid=LIGHT)], only_free=True)
    gpus = "GPU 3" if selection == "3" else "2 GPUs (3, 2)"
    assert has_problem(waiting.value.problems, "gpu-in-use", "device.gpus", f"{gpus}: stale: no answer for 9 s")
    if selection == "auto":
        assert select(selection, [stale]) == []
        return
    with pytest.raises(UsageError) as caught:
        select(selection, [stale])
    assert not isinstance(caught.value, NotFreeError)


def test_select_auto_uses_one_mig_instance_and_all_rejects_several() -> None:
    assert select("auto", INSTANCES) == INSTANCES[:1]
    assert select("free:1", INSTANCES) == INSTANCES[:1]
    with raises_problem("not-supported", "device.gpus", "NCCL"):
        select("all", INSTANCES)
    with raises_problem("too-few-gpus", "device.gpus", "2 free GPUs", " 0 ", "NCCL"):
        select("free:2", INSTANCES)


def test_select_for_launcher_prefers_free_gpus() -> None:
    assert [device.uuid for device in select("auto", GPUS, ranks=2)] == [FREE, LIGHT]
    assert [device.uuid for device in select("auto", GPUS, ranks=3)] == [FREE, BUSY, LIGHT]


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, [FREE, BUSY, LIGHT, *MIG]),
        ("", []),
        ("-1", []),
        ("2,0", [LIGHT, FREE]),
        (f"{BUSY},GPU-aaaa", [BUSY, FREE]),
        ("0,7,1", [FREE]),
        ("3", [MIG[0]]),
        (MIG[1], [MIG[1]]),
    ],
)
def test_visible_devices_applies_cuda_visible_devices(variable: str | None, uuids: list[str]) -> None:
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert [device.uuid for device in visible_devices(GPUS + INSTANCES, environment)] == uuids


def test_indices_in_cudas_order_of_speed_are_refused_on_mixed_gpus() -> None:
    mixed = [GPUS[0], replace(GPUS[1], name="Fake A100"), GPUS[2]]
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    assert visible_devices(GPUS, environment) == [GPUS[0]]
    assert visible_devices(mixed, environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [mixed[0]]
    assert visible_devices(mixed, {"CUDA_VISIBLE_DEVICES": LIGHT}) == [mixed[2]]
    with raises_problem("ambiguous-name", "CUDA_VISIBLE_DEVICES", "'0'", "UUIDs", "CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_devices(mixed, environment)


def test_cuda_devices_detects_free_gpus_by_processes_and_memory(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        [
            gpu_line(0, used=100),
            gpu_line(1, used=100),
            gpu_line(2, used=9000),
            gpu_line(3, used=3000),
            gpu_line(4, used=100),
        ],
        f"process 1 {UNKNOWN_PID} 50 compute",
        f"process 3 {UNKNOWN_PID} 2900 graphics",
        "fault 4 nvmlDeviceGetComputeRunningProcesses_v3 4",
        "fault 4 nvmlDeviceGetMemoryInfo_v2 4",
    )
    assert [device.unavailable for device in cuda_devices(sample_gpus())] == [
        None,
        Unavailable(Obstacle.IN_USE, "in use by other processes (user unknown)"),
        Unavailable(Obstacle.IN_USE, "memory in use by processes that the driver does not list here"),
        None,
        Unavailable(Obstacle.UNKNOWN, "the driver reports neither its processes nor its memory use (no permission)"),
    ]


def test_why_not_free_groups_gpus_with_the_same_reason_and_begins_with_their_number(
    loaded_gpu_host: FakeGpuHost,
) -> None:
    loaded_gpu_host.set_scene(
        [*(gpu_line(index, used=40000 + 900 * index) for index in range(3)), *(gpu_line(index) for index in (3, 4, 5))],
        f"process 3 {os.getpid()} 50 compute",
        f"process 4 {os.getppid()} 50 compute",
        f"process 5 {UNKNOWN_PID} 50 compute",
    )
    unlisted, others, alone = why_not_free(cuda_devices(sample_gpus())).split("; ")
    groups = [each.partition(": ")[0] for each in (unlisted, others, alone)]
    assert groups == ["3 GPUs (0, 1, 2)", "2 GPUs (3, 4)", "GPU 5"]


def test_cuda_devices_lists_mig_instances(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        gpu_line(0, mig=1),
        "instance 0 uuid=MIG-11aa gi=1 ci=0 total=9728 used=20",
        "instance 0 uuid=MIG-22bb gi=2 ci=0 total=9728 used=2000",
        f"process 0 {UNKNOWN_PID} 1900 compute 2",
    )
    devices = cuda_devices(sample_gpus())
    assert [(device.uuid, device.parent_uuid, device.mig_ids, device.is_free) for device in devices] == [
        ("MIG-11aa", gpu_uuid(0), "1/0", True),
        ("MIG-22bb", gpu_uuid(0), "2/0", False),
    ]
    assert "2 x MIG  pid " in call("gpus").stdout


@pytest.mark.nightly
def test_run_rejects_gpu_that_torch_cannot_use_and_releases_it(gputrain: Gputrain, gpu_host: FakeGpuHost) -> None:
    gpu_host.set_scene(gpu_line(0))
    environment = gpu_host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    done = gputrain("run", "digits", "--headless", "--gpus", "0", **environment)
    assert done.returncode == 2
    assert says(done.stderr, "not-supported", "device.gpus: ", "--gpus cpu")
    assert list((gpu_host.folder / "reservations").iterdir()) == []


def test_check_device_rejects_wrong_gpu() -> None:
    check_device("GPU-aa-11", None, "aa-11")
    check_device("MIG-bb-22", "GPU-aa-11", "bb-22")
    check_device("MIG-bb-22", "GPU-aa-11", "aa-11")
    with raises_problem("gpu-not-found", None, "cc-33", "GPU-aa-11", kind=WrongDeviceError):
        check_device("GPU-aa-11", None, "cc-33")


def test_check_devices_unique_allows_shared_cpu_only() -> None:
    check_devices_unique([RankDevice(0, "a", 1, "cpu"), RankDevice(1, "a", 2, "cpu")])
    check_devices_unique([RankDevice(0, "a", 1, FREE), RankDevice(1, "b", 2, FREE)])
    with raises_problem("gpu-in-use", "device.gpus", " 0 ", " 1 ", " a ", FREE):
        check_devices_unique([RankDevice(0, "a", 1, FREE), RankDevice(1, "a", 2, FREE)])
