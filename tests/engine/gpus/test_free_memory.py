"""Runs that reserve memory instead of whole GPUs (`queue.min_free`): who shares a GPU, and who waits."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from engine.gpus import allocation
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.current_use import Obstacle
from engine.gpus.device_preview import preview_allocation
from engine.gpus.nvml_processes import NvmlProcess
from engine.gpus.processes import ProcessTable
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation_entry import MAX_PID, ReservedRank
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.run_queue import RunQueue
from engine.gpus.selection import CudaDevice, NotFreeError, cuda_devices
from engine.gpus.snapshot import Measurement, Snapshot
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid, sample_gpus
from support.gpu.reservations import make_reservation
from support.messages import has_problem, raises_problem
from support.runs.trained_run import call

GIB = 1 << 30
TOTAL_GIB = 80


class Sampler:
    """Samples the fake driver in this process. `on_read` is called before each sample of a run that waits."""

    def __init__(self, options: object) -> None:
        pass

    def read(self, timeout_s: float) -> Snapshot:
        return sample_gpus()

    def latest(self) -> Snapshot:
        return sample_gpus()

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def host(loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpuHost]:
    monkeypatch.setattr(allocation, "DriverMonitor", Sampler)
    set_used(loaded_gpu_host, 0)
    yield loaded_gpu_host
    assert read_reservations() == []


def set_used(host: FakeGpuHost, *used_gib: int, processes: tuple[str, ...] = ()) -> None:
    """Set the memory in use of each GPU of 80 GiB."""
    sizes = {"total": TOTAL_GIB * 1024, "reserved": 0}
    host.set_scene(*(gpu_line(index, used=1024 * used, **sizes) for index, used in enumerate(used_gib)), *processes)


def allocate(name: str, gib: int, selection: str = "free:1", *, wait: bool = False, **values: Any) -> GpuAllocation:
    terms = QueueTerms(min_free=gib * GIB, **values)

    def refuse(reason: str) -> None:
        raise AssertionError(f"{name} waits: {reason}")

    return allocate_devices(selection, name, wait=wait, on_wait=refuse, poll_terms=lambda: (terms, ""))


def release(*allocations: GpuAllocation) -> None:
    for each in allocations:
        each.reservation.release()


def test_runs_share_gpu_while_their_reservations_fit(host: FakeGpuHost) -> None:
    first, second = allocate("first", 30), allocate("second", 40)
    assert [device.index for each in (first, second) for device in each.devices] == [0, 0]
    assert has_problem(second.warnings, "gpu-in-use", "", "queue.min_free", "GPU 0: ")
    with raises_problem("gpu-in-use", "device.gpus", "10 GiB of memory left", "first 30 GiB, second 40 GiB", "--queue"):
        allocate("third", 20)
    release(first, second)


def test_third_run_waits_until_memory_is_released(host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "WAIT_POLL_SECONDS", 0.0)
    first, second, reasons = allocate("first", 30), allocate("second", 30), list[str]()

    def on_wait(reason: str) -> None:
        reasons.append(reason)
        [waiting] = [each for each in read_reservations() if each.is_waiting]
        assert (waiting.run, waiting.min_free) == ("third", 40 * GIB)
        first.reservation.release()

    terms = QueueTerms(min_free=40 * GIB), ""
    third = allocate_devices("free:1", "third", wait=True, on_wait=on_wait, poll_terms=lambda: terms)
    assert len(reasons) == 1
    assert [device.index for device in third.devices] == [0]
    release(second, third)


def test_run_whose_sampler_rests_starts_only_after_a_new_reading(
    host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "WAIT_POLL_SECONDS", 0.0)
    monkeypatch.setattr(allocation, "BRIEF_WAIT_SECONDS", 0.0)
    first, reasons, rests = allocate("first", 0), list[str](), list[int]()
    monkeypatch.setattr(Sampler, "rest", lambda _: rests.append(len(reasons)))

    def on_wait(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 2:
            set_used(host, 55, processes=(f"process 0 {os.getppid()} {55 * 1024} compute",))
            first.reservation.release()
        elif len(reasons) == 4:
            set_used(host, 0)

    terms = QueueTerms(), ""
    second = allocate_devices("free:1", "second", wait=True, on_wait=on_wait, poll_terms=lambda: terms)
    assert rests == [1, 2]
    assert reasons[2] == allocation.READING
    assert getpass.getuser() in reasons[3]
    release(second)


def test_processes_of_others_count_with_what_they_use(host: FakeGpuHost) -> None:
    set_used(host, 55, processes=(f"process 0 {os.getppid()} {55 * 1024} compute",))
    with raises_problem("gpu-in-use", "device.gpus", "25 GiB of memory left"):
        allocate("large", 26)
    small = allocate("small", 20)
    assert has_problem(small.warnings, "gpu-in-use", "", "enough memory left", "other processes")
    with raises_problem("gpu-in-use", "device.gpus", "5 GiB of memory left"):
        allocate("next", 6)
    release(small)


def test_run_counts_with_its_reservation_or_with_its_use_if_that_is_more(host: FakeGpuHost) -> None:
    run = allocate("run", 30)
    run.reservation.publish_ranks([ReservedRank("run", 0, os.getpid(), gpu_uuid(0))])
    for used, left in ((0, 50), (30, 50), (35, 45)):
        set_used(host, used, processes=(f"process 0 {os.getpid()} {used * 1024} compute",) if used else ())
        [device] = cuda_devices(sample_gpus(), read_reservations(), QueueTerms(min_free=GIB))
        assert (device.unreserved_bytes, device.other_use) == (left * GIB, None)
    release(run)


def free_gib() -> float:
    """Return how much memory of GPU 0 is neither in use nor reserved."""
    [device] = cuda_devices(sample_gpus(), read_reservations(), QueueTerms(min_free=GIB))
    assert device.unreserved_bytes is not None
    return device.unreserved_bytes / GIB


@pytest.mark.parametrize("pid", [os.getpid(), MAX_PID], ids=["of this host", "of another container"])
def test_unlisted_memory_does_not_count_as_reservation_of_started_run(host: FakeGpuHost, pid: int) -> None:
    # NVML lists no processes in a container. The memory may be that of another one, while the run has none yet.
    run = allocate("run", 30)
    run.reservation.publish_ranks([ReservedRank("run", 0, pid, gpu_uuid(0))])
    for used, left in ((0, 50), (40, 10), (60, 0)):
        set_used(host, used)
        assert free_gib() == left
    with raises_problem("gpu-in-use", "device.gpus", "0 B of memory left"):
        allocate("second", 20)
    release(run)


def test_process_below_command_of_run_belongs_to_run() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        listed = NvmlProcess(worker, "compute", None, None, Measurement(GIB, 1.0, unit="B"))
        described = ProcessTable().describe([listed], [ReservedRank("run", 0, command.pid, "GPU-1")])
        os.kill(worker, 9)
    assert [(process.pid, process.run, process.rank) for process in described] == [(worker, "run", 0)]


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(
    ("selection", "code"),
    [("free:1", "too-few-gpus"), ("auto", "too-few-gpus"), ("all", "gpu-failed"), ("0", "gpu-failed")],
)
def test_run_that_needs_more_memory_than_a_gpu_ever_has_is_refused(
    host: FakeGpuHost, selection: str, code: str, wait: bool
) -> None:
    set_used(host, 70)
    with raises_problem(code, "device.gpus", f"{TOTAL_GIB} GiB of memory can be had at most", "--min-free"):
        allocate("large", TOTAL_GIB + 1, selection, wait=wait)
    set_used(host, 0)
    allocate_and_release("fits", TOTAL_GIB, selection)


def allocate_and_release(name: str, gib: int, selection: str) -> list[Any]:
    allocated = allocate(name, gib, selection)
    release(allocated)
    return allocated.devices


def test_gpu_without_memory_reading_is_not_free_for_run_that_reserves_memory(host: FakeGpuHost) -> None:
    host.set_scene(gpu_line(0), "fault 0 nvmlDeviceGetMemoryInfo_v2 4")
    terms = QueueTerms(min_free=GIB)
    [device] = cuda_devices(sample_gpus(), (), terms)
    assert device.unavailable is not None and device.unavailable.obstacle is Obstacle.UNKNOWN
    with raises_problem("gpu-in-use", "device.gpus", kind=NotFreeError):
        preview_allocation("auto", sample_gpus(), wait=False, terms=terms)


def test_integrated_gpu_has_the_memory_of_the_host(host: FakeGpuHost) -> None:
    # What NVML reports of the GB10 of a DGX Spark.
    host.set_scene(
        gpu_line(0, name="NVIDIA_GB10", util=0, memory_clock=-1, nvlinks=0, pcie_gen=1, pcie_width=1),
        "fault 0 nvmlDeviceGetMemoryInfo_v2 3",
        "fault 0 nvmlDeviceGetMemoryInfo 3",
    )
    [gpu] = sample_gpus().gpus
    memory = psutil.virtual_memory()
    assert gpu.value("integrated") and gpu.value("memory_total") == memory.total
    assert abs(gpu.value("memory_used") - (memory.total - memory.available)) < GIB
    assert (gpu.value("pcie_generation"), gpu["pcie_width"].reason) == (None, "integrated GPU")
    assert "GB10" in (shown := call("gpus").stdout) and "integrated  free" in shown
    enough, too_much = QueueTerms(min_free=1 << 20), QueueTerms(min_free=memory.total)
    assert [each.index for each in preview_allocation("auto", sample_gpus(), wait=False, terms=enough).devices] == [0]
    with raises_problem("gpu-in-use", "device.gpus", "of memory left", kind=NotFreeError):
        preview_allocation("auto", sample_gpus(), wait=False, terms=too_much)


def test_run_that_waits_for_more_memory_is_not_overtaken(host: FakeGpuHost) -> None:
    holder = allocate("holder", 50)
    waiter = make_reservation("large", 1001, selection="free:1", visible=(gpu_uuid(0),), min_free=40 * GIB)
    snapshot, terms = sample_gpus(), QueueTerms(min_free=10 * GIB)

    def view(terms: QueueTerms) -> dict[str, CudaDevice]:
        return {device.uuid: device for device in cuda_devices(snapshot, read_reservations(), terms)}

    assert [device.is_free for device in view(terms).values()] == [True]
    turn = RunQueue(wait=True).take_turn([waiter], terms, view)
    assert [device.is_queued for device in turn.devices.values()] == [True]
    release(holder)
