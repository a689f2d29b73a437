"""The helper process of `gputrain doctor` that imports torch: versions, CUDA and an all-reduce.

It imports torch once and forks a child for everything that initializes CUDA, which does not survive a fork."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from engine.distributed.failures import describe_failure, find_cause
from engine.distributed.interfaces import loopback_variables
from engine.distributed.node_plan import gpu_backend
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import create_store_file, open_local_store
from engine.doctor.software import AllReduceRequest, AllReduceResult, CudaGpu, CudaInfo, TorchInfo
from engine.runs.events import RankFailed
from engine.utils.codec import replace
from engine.utils.errors import Problem
from engine.utils.exits import describe_exit
from engine.utils.helper_process import ParentPipe
from engine.utils.process import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store

FORK_CONTEXT = multiprocessing.get_context("fork")

TIMEOUT_SECONDS = 300.0  # of rendezvous and collectives
ALL_REDUCE_BYTES = 64 << 20
ALL_REDUCE_ITERATIONS, ALL_REDUCE_ITERATIONS_ON_CPU = 20, 5
WARMUP_ITERATIONS = 2
FLOAT_BYTES = 4
PATTERN_PERIOD = 1024


def main(parent: ParentPipe) -> None:
    """Send the versions of torch and its GPUs, then answer requests to run an all-reduce."""
    parent.send(torch_info())
    parent.send(_cuda_info_of_child())
    for request in parent.requests(AllReduceRequest):
        parent.send(all_reduce(request.devices))


def torch_info() -> TorchInfo:
    """Return the versions and backends of this build of torch, or why its import fails."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return TorchInfo(errors={"torch": find_cause(error).reason})
    has_nccl = dist.is_available() and torch.version.cuda and dist.is_nccl_available()
    info = TorchInfo(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gloo=dist.is_available() and dist.is_gloo_available(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    )
    try:
        import torchvision
    except Exception as error:
        return replace(info, errors={"torchvision": find_cause(error).reason})
    return replace(info, torchvision=torchvision.__version__)


def cuda_info() -> CudaInfo:
    import torch

    if torch.version.cuda is None:
        return CudaInfo()
    try:
        torch.cuda.init()
    except Exception as error:
        return CudaInfo(error=find_cause(error).reason)
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [CudaGpu(uuid=str(gpu.uuid), name=gpu.name, capability=(gpu.major, gpu.minor)) for gpu in properties]
    return CudaInfo(gpus=tuple(gpus), kernels=tuple(torch.cuda.get_arch_list()))


def _cuda_info_of_child() -> CudaInfo:
    with ProcessPoolExecutor(1, FORK_CONTEXT, die_with_parent, (os.getpid(),)) as pool:
        try:
            return pool.submit(cuda_info).result()
        except BrokenProcessPool:
            return CudaInfo(error="the process that initialized CUDA was killed")


def all_reduce(devices: list[str]) -> AllReduceResult:
    """Time an all-reduce of 64 MiB between processes, one per device: UUIDs, or "cpu" once per process.

    Returns the answer of a rank once all have answered, or the first error. Ranks that still wait for the others end
    with this process.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device for device in devices if device != "cpu")
    store_fd, count = create_store_file(), len(devices)
    # A pool per rank: that of several does not tell which rank was killed.
    pools = [ProcessPoolExecutor(1, FORK_CONTEXT, die_with_parent, (os.getpid(),)) for _ in devices]
    ranks = {pools[rank].submit(_run_rank, store_fd, rank, count, device): rank for rank, device in enumerate(devices)}
    answers = []
    for future in as_completed(ranks):
        rank = ranks[future]
        try:
            answers.append(future.result())
        except BrokenProcessPool:
            cause = _describe_broken(pools[rank])
            failed = RankFailed(rank=rank, device=devices[rank], cause=str(cause), code=cause.code)
            return AllReduceResult(error=describe_failure(failed))
        if answers[-1].error is not None:
            return answers[-1]
    return replace(answers[0], right=all(answer.right for answer in answers))


def _describe_broken(pool: ProcessPoolExecutor) -> Problem:
    """Return how the only process of a pool ended."""
    [process] = pool._processes.values()
    # Waits until the process is reaped.
    pool.shutdown()
    return describe_exit(process.exitcode or 0)


def _run_rank(store_fd: int, rank: int, count: int, device: str) -> AllReduceResult:
    try:
        store = open_local_store(store_fd, TIMEOUT_SECONDS)
        return _time_all_reduce(store, RankInfo(rank, count, rank, count), on_gpu=device != "cpu")
    except Exception as error:
        cause = find_cause(error)
        failed = RankFailed(rank=rank, device=device, cause=cause.reason, code=cause.code)
        return AllReduceResult(error=describe_failure(failed))


def _time_all_reduce(store: Store, rank_info: RankInfo, *, on_gpu: bool) -> AllReduceResult:
    import torch
    import torch.distributed as dist

    from engine.distributed.process_group import init_default_group

    rank, world_size = rank_info.rank, rank_info.world_size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ.update(loopback_variables(os.environ))
    init_default_group(gpu_backend(os.environ) if on_gpu else "gloo", device, rank_info, store, TIMEOUT_SECONDS)
    # Small integers, whose sums are exact in float32, and a pattern that reveals misplaced chunks.
    pattern = torch.arange(ALL_REDUCE_BYTES // FLOAT_BYTES, device=device, dtype=torch.float32) % PATTERN_PERIOD
    values = pattern + rank
    dist.all_reduce(values)
    right = torch.equal(values, pattern * world_size + sum(range(world_size)))
    values.zero_()
    times = []
    for _ in range(WARMUP_ITERATIONS + (ALL_REDUCE_ITERATIONS if on_gpu else ALL_REDUCE_ITERATIONS_ON_CPU)):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    kept = sorted(times[WARMUP_ITERATIONS:])
    return AllReduceResult(right=right, seconds=kept[len(kept) // 2], size_bytes=ALL_REDUCE_BYTES)
