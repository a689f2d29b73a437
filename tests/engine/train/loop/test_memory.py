"""Memory: peak GPU memory, out-of-memory messages, and the search for the largest batch size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

from engine.base.errors import UsageError
from engine.base.process import SignalHandler
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.jobs.launch.request import settle_config
from engine.runs.control import RequestCounters
from engine.runs.events import Event
from engine.runs.folder import RunFolder
from engine.train.data.sources.open import open_source
from engine.train.distributed.channel import Channel
from engine.train.distributed.failures import describe_failure, find_cause, rank_failure
from engine.train.distributed.node_plan import plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop import batch_size
from engine.train.loop.batch_size import BatchSizeTrials, largest_fitting
from engine.train.loop.job import Job
from engine.train.loop.trainer import Trainer
from support.gputrain_command import Gputrain, read_events
from support.messages import has_problem

# Message of torch 2.15.
OOM_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 156.75 MiB is "
    "free. {others}Including non-PyTorch memory, this process has 70.10 GiB memory in use. Of the allocated memory "
    "69.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
)


def config(*overrides: str) -> Config:
    return resolve_config(None, list(overrides)).config


def test_cause_of_gpu_oom_names_batch_and_advice() -> None:
    error = torch.OutOfMemoryError(OOM_MESSAGE.format(others=""))
    advised = ("data.batch_size=128 ", "optim.accumulate=2", "precision.amp=bf16", "--batch-size auto")
    cause = find_cause(error, config("data.batch_size=256"))
    assert has_problem([cause], "out-of-memory", "", "79.1 of 79.2 GiB", "256 images", *advised)


def fill_by_torch() -> None:
    torch.empty(1 << 50)


def fill_by_numpy() -> None:
    np.empty(1 << 50)


@pytest.mark.parametrize("fill", [fill_by_torch, fill_by_numpy])
def test_failure_of_host_oom_names_rank_batch_and_advice(fill: object) -> None:
    assert callable(fill)
    try:
        fill()
    except (RuntimeError, MemoryError) as error:
        failure = rank_failure(1, "cpu", error, config("device.ranks=2"))
    assert failure.code == "out-of-memory"
    message = describe_failure(failure)
    advised = ("data.batch_size=32 ", "optim.accumulate=2", "data.workers", "device.ranks", "--batch-size auto")
    assert all(value in message for value in ("rank 1 (cpu)", "64 images", *advised, "allocate"))


@pytest.mark.parametrize(("limit", "max_fitting"), [(10**6, 1), (10**6, 7), (10**6, 40), (10**6, 1437), (719, 10**6)])
def test_search_ends_near_the_largest_batch_that_fits(limit: int, max_fitting: int) -> None:
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= max_fitting

    best, largest = largest_fitting(fits, limit), min(limit, max_fitting)
    assert best <= largest < best + max(best // 8, 8 if best >= 32 else 1)
    assert best in (largest, best - best % 8) or best < 32
    assert max(sizes) <= 2 * largest and len(sizes) <= 20


def full_above(size: int) -> Callable[[Trainer], None]:
    """Return a stand-in for a training step that needs too much memory for larger batches."""

    def step(trainer: Trainer) -> None:
        if len(next(trainer.data.batches).labels) > size:
            raise torch.OutOfMemoryError(OOM_MESSAGE.format(others=""))

    return step


@pytest.fixture
def trials() -> Iterator[BatchSizeTrials]:
    cfg = config("data.dataset=fake", "model.name=linear", "optim.accumulate=2")
    job = Job(cfg, plan_node(config("device.ranks=2"), []), None, False, None)
    trials = BatchSizeTrials(job, RankInfo(1, 2, 1, 2), open_source(cfg))
    yield trials
    trials.end()


def test_trials_continue_after_memory_was_full(trials: BatchSizeTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "train_step", full_above(20))
    assert [trials.fits(size) for size in (16, 32, 20, 1)] == [True, False, True, True]


def test_trials_on_the_cpu_try_no_batch_that_takes_long(
    trials: BatchSizeTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "MAX_CPU_STEP_SECONDS", 0.0)
    assert [trials.fits(size) for size in (4, 2)] == [False, True]


def test_each_trial_takes_the_first_steps_of_the_run(trials: BatchSizeTrials) -> None:
    assert trials.fits(2) and trials.fits(4) and trials._trainer is not None
    assert trials._trainer.data.steps_seen() == batch_size.TRIAL_STEPS


@pytest.mark.parametrize(("fitting", "found"), [((24, 9), 9), ((24, 0), None)])
def test_smallest_batch_of_all_ranks_holds_for_all(
    monkeypatch: pytest.MonkeyPatch, fitting: tuple[int, int], found: int | None
) -> None:
    cfg = config("data.dataset=fake", "data.batch_size=auto")
    job, store, source = (
        Job(cfg, plan_node(config("device.ranks=2"), []), None, False, None),
        dist.HashStore(),
        open_source(cfg),
    )
    results, events = dict[int, int | str](), list[Event]()

    def run_rank(rank: int) -> None:
        rank_info = RankInfo(rank, 2, rank, 2)
        channel = Channel(events.append, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(2), rank))
        try:
            resolved = batch_size.with_largest_batch_size(job, rank_info, store, channel, source)
            results[rank] = resolved.config.data.numeric_batch_size
        except UsageError as error:
            results[rank] = error.problems[0].code

    monkeypatch.setattr(BatchSizeTrials, "fits", lambda trials, size: size <= fitting[trials._local_rank])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_rank, range(2)))
    assert results == dict.fromkeys((0, 1), "out-of-memory" if found is None else found)
    assert len(events) == (found is not None)


def test_resumed_job_has_the_batch_size_of_its_run(tmp_path: Path) -> None:
    cfg, folder = config("data.batch_size=auto"), RunFolder(tmp_path)
    for stored in (None, "auto", 48):
        if stored is not None:
            folder.config.write_text(f"data: {{batch_size: {stored}}}\n")
        settled = settle_config(cfg, folder, None, is_resumed=True)
        assert settled.used.data.batch_size == settled.stored.data.batch_size == (stored or "auto")


@pytest.mark.nightly
def test_run_with_auto_batch_size_saves_found_size(gputrain: Gputrain) -> None:
    fake = ["data.dataset=fake", "data.fake_train=90", "data.fake_val=8", "--model", "linear", "--epochs", "1"]
    done = gputrain("run", "--headless", *fake, "--ranks", "2", "--batch-size", "auto", "--name", "a")
    assert done.returncode == 0, done.stderr
    assert "data.batch_size auto: 45 images per rank, the whole training set in one step" in done.stderr
    assert yaml.safe_load((gputrain.runs / "a" / "config.yaml").read_text())["data"]["batch_size"] == 45
    assert [event["global_batch"] for event in read_events(gputrain.runs / "a") if "global_batch" in event] == [90]


def test_trials_of_several_ranks_use_ddp_and_leave_the_process_as_it_was(trials: BatchSizeTrials) -> None:
    environ = dict(os.environ)
    assert trials.fits(2)
    assert trials._trainer is not None and isinstance(trials._trainer.model.parallel, DistributedDataParallel)
    trials.end()
    assert dict(os.environ) == environ and not dist.is_initialized()
