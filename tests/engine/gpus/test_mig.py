"""MIG instances: their processes, which only their own handles list to everyone, their activity and their memory."""

from __future__ import annotations

from engine.base.codec import decode, encode
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.selection import cuda_devices
from engine.gpus.snapshot import Missing, Snapshot
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, sample_gpus

INSTANCES = [
    "instance 0 uuid=MIG-11aa gi=1 ci=0 used=20 sm=30 tensor=10",
    "instance 0 uuid=MIG-22bb gi=2 ci=0 used=2000 sm=80 tensor=50 dram=40",
]


def test_mig_processes_are_those_of_instances_if_gpu_refuses(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        gpu_line(0, mig=1, used=2100, privileged=0), INSTANCES, f"process 0 {UNKNOWN_PID} 1900 compute 2"
    )
    snapshot = sample_gpus()
    processes = snapshot.gpus[0].processes.value
    assert processes is not None
    assert [(process.pid, process.instance, process.compute_instance) for process in processes] == [(UNKNOWN_PID, 2, 0)]
    in_use = Unavailable(Obstacle.IN_USE, "in use by other processes (user unknown)")
    assert [device.unavailable for device in cuda_devices(snapshot)] == [None, in_use]


def test_mig_processes_are_listed_once_if_gpu_and_instance_list_them(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        gpu_line(0, mig=1), INSTANCES, [f"process 0 {UNKNOWN_PID} 90 compute {gi}" for gi in "12"]
    )
    processes = sample_gpus().gpus[0].processes.value
    assert processes is not None
    assert [(process.pid, process.instance) for process in processes] == [(UNKNOWN_PID, 1), (UNKNOWN_PID, 2)]


def test_mig_compute_instances_of_one_gpu_instance_are_used_separately(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        gpu_line(0, mig=1),
        [f"instance 0 uuid=MIG-{ci} gi=1 ci={ci} used=900" for ci in (0, 1)],
        f"process 0 {UNKNOWN_PID} 800 compute 1 1",
    )
    assert [device.is_free for device in cuda_devices(sample_gpus())] == [True, False]


def test_mig_instance_has_its_own_activity_and_memory(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1, used=60000, sm=99, tensor=99), INSTANCES)
    instances = sample_gpus().gpus[0].instances
    assert [(mig.sm_active.value, mig.tensor_active.value, mig.dram_active.value) for mig in instances] == [
        (30, 10, 0),
        (80, 50, 40),
    ]
    assert [(mig.memory_used.value, mig.memory_total.value) for mig in instances] == [
        (20 << 20, 9728 << 20),
        (2000 << 20, 9728 << 20),
    ]


def test_mig_activity_is_unknown_without_the_function_of_the_driver(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1, sm=99), INSTANCES, "fault 0 nvmlGpmMigSampleGet 13")
    [gpu] = sample_gpus().gpus
    assert {mig.sm_active.reason for mig in gpu.instances} == {Missing.NOT_SUPPORTED_BY_DRIVER}
    assert (gpu.state, gpu.value("sm_active")) == ("ok", 99)


def test_mig_readings_survive_json_and_end_when_stale(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1), INSTANCES, f"process 0 {UNKNOWN_PID} 90 compute 2 0")
    snapshot = decode(encode(sample_gpus()), Snapshot)
    [gpu] = snapshot.gpus
    assert [mig.sm_active.value for mig in gpu.instances] == [30, 80]
    assert [process.compute_instance for process in gpu.processes.value or ()] == [0]
    [stale] = snapshot.as_of(snapshot.time + 9, 2.0).gpus
    assert [mig.sm_active.value for mig in stale.instances] == [None, None]
    assert str(stale.instances[0].memory_used.reason).startswith("stale: ")
