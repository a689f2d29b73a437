"""Which GPUs a run gets: what `device.gpus` and an inherited CUDA_VISIBLE_DEVICES mean, and what CUDA must confirm."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import Gputrain
from gpu_host import COMPILER, NO_COMPILER, PHANTOM, GpuHost, gpu, uuid_of

from engine.distributed.topology import check_devices_unique
from engine.gpus.selection import CudaDevice, NotFreeError, Obstacle, Unavailable, cuda_devices, select
from engine.gpus.snapshot import Snapshot
from engine.gpus.visible_devices import query_cuda_uuids, visible_devices
from engine.runs.records import RankDevice
from engine.training.device import WrongDeviceError, check_device
from engine.utils.errors import UsageError

FREE, BUSY, LIGHT = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbbb3333"
MIG = ["MIG-11aa", "MIG-22bb"]
GPUS = [
    CudaDevice(0, FREE, "Fake H100", 5 << 20),
    CudaDevice(
        1, BUSY, "Fake H100", 900 << 20, unavailable=Unavailable(Obstacle.IN_USE, "process 77 of alice computes on it")
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
def test_a_selection_names_gpus(selection: str, uuids: list[str]) -> None:
    assert [device.uuid for device in select(selection, GPUS + INSTANCES)] == uuids


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("4", "there is no GPU '4'; there are 0 (Fake H100"),
        ("0,0", f"GPU 0 (Fake H100, {FREE}) is named twice"),
        ("0,GPU-aaaa", f"GPU 0 (Fake H100, {FREE}) is named twice"),
        ("GPU-bbbb", "'GPU-bbbb' could be several GPUs"),
        ("free:4", "4 free GPUs wanted, and no more than 3 can be had"),
        ("free:0", "train on the CPU with --gpus cpu"),
        ("gpu0", "there is no GPU 'gpu0'"),
        ("3", f"GPU '3' is divided into MIG instances; name one: {', '.join(MIG)}"),
        ("GPU-cccc", f"GPU 'GPU-cccc' is divided into MIG instances; name one: {', '.join(MIG)}"),
        (",".join(MIG), "2 devices with MIG instances among them: NCCL does not join MIG instances"),
        (f"0,{MIG[0]}", "NCCL does not join MIG instances"),
    ],
)
def test_a_selection_that_cannot_be_had_is_refused_with_what_there_is(selection: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        select(selection, GPUS + INSTANCES)
    assert message in str(caught.value)
    assert not isinstance(caught.value, NotFreeError)


def test_what_is_taken_is_waited_for_and_what_is_lost_is_not() -> None:
    with pytest.raises(NotFreeError, match="3 free GPUs wanted, 2 there: GPU 1: process 77 of alice computes"):
        select("free:3", GPUS)
    with pytest.raises(NotFreeError, match="not all of these are free: GPU 1: process 77 of alice"):
        select("0,1", GPUS, only_free=True)
    with pytest.raises(UsageError, match=r"GPU 3 .* cannot be used: lost") as caught:
        select("3", [*GPUS, LOST])
    assert not isinstance(caught.value, NotFreeError)
    assert LOST not in select("auto", [*GPUS, LOST])


@pytest.mark.parametrize("selection", ["auto", "all", "free:2", "3"])
def test_a_gpu_that_does_not_answer_is_waited_for_and_never_taken(selection: str) -> None:
    stale = replace(LOST, unavailable=Unavailable(Obstacle.STALE, "stale: no answer for 9 s"))
    with pytest.raises(NotFreeError, match=r"GPU 3.*: stale: no answer for 9 s"):
        select(selection, [stale, replace(stale, index=2, uuid=LIGHT)], only_free=True)
    if selection == "auto":
        assert select(selection, [stale]) == []
        return
    with pytest.raises(UsageError) as caught:
        select(selection, [stale])
    assert not isinstance(caught.value, NotFreeError)


def test_a_device_goes_through_json_with_its_obstacle() -> None:
    for device in (*GPUS, LOST, *INSTANCES):
        assert CudaDevice.from_dict(json.loads(json.dumps(asdict(device)))) == device


def test_only_instances_leave_auto_one_and_all_none() -> None:
    assert select("auto", INSTANCES) == INSTANCES[:1]
    assert select("free:1", INSTANCES) == INSTANCES[:1]
    with pytest.raises(UsageError, match="NCCL"):
        select("all", INSTANCES)
    with pytest.raises(UsageError, match=r"no more than 0 can be had.*NCCL"):
        select("free:2", INSTANCES)


def test_a_launcher_gets_as_many_as_it_started_ranks_free_ones_first() -> None:
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
        ("MIG-GPU-cccc4444/2/0", [MIG[1]]),
    ],
)
def test_an_inherited_variable_narrows_the_choice(variable: str | None, uuids: list[str]) -> None:
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert [device.uuid for device in visible_devices(GPUS + INSTANCES, environment)] == uuids


def test_indices_of_unequal_cards_are_asked_of_cuda() -> None:
    mixed = [GPUS[0], replace(GPUS[1], name="Fake A100"), GPUS[2]]
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    assert visible_devices(GPUS, environment, query_cuda=lambda _: []) == [GPUS[0]]
    assert visible_devices(mixed, environment, query_cuda=lambda _: [BUSY]) == [mixed[1]]
    assert visible_devices(mixed, environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, query_cuda=lambda _: [BUSY]) == [
        mixed[0]
    ]
    assert visible_devices(mixed, {"CUDA_VISIBLE_DEVICES": LIGHT}, query_cuda=lambda _: [BUSY]) == [mixed[2]]


CUDA = r"""
#include <string.h>
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 1 - ordinal; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, device ? 0xbb : 0xaa, 16); return 0; }
"""


@pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
def test_cuda_is_asked_in_a_child_process(tmp_path: Path) -> None:
    (tmp_path / "cuda.c").write_text(CUDA)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", library, str(tmp_path / "cuda.c")], check=True)
    shown = query_cuda_uuids({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert shown == ["GPU-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb", "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"]


def test_where_cuda_does_not_answer_either_the_way_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("")
    with pytest.raises(UsageError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        query_cuda_uuids({**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"})


def snapshot_of(gputrain: Gputrain, host: GpuHost) -> Snapshot:
    return Snapshot.from_line(gputrain("gpus", "--json", **host.environment).stdout)


def test_a_gpu_is_free_by_its_processes_and_its_memory(gputrain: Gputrain, host: GpuHost) -> None:
    host.becomes(
        [gpu(0, used=100), gpu(1, used=100), gpu(2, used=9000), gpu(3, used=3000), gpu(4, used=100)],
        f"process 1 {PHANTOM} 50 compute",
        f"process 3 {PHANTOM} 2900 graphics",
        "fault 4 nvmlDeviceGetComputeRunningProcesses_v3 4",
        "fault 4 nvmlDeviceGetMemoryInfo_v2 4",
    )
    assert [device.unavailable for device in cuda_devices(snapshot_of(gputrain, host))] == [
        None,
        Unavailable(Obstacle.IN_USE, f"process {PHANTOM} of an unknown user computes on it"),
        Unavailable(Obstacle.IN_USE, "8.8 GiB of it are in use, by processes that the driver does not show here"),
        None,
        Unavailable(Obstacle.UNKNOWN, "it is not known who uses it (no permission)"),
    ]


def test_the_instances_of_a_divided_gpu_are_devices_of_their_own(gputrain: Gputrain, host: GpuHost) -> None:
    host.becomes(
        gpu(0, mig=1),
        "instance 0 uuid=MIG-11aa gi=1 ci=0 total=9728 used=20",
        "instance 0 uuid=MIG-22bb gi=2 ci=0 total=9728 used=2000",
        f"process 0 {PHANTOM} 1900 compute 2",
    )
    devices = cuda_devices(snapshot_of(gputrain, host))
    assert [(one.uuid, one.parent_uuid, one.mig_ids, one.is_free) for one in devices] == [
        ("MIG-11aa", uuid_of(0), "1/0", True),
        ("MIG-22bb", uuid_of(0), "2/0", False),
    ]
    assert "2 MIG, pid " in gputrain("gpus", **host.environment).stdout


def test_a_run_names_the_gpus_that_exist_where_one_does_not(gputrain: Gputrain, host: GpuHost) -> None:
    host.becomes(gpu(0), gpu(1))
    done = gputrain("run", "--headless", "digits", "--gpus", "0,4", **host.environment, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    assert f"device.gpus: there is no GPU '4'; there are 0 (Fake H100 80GB, {uuid_of(0)});" in done.stderr
    assert not gputrain.runs.exists()


def test_a_run_that_finds_no_gpu_free_says_so_and_trains_on_the_cpu(gputrain: Gputrain, host: GpuHost) -> None:
    host.becomes(gpu(0, used=2000), f"process 0 {os.getpid()} 1500 compute")
    environment = host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    done = gputrain("run", "digits", "--dry-run", "--ranks", "1", "--model", "linear", **environment)
    assert done.returncode == 0
    assert f"warning: no GPU is free, training on the CPU (GPU 0: process {os.getpid()} of " in done.stderr
    assert list((host.folder / "reservations").iterdir()) == []


def test_what_torch_cannot_use_is_refused_and_let_go_of(gputrain: Gputrain, host: GpuHost) -> None:
    host.becomes(gpu(0))
    environment = host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    done = gputrain("run", "digits", "--headless", "--gpus", "0", **environment)
    assert done.returncode == 2
    assert "cannot use the GPUs that the driver shows; train with --gpus cpu" in done.stderr
    assert list((host.folder / "reservations").iterdir()) == []


def test_a_rank_that_cuda_gives_another_gpu_does_not_train() -> None:
    check_device("GPU-aa-11", None, "aa-11")
    check_device("MIG-bb-22", "GPU-aa-11", "bb-22")
    check_device("MIG-bb-22", "GPU-aa-11", "aa-11")
    with pytest.raises(WrongDeviceError, match="CUDA gave this rank the GPU cc-33, and GPU-aa-11 was chosen for it"):
        check_device("GPU-aa-11", None, "cc-33")


def test_two_ranks_never_share_a_gpu_but_may_share_a_cpu() -> None:
    check_devices_unique([RankDevice(0, "a", 1, "cpu"), RankDevice(1, "a", 2, "cpu")])
    check_devices_unique([RankDevice(0, "a", 1, FREE), RankDevice(1, "b", 2, FREE)])
    with pytest.raises(UsageError, match="ranks 0 and 1 on a both have"):
        check_devices_unique([RankDevice(0, "a", 1, FREE), RankDevice(1, "a", 2, FREE)])
