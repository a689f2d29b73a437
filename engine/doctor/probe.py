"""What only torch can tell of this machine: a helper process that imports torch once, and forks for all that touches
CUDA, because after that it could not be forked any more."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.config.schema import Config
from engine.distributed.failures import describe_cause, describe_failure, lost_peer, root_cause
from engine.runs.events import RankFailed
from engine.utils.exits import describe_exit
from engine.utils.helper_process import ParentPipe
from engine.utils.process import die_with_parent, exit_now

JsonObject = dict[str, Any]
FORK_CONTEXT = multiprocessing.get_context("fork")

ALL_REDUCE_BYTES = 64 << 20
ALL_REDUCE_ITERATIONS = {"nccl": 20, "gloo": 5}
WARMUP_ITERATIONS = 2
# So long the other ranks may take to tell of the fault that they saw.
PEER_FAILURE_GRACE_SECONDS = 1.0
FLOAT_BYTES = 4
PATTERN_PERIOD = 1024


def main(parent: ParentPipe) -> None:
    """The first request is the model of which the size is wanted: answers what torch is, and what CUDA shows it. Each
    further one names devices: answers the outcome of an all-reduce between them."""
    parent.send(torch_info(parent.receive()))
    parent.send(run_in_child(cuda_info))
    for request in parent:
        parent.send(all_reduce(request["devices"]))


def torch_info(model: JsonObject) -> JsonObject:
    """Versions, and what this build of torch can do. `errors` say what does not import."""
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
    try:
        answer["weights"] = _model_weight_bytes(model)
    except Exception as error:
        answer["errors"]["model"] = describe_cause(error)
    return answer


def _model_weight_bytes(model: JsonObject) -> int:
    """Bytes of a model's weights, without making them."""
    from engine.models.factory import build_model, weight_bytes
    from engine.models.meta_device import build_on_meta

    config = Config.model_validate(model["config"])
    return weight_bytes(build_on_meta(lambda: build_model(config, model["channels"], model["classes"], model["size"])))


def cuda_info() -> JsonObject:
    """The GPUs that torch can set up; `error` where it can set up none."""
    import torch

    if torch.version.cuda is None:
        return {"gpus": [], "kernels": []}
    try:
        torch.cuda.init()
    except Exception as error:
        return {"gpus": [], "kernels": [], "error": describe_cause(error)}
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [{"uuid": str(one.uuid), "name": one.name, "capability": [one.major, one.minor]} for one in properties]
    return {"gpus": gpus, "kernels": torch.cuda.get_arch_list()}


def run_in_child(function: Callable[[], JsonObject]) -> JsonObject:
    """The answer of a process of its own; `error` where it died over the question."""
    ours, theirs = FORK_CONTEXT.Pipe(duplex=False)
    process = FORK_CONTEXT.Process(target=_child_main, args=(theirs, function, os.getpid()))
    process.start()
    theirs.close()
    try:
        answer: JsonObject = ours.recv()
    except EOFError:
        process.join()
        return {"error": describe_exit(process.exitcode or 0)}
    process.join()
    return answer


def _child_main(pipe: Connection, function: Callable[[], JsonObject], parent: int) -> None:
    die_with_parent(parent)
    pipe.send(function())
    exit_now(0)


def all_reduce(devices: list[str]) -> JsonObject:
    """Sum 64 MiB over processes, one for each device: UUIDs, or "cpu" as often as there are to be processes. `right`
    tells whether the sum was, `seconds` is the median of some repeats; `error` is what the first rank failed of."""
    from torch.distributed import TCPStore

    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(one for one in devices if one != "cpu")
    pipes = [FORK_CONTEXT.Pipe() for _ in devices]
    ranks = [
        FORK_CONTEXT.Process(target=_rank_main, args=(pipes, rank, devices[rank] != "cpu", os.getpid()))
        for rank in range(len(devices))
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    # Only now: it has threads, which a fork would leave behind.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for mine, _ in pipes:
        with suppress(OSError):
            mine.send(store.port)
    try:
        return _collect_answers(devices, [mine for mine, _ in pipes], ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _collect_answers(devices: list[str], pipes: list[Connection], ranks: list[Any]) -> JsonObject:
    """Rank 0's answer when all have theirs, or the error that was the cause of the others."""
    answers: dict[int, JsonObject] = {}
    failures: list[RankFailed] = []
    while len(answers) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(left, PEER_FAILURE_GRACE_SECONDS if failures else None)
        if not ready:
            break
        for rank in (rank for rank, pipe in enumerate(pipes) if pipe in ready):
            try:
                answers[rank] = pipes[rank].recv()
            except EOFError:
                ranks[rank].join()
                answers[rank] = {"error": describe_exit(ranks[rank].exitcode or 0)}
            if "error" in answers[rank]:
                cause, lost = answers[rank]["error"], answers[rank].get("lost_peer", False)
                failures.append(RankFailed(rank=rank, device=devices[rank], cause=cause, lost_peer=lost))
    if failures:
        return {"error": describe_failure(root_cause(failures))}
    return answers[0] | {"right": all(answer["right"] for answer in answers.values())}


def _rank_main(pipes: list[tuple[Connection, Connection]], rank: int, on_gpu: bool, parent: int) -> None:
    die_with_parent(parent)
    pipe = pipes[rank][1]
    # A rank that dies must not seem alive by a copy of its end that is kept here.
    for end in (end for both in pipes for end in both if end is not pipe):
        end.close()
    try:
        pipe.send(_time_all_reduce(rank, len(pipes), pipe.recv(), "nccl" if on_gpu else "gloo"))
    except Exception as error:
        pipe.send({"error": describe_cause(error), "lost_peer": lost_peer(error)})
    # Until all have theirs: who leaves first may close a connection that another one is still setting up.
    pipe.poll(None)
    exit_now(0)


def _time_all_reduce(rank: int, world_size: int, port: int, backend: str) -> JsonObject:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
    # Small whole numbers, of which any sum is exact, and which are at no two places alike.
    pattern = torch.arange(ALL_REDUCE_BYTES // FLOAT_BYTES, device=device, dtype=torch.float32) % PATTERN_PERIOD
    values = pattern + rank
    dist.all_reduce(values)
    right = torch.equal(values, pattern * world_size + sum(range(world_size)))
    values.zero_()
    times = []
    for _ in range(WARMUP_ITERATIONS + ALL_REDUCE_ITERATIONS[backend]):
        dist.barrier()
        if backend == "nccl":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(values)
        if backend == "nccl":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    kept = sorted(times[WARMUP_ITERATIONS:])
    return {"right": right, "seconds": kept[len(kept) // 2], "bytes": ALL_REDUCE_BYTES}
