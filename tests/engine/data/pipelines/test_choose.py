"""Choice of the input pipeline by free memory, dataset and augmentation, identical on all ranks."""

from __future__ import annotations

import re
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from engine.config.loader import resolve_config
from engine.data.pipelines.choose import choose_pipeline, pipeline_problems
from engine.data.sources.open import open_source
from engine.utils import host
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
