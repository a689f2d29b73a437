"""Node plan, rendezvous, DistributedDataParallel and DataParallel."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.gpus.selection import CudaDevice
from engine.train.data.checks import build_sampler
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.open import open_source
from engine.train.distributed.node_plan import plan_node, prepare_environment
from engine.train.distributed.parallel import warmup_batch_size, wrap_model
from engine.train.distributed.rendezvous import (
    check_rendezvous,
)
from support.messages import raises_problem
from support.runs.factories import find_free_port

GPUS = [CudaDevice(index, f"GPU-{index}", "made up", 0) for index in range(4)]


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


@pytest.mark.parametrize(
    ("requested", "gpus", "backend"),
    [
        ("auto", GPUS, "nccl-legacy"),
        ("auto", GPUS[:1], "gloo"),
        ("auto", [], "gloo"),
        ("gloo", GPUS, "gloo"),
        ("nccl", GPUS, "nccl"),
        ("gloo", [], "gloo"),
    ],
)
def test_plan_chooses_backend_for_devices(requested: str, gpus: list[CudaDevice], backend: str) -> None:
    assert plan_node(config(f"device.backend={requested}"), gpus).backend == backend


def test_plan_chooses_nccl_for_one_gpu_on_each_of_two_nodes() -> None:
    assert plan_node(config(), GPUS[:1], local_world_size=1, world_size=2).backend == "nccl-legacy"


def test_plan_does_not_divide_cores_that_srun_gave_to_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.train.distributed.node_plan.available_cores", lambda: 12)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "12")
    shares = []
    for tasks in ("8", "1"):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        shares.append(plan_node(config(), [], local_world_size=8, world_size=8).cores_per_rank)
    assert shares == [12, 1]


def test_plan_rejects_nccl_on_cpu() -> None:
    with raises_problem("no-gpu", "device.backend", "nccl", "CPU", "gloo", "auto"):
        plan_node(config("device.backend=nccl"), [])


def test_plan_dp_gives_one_rank_every_gpu() -> None:
    plan = plan_node(config("device.parallel=dp"), GPUS)
    assert (plan.local_world_size, plan.devices_per_rank, plan.backend) == (1, 4, "gloo")
    assert [plan.devices[place] for place in plan.device_indices(0)] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    environment: dict[str, str] = {}
    prepare_environment(plan, environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1,GPU-2,GPU-3"


def test_prepare_environment_divides_compile_threads_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.train.distributed.node_plan.available_cores", lambda: 64)
    environments: list[dict[str, str]] = [{}, {}, {"TORCHINDUCTOR_COMPILE_THREADS": "3"}]
    for gpus, environment in zip((GPUS, GPUS[:1], GPUS), environments, strict=True):
        prepare_environment(plan_node(config(), gpus), environment)
    assert [environment["TORCHINDUCTOR_COMPILE_THREADS"] for environment in environments] == ["16", "32", "3"]


def test_plan_ddp_gives_each_rank_one_gpu() -> None:
    plan = plan_node(config(), GPUS)
    assert (plan.local_world_size, plan.devices_per_rank) == (4, 1)
    assert [list(plan.device_indices(rank)) for rank in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("gpus", "local_ranks", "code", "shown"),
    [
        ([], None, "too-few-gpus", "CPU"),
        (GPUS[:1], None, "too-few-gpus", "one GPU"),
        (GPUS, 4, "conflict", "torchrun"),
    ],
)
def test_plan_rejects_dp_without_several_gpus(
    gpus: list[CudaDevice], local_ranks: int | None, code: str, shown: str
) -> None:
    with raises_problem(code, "device.parallel", "dp", shown):
        plan_node(config("device.parallel=dp"), gpus, local_ranks)


def test_sampler_with_dp_multiplies_batch_size_by_gpus() -> None:
    training_config = config("data.batch_size=20", "device.parallel=dp", "data.dataset=digits")
    source = open_source(training_config)
    dp, ddp = build_sampler(training_config, source, 1, devices_per_rank=4), build_sampler(training_config, source, 4)
    assert (dp.batch_size, dp.global_batch, dp.num_devices) == (80, 80, 4)
    assert (ddp.batch_size, ddp.global_batch, ddp.num_devices) == (20, 80, 4)
    # With DataParallel, only the first GPU evaluates.
    assert next(dp.evaluation_requests("val", dp.val_images)).indices.tolist() == list(range(20))
    assert next(dp.train_requests(1)).indices.tolist() == [
        index
        for rank in range(4)
        for index in next(build_sampler(training_config, source, 4, rank).train_requests(1)).indices
    ]


def test_warmup_batch_size_covers_smallest_dp_batch() -> None:
    assert warmup_batch_size(DistributedBatchSampler(100, 1, 16, 0, 4, True, 0)) == 2
    # DataParallel splits 13 images over 4 GPUs as 4, 4, 4 and 1.
    assert warmup_batch_size(DistributedBatchSampler(77, 1, 64, 0, 1, False, 0, devices_per_rank=4)) == 13


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_check_rendezvous_rejects_unavailable_address(busy_port: int) -> None:
    for variables, (code, *values) in {
        ("127.0.0.1", str(busy_port)): ("address-in-use", busy_port, "(Address already in use)"),
        ("192.0.2.1", "29501"): ("invalid-value", "192.0.2.1 "),
        ("no-such-host.invalid", "29501"): ("invalid-value", "no-such-host.invalid "),
        ("", "70000"): ("invalid-value", "env://", "MASTER_ADDR=''", "MASTER_PORT='70000'"),
    }.items():
        environment = dict(zip(("MASTER_ADDR", "MASTER_PORT"), variables, strict=True))
        with raises_problem(code, "device.init_method", *values):
            check_rendezvous("env://", environment)
        check_rendezvous("auto", environment)
    check_rendezvous("env://", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())})


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(*overrides: str) -> tuple[Any, list[list[Tensor]]]:
    """Return the wrapped model and the gradients of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    wrapped: Any = wrap_model(model, config(*overrides).device, torch.device("cpu"), 1, world_size=2)
    steps = []
    for _ in range(3):
        wrapped.zero_grad(set_to_none=True)
        wrapped(torch.rand(5, 4)).square().sum().backward()
        steps.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    return wrapped, steps


def test_wrap_ddp_gradients_are_bucket_views_by_default(single_rank_group: None) -> None:
    _, views = gradients()
    _, copies = gradients("device.bucket_view=false")
    assert all(grad._is_view() for grad in views[-1])
    assert not any(grad._is_view() for grad in copies[-1])
    assert len({grad.untyped_storage().data_ptr() for grad in views[-1]}) < len(views[-1])


@pytest.mark.skipif(torch.version.cuda is None, reason="DDP of a build without CUDA has no such hook")
def test_wrap_ddp_compress_rounds_gradients_to_bfloat16(single_rank_group: None) -> None:
    _, exact = gradients()
    _, rounded = gradients("device.compress=bf16")
    for a, b in zip(exact[-1], rounded[-1], strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.bfloat16().float(), b)


def test_wrap_ddp_refuses_compression_without_cuda_build(
    single_rank_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError) as caught:
        gradients("device.compress=bf16")
    assert [problem.location for problem in caught.value.problems] == ["device.compress"]
