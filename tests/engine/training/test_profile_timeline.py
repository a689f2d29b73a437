"""How the duration of profiled steps is split into parts, on made-up timelines."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from engine.runs.profile_file import PARTS, Part
from engine.training.profile_timeline import (
    AUTOGRAD_NODE_PREFIX,
    MARK_PREFIX,
    Activity,
    HostStep,
    StepParts,
    cpu_parts,
    gpu_parts,
    host_steps,
    operator_seconds,
)

MAIN, BACKWARD, PREFETCH = 1, 2, 3
COMPUTE_STREAM, NCCL_STREAM, COPY_STREAM = 7, 8, 9


def host(name: str, start: int, end: int, lane: int = MAIN, link: int = 0) -> Activity:
    return Activity(name, "host", lane, start, end, link)


def mark(name: str, start: int, end: int) -> Activity:
    return host(MARK_PREFIX + name, start, end)


def marked_step(start: int, **phases: tuple[int, int]) -> list[Activity]:
    """Marks of a step of 100 ns from `start` on; the times of its phases are relative to its start."""
    marks = [mark(name, start + begin, start + end) for name, (begin, end) in phases.items()]
    return [mark(f"step {start}", start, start + 100), *marks]


class Device:
    """Kernels on a device, each with the launch that precedes it."""

    def __init__(self) -> None:
        self.activities: list[Activity] = []

    def run(self, name: str, launched: int, start: int, end: int, stream: int = COMPUTE_STREAM, by: int = MAIN) -> None:
        link = len(self.activities) + 1
        self.activities += [
            Activity("cudaLaunchKernel", "launch", by, launched, launched + 1, link),
            Activity(name, "device", stream, start, end, link),
        ]


def nonzero(parts: StepParts) -> dict[Part, int]:
    return {part: value for part, value in parts.items() if value}


def gpu(steps: Sequence[HostStep], activities: list[Activity]) -> list[StepParts]:
    parts = gpu_parts(steps, activities, MAIN)
    assert parts is not None
    return parts


def test_host_step_lasts_to_the_next_one_unless_interrupted() -> None:
    marks = marked_step(0) + marked_step(150) + marked_step(400)
    assert [(step.start, step.end) for step in host_steps(marks, [True, False, True])] == [
        (0, 150),
        (150, 250),
        (400, 500),
    ]


def test_cpu_parts_are_the_marks_and_the_rest() -> None:
    marks = marked_step(0, data=(5, 20), forward=(20, 50), backward=(50, 80), optimizer=(80, 95))
    [parts] = cpu_parts(host_steps(marks, [True]), marks, MAIN, has_allreduce=False)
    assert nonzero(parts) == {"data": 15, "forward": 30, "backward": 30, "optimizer": 15, "other": 10}
    assert list(parts) == list(PARTS)


def test_cpu_wait_after_the_last_gradient_is_exposed_allreduce() -> None:
    activities = [
        *marked_step(0, forward=(0, 20), backward=(20, 90)),
        host(f"{AUTOGRAD_NODE_PREFIX}: ConvolutionBackward0", 25, 35),
        host(f"{AUTOGRAD_NODE_PREFIX}: torch::autograd::AccumulateGrad", 40, 50),
        # DDP waits, then makes views of the bucket, then the predictions are counted.
        host("aten::as_strided", 70, 72),
        host("aten::argmax", 72, 90),
        # Another thread does not end the wait.
        host("aten::mul", 55, 60, lane=PREFETCH),
    ]
    [parts] = cpu_parts(host_steps(activities, [True]), activities, MAIN, has_allreduce=True)
    assert nonzero(parts) == {"forward": 20, "backward": 50, "allreduce": 20, "other": 10}


def test_cpu_parts_of_accumulated_steps_add_up_and_only_the_last_backward_waits() -> None:
    nodes = [host(AUTOGRAD_NODE_PREFIX, 20, 25), host(AUTOGRAD_NODE_PREFIX, 60, 65)]
    first, second = {"data": (0, 5), "forward": (5, 20), "backward": (20, 40)}, {"data": (40, 45), "forward": (45, 60)}
    activities = [*marked_step(0, **first), *marked_step(0, **second)[1:], mark("backward", 60, 90), *nodes]
    [parts] = cpu_parts(host_steps(activities, [True]), activities, MAIN, has_allreduce=True)
    assert nonzero(parts) == {"data": 10, "forward": 30, "backward": 25, "allreduce": 25, "other": 10}


def test_gpu_kernels_belong_to_the_phase_that_launched_them() -> None:
    marks = marked_step(0, forward=(0, 20), backward=(20, 40), optimizer=(40, 50))
    device = Device()
    # The host is ahead: every kernel runs long after its launch.
    device.run("conv", 5, 100, 140)
    device.run("conv_backward", 25, 140, 200, by=BACKWARD)
    device.run("sgd", 45, 210, 220)
    activities = [*marks, host(AUTOGRAD_NODE_PREFIX, 20, 40, lane=BACKWARD), *device.activities]
    [parts] = gpu(host_steps(marks, [True]), activities)
    assert nonzero(parts) == {"forward": 40, "backward": 60, "optimizer": 10, "other": 10}


def test_gpu_allreduce_counts_only_where_no_computation_hides_it() -> None:
    marks = marked_step(0, forward=(0, 20), backward=(20, 60), optimizer=(60, 70))
    device = Device()
    device.run("conv", 5, 10, 30)
    device.run("conv_backward", 25, 30, 60)
    device.run("ncclDevKernel_AllReduce_Sum_f32", 40, 45, 80, NCCL_STREAM)
    device.run("sgd", 65, 80, 90)
    [parts] = gpu(host_steps(marks, [True]), [*marks, *device.activities])
    assert nonzero(parts) == {"forward": 20, "backward": 30, "allreduce": 20, "optimizer": 10}


def test_gpu_is_waiting_for_data_only_while_it_is_idle() -> None:
    marks = [*marked_step(0, data=(0, 10), forward=(10, 40)), *marked_step(100, data=(100, 160), forward=(160, 180))]
    marks[-2:] = [mark("data", 100, 160), mark("forward", 160, 180)]
    device = Device()
    device.run("conv", 15, 20, 120)  # still runs while the host waits
    device.run("conv", 165, 170, 190)
    [first, second] = gpu(host_steps(marks, [True, True]), [*marks, *device.activities])
    assert nonzero(first) == {"forward": 100, "data": 40, "other": 10}
    assert nonzero(second) == {"forward": 20}


def test_gpu_copies_and_work_of_the_input_thread_are_copy_where_nothing_else_runs() -> None:
    marks = marked_step(0, data=(0, 10), forward=(10, 60), backward=(60, 90))
    device = Device()
    device.run("conv", 15, 20, 40)
    device.run("Memcpy HtoD (Pinned -> Device)", 16, 30, 55, COPY_STREAM, by=PREFETCH)
    device.run("normalize", 17, 55, 60, COPY_STREAM, by=PREFETCH)
    device.run("conv_backward", 65, 70, 80)
    [parts] = gpu(host_steps(marks, [True]), [*marks, *device.activities])
    assert nonzero(parts) == {"forward": 20, "copy": 20, "backward": 10, "other": 10}


def test_gpu_steps_without_kernels_are_unknown() -> None:
    marks = marked_step(0, forward=(0, 20))
    assert gpu_parts(host_steps(marks, [True]), marks, MAIN) is None
    assert gpu_parts([], marks, MAIN) is None


@pytest.mark.parametrize("seed", range(20))
def test_gpu_parts_add_up_to_the_time_of_the_device(seed: int) -> None:
    chance, marks, device = Random(seed), list[Activity](), Device()  # noqa: S311 (no cryptography)
    for number in range(4):
        marks += marked_step(100 * number, data=(0, 20), forward=(20, 50), backward=(50, 80), optimizer=(80, 100))
        for _ in range(10):
            launched = 100 * number + chance.randrange(100)
            start = launched + chance.randrange(60)
            name, stream = chance.choice([("conv", 7), ("ncclDevKernel", 8), ("Memcpy HtoD", 9)])
            device.run(name, launched, start, start + chance.randrange(1, 40), stream)
        # So that every step has a kernel of its own.
        device.run("conv", 100 * number, 100 * number + 60, 100 * number + 61)
    parts = gpu(host_steps(marks, [True] * 4), [*marks, *device.activities])
    kernels = [item for item in device.activities if item.kind == "device" and item.name != "Memcpy HtoD"]
    first = min(item.start for item in kernels)
    assert all(value >= 0 for step in parts for value in step.values())
    assert sum(sum(step.values()) for step in parts) <= max(item.end for item in device.activities) - first


def test_own_time_of_operators_excludes_the_operators_that_they_call() -> None:
    activities = [
        host("aten::conv2d", 0, 100),
        host("aten::convolution", 10, 90),
        host("aten::empty", 20, 30),
        host("aten::empty", 40, 50),
        mark("forward", 0, 100),
        host("aten::late", 500, 600),
    ]
    rows = operator_seconds(activities, 0, 200, on_device=False)
    assert rows == [("aten::convolution", 1, 60e-9), ("aten::conv2d", 1, 20e-9), ("aten::empty", 2, 20e-9)]


def test_device_time_of_operators_is_that_of_their_kernels() -> None:
    activities = [
        host("aten::mm", 0, 5, link=11),
        Activity("gemm", "device", 7, 10, 50, 1, 11),
        Activity("splitk", "device", 7, 50, 60, 2, 11),
        Activity("ncclDevKernel", "device", 8, 60, 80, 3, 0),
    ]
    rows = operator_seconds(activities, 0, 200, on_device=True)
    assert rows == [("aten::mm", 2, 50e-9), ("ncclDevKernel", 1, 20e-9)]
