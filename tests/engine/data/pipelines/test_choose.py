"""Choice of the input pipeline by free memory, dataset and augmentation, identical on all ranks."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

from engine.config.loader import resolve_config
from engine.data.pipelines.choose import PipelineChoice, choose_pipeline, pipeline_problems, pipeline_warnings
from engine.data.sources.open import open_source
from engine.distributed.channel import Channel
from engine.distributed.node_plan import plan_node
from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.runs.control import RequestCounters
from engine.training import train
from engine.training.job import Job
from engine.utils import host
from engine.utils.errors import UsageError
from engine.utils.process import SignalHandler
from support.data.photo_folder import AUGMENT_OVERRIDES, open_photo_folder, write_photo_folder
from support.messages import has_problem, raises_problem


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
    assert has_problem(pipeline_problems(memory_config, source, 3), "not-supported", "data.pipeline", *values)
    with raises_problem("not-supported", "data.pipeline", *values):
        choose_pipeline(memory_config, source, 3)
    assert pipeline_problems(config, source, 3) == []


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["data.dataset=my:data"], " my:data"),
        (["data.dataset=folder", "data.path=x", "augment.resized_crop=true"], " augment.resized_crop "),
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
    class ChosenError(Exception):
        pass

    def raise_choice(choice: PipelineChoice, *_: object, **__: object) -> None:
        raise ChosenError(choice.pipeline)

    # Stop each rank where it creates its input pipeline.
    monkeypatch.setattr(train, "InputPipeline", raise_choice)
    monkeypatch.setattr(host, "CGROUP_ROOT", Path("/nowhere"))
    config = resolve_config("digits", ["device.ranks=2", "device.gpus=cpu", f"data.pipeline={requested}"]).config
    job, store = Job(config, plan_node(config, []), None, False, open_source(config)), torch.distributed.HashStore()
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    threads, choices, messages = torch.get_num_threads(), list[str](), set[str]()
    for rank in (0, 1):
        monkeypatch.setattr(psutil, "virtual_memory", lambda rank=rank: Usage(free[rank], 1 << 40))
        try:
            train.train(job, RankInfo(rank, 2, rank, 2), store, channel)
        except ChosenError as chosen:
            choices.append(str(chosen))
        except UsageError as error:
            choices.append("refused")
            messages.add(str(error))
    torch.set_num_threads(threads)
    assert choices == expected
    assert len(messages) == (1 if "refused" in expected else 0)


def test_pipeline_warnings_name_unused_keys() -> None:
    in_memory = PipelineChoice("memory", "the decoded images take 18 KiB")
    [warning] = pipeline_warnings(resolve_config("digits", ["data.workers=2"]).config, in_memory)
    assert has_problem([warning], "no-effect", "", "data.workers=2 ", f"({in_memory.reason})", "data.pipeline=stream")
    memory = resolve_config("digits", ["data.workers=2", "data.pipeline=memory"])
    assert pipeline_warnings(memory.config, in_memory) == []
    assert [key for key, _ in memory.no_effect] == ["data.workers"]
    assert pipeline_warnings(resolve_config("digits", ["data.workers=0"]).config, in_memory) == []
    assert pipeline_warnings(resolve_config("digits", []).config, in_memory) == []
    fixed = resolve_config("digits", ["data.pipeline=fixed"]).config
    [warning] = pipeline_warnings(fixed, PipelineChoice("fixed", "set by data.pipeline"))
    assert has_problem([warning], "repeated-batch", "", "data.pipeline=fixed ")
