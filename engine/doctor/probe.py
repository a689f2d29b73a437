"""The helper process of `gputrain doctor` that imports torch: versions, CUDA, the model of a run, and an all-reduce.

It imports torch once and forks a child for everything that initializes CUDA, which does not survive a fork."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from engine.config.schema import Config
from engine.distributed.failures import describe_cause, describe_failure, find_cause, lost_peer, root_cause
from engine.distributed.interfaces import loopback_variables
from engine.distributed.node_plan import gpu_backend
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import create_store_file, open_local_store
from engine.runs.events import RankFailed
from engine.utils.exits import describe_exit
from engine.utils.helper_process import ParentPipe
from engine.utils.process import die_with_parent, exit_now

if TYPE_CHECKING:
    from torch.distributed import Store

JsonObject = dict[str, Any]
FORK_CONTEXT = multiprocessing.get_context("fork")

TIMEOUT_SECONDS = 300.0  # of rendezvous and collectives
ALL_REDUCE_BYTES = 64 << 20
ALL_REDUCE_ITERATIONS, ALL_REDUCE_ITERATIONS_ON_CPU = 20, 5
WARMUP_ITERATIONS = 2
PEER_FAILURE_GRACE_SECONDS = 1.0  # for the other ranks to report after the first failure
FLOAT_BYTES = 4
PATTERN_PERIOD = 1024


def main(parent: ParentPipe) -> None:
    """Send the versions of torch and its GPUs, then answer requests to check a model or to run an all-reduce."""
    parent.send(torch_info())
    parent.send(run_in_child(cuda_info))
    for request in parent.requests(JsonObject):
        if "config" in request:
            parent.send(run_in_child(partial(check_model, request)))
        else:
            parent.send(all_reduce(request["devices"]))


def torch_info() -> JsonObject:
    """Return the versions and backends of this build of torch; `errors` by library if an import fails."""
    answer: JsonObject = {"errors": {}}
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return {"errors": {"torch": describe_cause(error)}}
    answer |= {"torch": torch.__version__, "cuda": torch.version.cuda, "gloo": dist.is_available(), "nccl": None}
    if dist.is_available():
        answer["gloo"] = dist.is_gloo_available()
        if torch.version.cuda and dist.is_nccl_available():
            answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        import torchvision

        answer["torchvision"] = torchvision.__version__
    except Exception as error:
        answer["errors"]["torchvision"] = describe_cause(error)
    return answer


def cuda_info() -> JsonObject:
    """Return the GPUs that torch can initialize, or an `error`."""
    import torch

    if torch.version.cuda is None:
        return {"gpus": [], "kernels": []}
    try:
        torch.cuda.init()
    except Exception as error:
        return {"gpus": [], "kernels": [], "error": describe_cause(error)}
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [{"uuid": str(gpu.uuid), "name": gpu.name, "capability": [gpu.major, gpu.minor]} for gpu in properties]
    return {"gpus": gpus, "kernels": torch.cuda.get_arch_list()}


def check_model(request: JsonObject) -> JsonObject:
    from engine.launch import model_check

    return model_check.check_model(Config.model_validate(request["config"]), on_gpu=request["on_gpu"])


def run_in_child(function: Callable[[], JsonObject]) -> JsonObject:
    """Return the answer of a forked child, or an `error` if it died."""
    ours, theirs = FORK_CONTEXT.Pipe(duplex=False)
    process = FORK_CONTEXT.Process(target=_child_main, args=(theirs, function, os.getpid()))
    process.start()
    theirs.close()
    try:
        answer: JsonObject = ours.recv()
    except EOFError:
        process.join()
        return {"error": str(describe_exit(process.exitcode or 0))}
    process.join()
    return answer


def _child_main(pipe: Connection, function: Callable[[], JsonObject], parent: int) -> None:
    die_with_parent(parent)
    pipe.send(function())
    exit_now(0)


def all_reduce(devices: list[str]) -> JsonObject:
    """Time an all-reduce of 64 MiB between processes, one per device: UUIDs, or "cpu" once per process.

    Return `right`, whether the sum is correct, and `seconds`, the median of the repetitions; or the first `error`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device for device in devices if device != "cpu")
    pipes, store_fd = [FORK_CONTEXT.Pipe() for _ in devices], create_store_file()
    ranks = [
        FORK_CONTEXT.Process(target=_rank_main, args=(pipes, store_fd, rank, devices[rank] != "cpu", os.getpid()))
        for rank in range(len(devices))
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    os.close(store_fd)
    try:
        return _collect_answers(devices, [mine for mine, _ in pipes], ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _collect_answers(devices: list[str], pipes: list[Connection], ranks: list[Any]) -> JsonObject:
    """Return the answer of rank 0 once all ranks have answered, or the error that caused the others."""
    answers: dict[int, JsonObject] = {}
    failures: list[RankFailed] = []
    while len(answers) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(pending, PEER_FAILURE_GRACE_SECONDS if failures else None)
        if not ready:
            break
        for rank in (rank for rank, pipe in enumerate(pipes) if pipe in ready):
            try:
                answers[rank] = pipes[rank].recv()
            except EOFError:
                ranks[rank].join()
                problem = describe_exit(ranks[rank].exitcode or 0)
                answers[rank] = {"cause": str(problem), "code": problem.code, "lost_peer": False}
            if "cause" in answers[rank]:
                failures.append(RankFailed(rank=rank, device=devices[rank], **answers[rank]))
    if failures:
        return {"error": describe_failure(root_cause(failures))}
    return answers[0] | {"right": all(answer["right"] for answer in answers.values())}


def _rank_main(pipes: list[tuple[Connection, Connection]], store_fd: int, rank: int, on_gpu: bool, parent: int) -> None:
    die_with_parent(parent)
    pipe = pipes[rank][1]
    # The parent reads EOF only when every copy of the rank's end is closed.
    for end in (end for both in pipes for end in both if end is not pipe):
        end.close()
    try:
        store = open_local_store(store_fd, TIMEOUT_SECONDS)
        pipe.send(_time_all_reduce(store, RankInfo(rank, len(pipes), rank, len(pipes)), on_gpu=on_gpu))
    except Exception as error:
        cause = find_cause(error)
        pipe.send({"cause": cause.reason, "code": cause.code, "lost_peer": lost_peer(error)})
    # Wait for the parent to close the pipe: exiting early could break a connection that another rank still sets up.
    pipe.poll(None)
    exit_now(0)


def _time_all_reduce(store: Store, rank_info: RankInfo, *, on_gpu: bool) -> JsonObject:
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
    return {"right": right, "seconds": kept[len(kept) // 2], "bytes": ALL_REDUCE_BYTES}
