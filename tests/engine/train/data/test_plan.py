"""The plan of a run's input: pipeline by free memory, dataset and augmentation, workers, and limits of the host."""

from __future__ import annotations

import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch

from engine.base import host
from engine.base.errors import UsageError
from engine.base.process import SignalHandler
from engine.config.loader import resolve_config
from engine.runs.control import RequestCounters
from engine.train.data import batch
from engine.train.data import plan as plan_module
from engine.train.data.plan import (
    InputPlan,
    choose_pipeline,
    loader_processes,
    plan_input,
    shm_shortage,
    uses_threads,
)
from engine.train.data.sampler import BatchRequest
from engine.train.data.sources.base import UnreadableImageError
from engine.train.data.sources.open import open_source
from engine.train.distributed.channel import Channel
from engine.train.distributed.node_plan import plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop import data, train
from engine.train.loop.job import Job
from support.data.photo_folder import AUGMENT_OVERRIDES, open_photo_folder, write_photo_folder
from support.gputrain_command import Gputrain
from support.messages import has_problem, raises_problem, says


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_photo_folder(tmp_path / "photos")


CHOICES = [
    ((), "memory", "the decoded images take 112 KiB"),
    (("augment.flip=true", "augment.erasing=0.3", "augment.resized_crop=true"), "memory", "take 112 KiB"),
    (("augment.policy=randaugment",), "stream", "augmentation runs per image"),
    (("augment.contrast=0.1",), "stream", "augmentation runs per image"),
    (("data.pipeline=memory", "augment.policy=randaugment"), "memory", "set by data.pipeline"),
    (("data.pipeline=stream",), "stream", "set by data.pipeline"),
    (("data.pipeline=fixed",), "fixed", "set by data.pipeline"),
    (("data.dataset=fake", "data.fake_train=1000000000"), "stream", r"take 2\.8 TiB, more than a quarter of the"),
]


@pytest.mark.parametrize(("overrides", "pipeline", "reason"), CHOICES)
def test_choose_pipeline_depends_on_dataset_and_augmentation(
    overrides: tuple[str, ...], pipeline: str, reason: str
) -> None:
    config = resolve_config(None, list(overrides)).config
    choice = choose_pipeline(config, open_source(config), 1)
    assert choice.pipeline == pipeline
    assert re.search(reason, choice.reason)


def test_choose_pipeline_keeps_folder_in_memory_unless_cropped_at_file_size(photos: Path) -> None:
    assert choose_pipeline(*open_photo_folder(photos), 1).pipeline == "memory"
    overrides = [*AUGMENT_OVERRIDES[1:3], "augment.resized_crop=true"]
    config = resolve_config(None, ["data.dataset=folder", f"data.path={photos}", *overrides]).config
    choice = choose_pipeline(config, open_source(config), 1)
    assert (choice.pipeline, choice.reason) == (
        "stream",
        "augment.resized_crop crops images at their original size",
    )


Usage = namedtuple("Usage", "available total")


def test_choose_pipeline_allows_quarter_of_free_memory_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUP_ROOT", Path("/nowhere"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Usage(4 * 300 * 1024, 1 << 30))
    config = resolve_config(None, []).config
    source = open_source(config)
    assert choose_pipeline(config, source, 2).pipeline == "memory"
    assert choose_pipeline(config, source, 3).reason == (
        "the decoded images take 337 KiB, more than a quarter of the 1.2 MiB of free memory"
    )
    memory_config = resolve_config(None, ["data.pipeline=memory"]).config
    values = (" 337 KiB", " 1.2 MiB ", "data.pipeline=stream", "data.image_size")
    with raises_problem("not-supported", "data.pipeline", *values):
        choose_pipeline(memory_config, source, 3)


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["data.dataset=my:data"], " my:data"),
        (["data.dataset=folder", "data.path=x", "augment.resized_crop=true"], " augment.resized_crop "),
        (["data.dataset=folder", "data.path=x", "data.size_schedule=[12@1,20@2]"], " data.size_schedule "),
    ],
)
def test_config_rejects_impossible_memory_pipeline(overrides: list[str], value: str) -> None:
    with raises_problem("conflict", "data.pipeline", value):
        resolve_config(None, ["data.pipeline=memory", *overrides])


@pytest.mark.parametrize(
    ("requested", "free", "expected"),
    [
        ("auto", (1 << 40, 0), ["memory", "memory"]),
        ("auto", (0, 1 << 40), ["stream", "stream"]),
        ("memory", (1 << 40, 0), ["memory", "memory"]),
        ("memory", (0, 1 << 40), ["refused", "refused"]),
    ],
)
def test_choose_pipeline_of_rank_0_applies_to_all_ranks(
    requested: str, free: tuple[int, int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PlannedError(Exception):
        pass

    def raise_plan(plan: InputPlan, *_: object, **__: object) -> None:
        raise PlannedError(plan.pipeline)

    # Stop each rank where it creates its input pipeline.
    monkeypatch.setattr(data, "InputPipeline", raise_plan)
    monkeypatch.setattr(host, "CGROUP_ROOT", Path("/nowhere"))
    config = resolve_config("digits", ["device.ranks=2", "device.gpus=cpu", f"data.pipeline={requested}"]).config
    job, store = Job(config, plan_node(config, []), None, False, open_source(config)), torch.distributed.HashStore()
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    threads, choices, messages = torch.get_num_threads(), list[str](), set[str]()
    for rank in (0, 1):
        monkeypatch.setattr(psutil, "virtual_memory", lambda rank=rank: Usage(free[rank], 1 << 40))
        try:
            train.train(job, RankInfo(rank, 2, rank, 2), store, channel)
        except PlannedError as chosen:
            choices.append(str(chosen))
        except UsageError as error:
            choices.append("refused")
            messages.add(str(error))
    torch.set_num_threads(threads)
    assert choices == expected
    assert len(messages) == (1 if "refused" in expected else 0)


def plan(*overrides: str, cores: int = 8) -> InputPlan:
    config = resolve_config("digits", list(overrides)).config
    first = BatchRequest("train", 1, np.arange(64))
    source = open_source(config)
    return plan_input(config, source, first, local_world_size=2, cores_per_rank=cores, uses_nccl=False)


def test_plan_warns_of_keys_without_effect_and_meaningless_results() -> None:
    planned = plan("data.workers=2")
    values = ("data.workers=2 ", f"({planned.reason})", "data.pipeline=stream")
    assert has_problem(planned.warnings, "no-effect", "", *values)
    assert planned.workers == 0
    assert plan("data.workers=0").warnings == plan().warnings == plan("data.workers=2", "data.pipeline=memory").warnings
    assert has_problem(plan("data.pipeline=fixed").warnings, "repeated-batch", "", "data.pipeline=fixed ")


def test_plan_has_requested_workers_only_for_a_stream() -> None:
    assert plan("data.pipeline=stream", "data.workers=3").workers == 3
    assert plan("data.pipeline=fixed", "data.workers=3").workers == 0


@dataclass
class SlowDataset:
    """Takes `seconds` per image on a clock that only it advances, and `first` more for the first request."""

    seconds: float
    first: float = 0.0
    num_loaded: int = 0
    now: ClassVar[float] = 0.0

    def __getitem__(self, request: BatchRequest) -> None:
        SlowDataset.now += len(request.indices) * self.seconds + (0 if self.num_loaded else self.first)
        self.num_loaded += len(request.indices)


@pytest.mark.parametrize(
    ("seconds", "cores", "workers"), [(0.000001, 8, 0), (0.0004, 8, 3), (0.0009, 8, 6), (0.01, 8, 8), (0.0004, 2, 2)]
)
def test_measured_workers_keep_up_with_short_steps(
    monkeypatch: pytest.MonkeyPatch, seconds: float, cores: int, workers: int
) -> None:
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: SlowDataset.now)
    monkeypatch.setattr(batch, "BatchDataset", lambda *_: SlowDataset(seconds, first=0.2))
    assert plan("data.pipeline=stream", cores=cores).workers == workers


def test_measurement_stops_early_on_slow_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: SlowDataset.now)
    slow = SlowDataset(0.02)
    request = BatchRequest("train", 1, np.arange(64))
    assert plan_module.measure_batch_seconds(slow, request) == pytest.approx(64 * 0.02)  # type: ignore[arg-type]
    assert slow.num_loaded < 10


def test_measured_workers_is_maximum_when_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UnreadableImageError("gone")

    monkeypatch.setattr(batch, "BatchDataset", fail)
    assert plan("data.pipeline=stream", cores=4).workers == 4


def test_measured_workers_restores_rng_state_and_threads() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    assert plan("augment.policy=trivialaugment", "data.channels=3").workers > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["data.dataset=folder", "data.path=photos"], True),
        (["data.dataset=folder", "data.path=photos", "data.worker_type=processes"], False),
        (["data.dataset=folder", "data.path=photos", "augment.hue=0.1"], False),
        (["data.dataset=folder", "data.path=photos", "augment.hue=0.1", "data.worker_type=threads"], True),
        (["data.dataset=digits"], False),
    ],
)
def test_threads_load_image_files_without_transforms_per_image(overrides: list[str], threads: bool) -> None:
    config = resolve_config(None, overrides).config
    assert uses_threads(config) == threads
    assert [loader_processes(config, workers) for workers in (1, 4, 5)] == ([1, 1, 2] if threads else [1, 4, 5])


def test_shared_memory_shortage_names_its_users_and_what_reduces_them() -> None:
    assert not [*shm_shortage(475 << 20, 0, 475 << 20)]
    values = ("/dev/shm ", " 475 MiB", "data.workers", "data.prefetch", "(docker run --shm-size=1g)")
    assert has_problem([*shm_shortage(475 << 20, 0, 64 << 20)], "shm-full", "", *values)
    both = [*shm_shortage(475 << 20, 137 << 20, 475 << 20)]
    assert has_problem(both, "shm-full", "", " 475 MiB ", " 612 MiB", "NCCL", "data.workers")
    nccl = [*shm_shortage(0, 137 << 20, 64 << 20)]
    assert has_problem(nccl, "shm-full", "", " 64 MiB ", " 137 MiB")
    assert "data." not in str(nccl[0]), "NCCL has no key that reduces it"


@pytest.mark.nightly
def test_dry_run_warns_about_shared_memory(gputrain: Gputrain) -> None:
    data = ["data.dataset=fake", "data.fake_train=128", "data.fake_val=64", "data.workers=2", "data.prefetch=128"]
    data += ["data.pipeline=stream"]
    script = 'mount -t tmpfs -o size=6m tmpfs /dev/shm && exec "$@"'
    done = gputrain.run_in_mount_namespace(script, "run", "--dry-run", "--epochs", "1", *data)
    assert done.returncode == 0, done.stderr
    assert says(done.stderr, "shm-full", "warning: /dev/shm ", " 6 MiB ", " 48.7 MiB")
