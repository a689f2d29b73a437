"""GPU usage of a run on all of its nodes, and the allocation of GPUs to the ranks of one node."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.distributed import HashStore

from engine.base.process import SignalHandler
from engine.config.schema import Config
from engine.gpus.allocation import GpuAllocation
from engine.gpus.reservation_reader import read_reservations
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.node import allocate_node_gpus
from engine.jobs.launch.request import RunRequest
from engine.runs.events import GpuEvent
from engine.train.distributed.rank_env import RankInfo
from support.gpu.fake_gpu_host import FakeGpuHost, eight_gpu_lines, gpu_line, gpu_uuid
from support.messages import raises_problem


def first_event(usage: GpuUsagePoller) -> GpuEvent:
    while (event := usage.poll()) is None:
        time.sleep(0.02)
    return event


def test_gpu_usage_poller_samples_only_gpus_of_run(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(eight_gpu_lines(throttle=5))
    usage = GpuUsagePoller([gpu_uuid(2), gpu_uuid(5)])
    event = first_event(usage)
    usage.close()
    assert [gpu.uuid for gpu in event.gpus] == [gpu_uuid(2), gpu_uuid(5)]
    assert [gpu.util for gpu in event.gpus] == [92, 95]
    assert [*event.gpus[0].throttle] == ["idle", "power cap"]
    assert event.gpus[0].memory_used == 61000 << 20


def test_gpu_usage_poller_samples_mig_instance_of_run_and_not_its_gpu(loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(
        gpu_line(0, mig=1, used=61000, sm=99, power=650, temperature=71, throttle=4),
        [f"instance 0 uuid=MIG-{gi} gi={gi} used={gi}000 sm={gi}0 tensor={gi}" for gi in (1, 2)],
        gpu_line(1),
    )
    usage = GpuUsagePoller(["MIG-2"])
    [sample] = first_event(usage).gpus
    usage.close()
    assert (sample.uuid, sample.memory_used, sample.sm_active, sample.tensor_active) == ("MIG-2", 2000 << 20, 20, 2)
    assert (sample.util, sample.power) == (None, None)
    assert (sample.temperature, [*sample.throttle]) == (71, ["power cap"])


def allocate_in_threads(tmp_path: Path, ranks: int, **device: object) -> list[GpuAllocation]:
    store, config = HashStore(), Config.model_validate({"device": device})
    request = RunRequest(config, tmp_path / "runs", "digits")

    def allocate(rank: int) -> GpuAllocation:
        return allocate_node_gpus(request, RankInfo(rank, ranks, rank, ranks), store, SignalHandler(), lambda _: None)

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(allocate, rank) for rank in reversed(range(ranks))]
        return [future.result() for future in reversed(futures)]


def test_allocate_node_gpus_gives_ranks_same_gpus_and_one_reservation(
    loaded_gpu_host: FakeGpuHost, tmp_path: Path
) -> None:
    loaded_gpu_host.set_scene([gpu_line(0), gpu_line(1, used=100), gpu_line(2, used=50)])
    allocations = allocate_in_threads(tmp_path, 2, gpus="free:2")
    assert [[device.index for device in allocation.devices] for allocation in allocations] == [[1, 2], [1, 2]]
    [reservation] = read_reservations()
    assert reservation.gpus == (gpu_uuid(1), gpu_uuid(2))
    for allocation in allocations:
        allocation.reservation.release()
    assert read_reservations() == []


def test_allocate_node_gpus_raises_error_on_every_rank(loaded_gpu_host: FakeGpuHost, tmp_path: Path) -> None:
    loaded_gpu_host.set_scene(gpu_line(0))
    with raises_problem("too-few-gpus", "device.gpus", "2 free GPUs", " 1 "):
        allocate_in_threads(tmp_path, 2, gpus="free:2")
