"""Memory: peak GPU memory, out-of-memory messages, and the search for the largest batch size."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.sources.builtin import open_fake
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from engine.distributed.failures import describe_failure, find_cause, oom_location, rank_failure
from engine.distributed.node_plan import plan_node
from engine.launch.batch_size import (
    MAX_MEMORY_SHARE,
    BatchSizeResult,
    ImageMetadata,
    find_batch_size,
    previous_batch_size,
)
from engine.launch.batch_size_process import (
    BatchSizeTrials,
    TrialOutcome,
    peak_rss_bytes,
    reset_peak_rss,
    search_batch_size,
    synthetic_source,
)
from engine.runs.folder import RunFolder
from engine.runs.records import RankPeakMemory
from engine.training.memory import empty_cache, gather_peak_memory, peak_memory, reset_peak_memory
from support.gputrain_command import Gputrain, read_events
from support.messages import has_problem, raises_problem
from support.replace import replace

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


def test_cause_of_gpu_oom_names_memory_of_other_processes() -> None:
    error = torch.OutOfMemoryError(OOM_MESSAGE.format(others="Process 77 has 9.00 GiB memory in use. "))
    assert "(79.1 of 79.2 GiB in use, 9.0 GiB of it by other processes)" in find_cause(error, config()).reason


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["precision.amp=fp16"], "64 images per rank: try data.batch_size=32 with optim.accumulate=2, or --batch"),
        (["optim.accumulate=4"], "data.batch_size=32 with optim.accumulate=8, precision.amp=bf16, or"),
        (["device.static_graph=true"], "try data.batch_size=32, precision.amp=bf16, or"),
        (
            ["device.parallel=dp"],
            "64 images per GPU: try data.batch_size=32 with optim.accumulate=2, precision.amp=fp16",
        ),
        (
            ["data.batch_size=1"],
            "with 1 image per rank: try precision.amp=bf16, or a smaller data.image_size or another",
        ),
    ],
)
def test_cause_of_gpu_oom_advises_only_unused_options(overrides: list[str], advice: str) -> None:
    assert advice in find_cause(torch.OutOfMemoryError(OOM_MESSAGE.format(others="")), config(*overrides)).reason


@pytest.mark.parametrize(
    "text",
    ["CUDA error: out of memory\nCUDA kernel errors might", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`"],
)
def test_cause_of_recognizes_all_gpu_oom_messages(text: str) -> None:
    assert has_problem([find_cause(RuntimeError(text), config())], "out-of-memory", "", "GPU", "64 images")


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


def test_out_of_memory_ignores_other_errors() -> None:
    for error in (RuntimeError("shapes cannot be multiplied"), ValueError("out of range"), OSError("No space left")):
        assert oom_location(error) is None


def test_peak_memory_on_cpu_is_empty_without_gather() -> None:
    cpu = torch.device("cpu")
    reset_peak_memory(cpu)
    empty_cache(cpu)
    assert peak_memory(cpu) == {}
    assert gather_peak_memory(cpu, dist.GroupMember.NON_GROUP_MEMBER) == []  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_peak_memory_on_gpu_reports_maximum() -> None:
    gpu = torch.device("cuda", 0)
    torch.zeros(1, device=gpu)
    reset_peak_memory(gpu)
    before = peak_memory(gpu)["allocated"]
    torch.zeros(64 << 20, dtype=torch.uint8, device=gpu)
    assert peak_memory(gpu)["allocated"] == before + (64 << 20)
    assert peak_memory(gpu)["reserved"] >= peak_memory(gpu)["allocated"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert gather_peak_memory(gpu, dist.group.WORLD) == [RankPeakMemory(0, **peak_memory(gpu))]  # type: ignore[arg-type]
    dist.destroy_process_group()
    empty_cache(gpu)
    reset_peak_memory(gpu)
    assert peak_memory(gpu)["reserved"] < 64 << 20


@pytest.mark.parametrize("max_fitting", [1, 2, 3, 7, 23, 31, 40, 100, 257, 1000, 1437, 5000])
def test_batch_size_search_ends_near_limit_with_few_trials(max_fitting: int) -> None:
    sizes: list[int] = []

    def trial(images: int) -> TrialOutcome:
        sizes.append(images)
        return "fits" if images <= max_fitting else "full"

    best = list(search_batch_size(trial, 10**6, "data"))[-1]
    assert best.limited_by == "memory"
    assert (
        best.batch_size <= max_fitting < best.batch_size + max(best.batch_size // 8, 8 if best.batch_size >= 32 else 1)
    )
    assert best.batch_size < 32 or best.batch_size % 8 == 0
    assert max(sizes) <= 2 * max_fitting
    assert len(sizes) <= 20


def test_batch_size_search_stops_at_data_and_time_limits() -> None:
    assert list(search_batch_size(lambda images: "fits", 719, "data"))[-1] == BatchSizeResult(719, "data")
    assert list(search_batch_size(lambda images: "fits", 1, "data"))[-1] == BatchSizeResult(1, "data")
    assert list(search_batch_size(lambda images: "slow" if images > 64 else "fits", 719, "data"))[
        -1
    ] == BatchSizeResult(64, "time")
    assert list(search_batch_size(lambda images: "slow", 719, "data"))[-1] == BatchSizeResult(2, "time")
    assert list(search_batch_size(lambda images: "full", 719, "data")) == []


@pytest.fixture
def batch_size_trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchSizeTrials]:
    """Trials with a budget of 60 MiB above this process's peak after a training step, and without a time limit."""
    monkeypatch.setattr("engine.launch.batch_size_process.MAX_CPU_STEP_SECONDS", float("inf"))
    cfg = config("device.ranks=1", "data.dataset=fake", "data.image_size=32", "model.name=cnn", "optim.name=adam")
    source = open_source(cfg)
    metadata = ImageMetadata(format=model_input_format(cfg, source), bytes=0, classes=10, train=10_000)
    plan, images = plan_node(cfg, []), synthetic_source(metadata)
    assert BatchSizeTrials(cfg, plan, images, 1 << 60)(2) == "fits"
    dist.destroy_process_group()
    reset_peak_rss()
    yield BatchSizeTrials(cfg, plan, images, int((peak_rss_bytes() + (60 << 20)) / MAX_MEMORY_SHARE))
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.nightly
def test_batch_size_trials_train_until_memory_share_is_used(batch_size_trials: BatchSizeTrials) -> None:
    best = list(search_batch_size(batch_size_trials, 4096, "time"))[-1]
    assert best.limited_by == "memory"
    # Two convolutions, their BatchNorms and activations keep about 0.8 MB per image for the backward pass.
    assert 8 <= best.batch_size <= 256
    assert batch_size_trials(best.batch_size // 2) == "fits"
    assert batch_size_trials(4 * best.batch_size) == "full"


@pytest.mark.nightly
def test_batch_size_trials_measure_batch_below_full_ones(
    batch_size_trials: BatchSizeTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_much = 1 << 50
    with monkeypatch.context() as full:
        full.setattr("engine.launch.batch_size_process.peak_rss_bytes", lambda: too_much)
        assert [batch_size_trials(2), batch_size_trials(4)] == ["full", "full"]
    assert batch_size_trials(3) == "fits"
    assert batch_size_trials(8) == "full"


@pytest.mark.nightly
def test_batch_size_trials_continue_after_real_oom(batch_size_trials: BatchSizeTrials) -> None:
    assert batch_size_trials(2) == "fits"
    assert batch_size_trials._step_seconds(1 << 50) is None
    assert batch_size_trials(4) == "fits"


def test_batch_size_search_starts_at_given_size() -> None:
    for max_fitting, best in ((100, 100), (70, 64), (40, 40), (5, 5)):
        sizes: list[int] = []

        def trial(images: int, max_fitting: int = max_fitting, sizes: list[int] = sizes) -> TrialOutcome:
            sizes.append(images)
            return "fits" if images <= max_fitting else "full"

        found = list(search_batch_size(trial, 1000, "data", 64))[-1]
        assert (sizes[0], found.limited_by) == (64, "memory")
        assert best - 8 < found.batch_size <= best


def test_batch_size_trials_of_several_ranks_use_ddp() -> None:
    cfg, plan = config("data.dataset=fake", "model.name=linear"), plan_node(config("device.ranks=2"), [])
    trials = BatchSizeTrials(cfg, replace(plan, local_world_size=1), open_fake(cfg.data, 0), 1 << 60, world_size=2)
    try:
        assert trials(2) == "fits"
        assert trials._state is not None
        assert isinstance(trials._state.parallel_model, DistributedDataParallel)
    finally:
        dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_batch_size_trials_compile_each_batch_size() -> None:
    cfg = config("data.dataset=fake", "data.image_size=4", "model.name=linear", "model.compile=true")
    trials = BatchSizeTrials(cfg, plan_node(cfg, []), open_fake(cfg.data, 0), 1 << 60)
    graphs = []
    try:
        for batch_size in (2, 3, 4):
            if batch_size == 3:
                trials.compile_model()
            torch._dynamo.utils.counters.clear()
            assert trials(batch_size) != "full"
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        dist.destroy_process_group()
    assert graphs[0] == 0 < graphs[1] == graphs[2]


@pytest.mark.nightly
def test_find_batch_reports_when_no_image_fits() -> None:
    cfg = config("device.ranks=2", "data.dataset=fake")
    with raises_problem("out-of-memory", "data.batch_size", "64 MiB", "data.image_size", "device.ranks", "model.name"):
        find_batch_size(cfg, plan_node(cfg, []), 2, open_source(cfg), memory_bytes=64 << 20)


def test_batch_before_reads_batch_size_of_resumed_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert previous_batch_size(folder) is None
    folder.config.write_text("data: {batch_size: auto}\n")
    assert previous_batch_size(folder) is None
    folder.config.write_text("data: {batch_size: 48}\n")
    assert previous_batch_size(folder) == 48


@pytest.mark.nightly
def test_run_with_auto_batch_size_saves_found_size(gputrain: Gputrain) -> None:
    fake = ["data.dataset=fake", "data.fake_train=90", "data.fake_val=8", "--model", "linear", "--epochs", "1"]
    done = gputrain("run", "--headless", *fake, "--ranks", "2", "--batch-size", "auto", "--name", "a")
    assert done.returncode == 0, done.stderr
    assert "data.batch_size auto: 45 images per rank, the whole training set in one step" in done.stderr
    assert yaml.safe_load((gputrain.runs / "a" / "config.yaml").read_text())["data"]["batch_size"] == 45
    assert read_events(gputrain.runs / "a")[0]["global_batch"] == 90


@pytest.mark.gpu
@pytest.mark.card  # memory for images of 224 x 224, and the speed to train on them
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_run_with_auto_batch_size_on_gpu_fills_memory(gputrain: Gputrain) -> None:
    del gputrain.environment["CUDA_VISIBLE_DEVICES"]
    fake = ["data.dataset=fake", "data.fake_train=200000", "data.image_size=224", "--model", "vgg16", "--dry-run"]
    done = gputrain("run", "--headless", *fake, "--gpus", "free:1", "--batch-size", "auto")
    assert done.returncode == 0, done.stderr
    assert "about the largest batch that fits into 90% of the free memory" in done.stderr
