"""`data.size_schedule`: only the size of the training images depends on the epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.loader import resolve_config
from engine.train.data.batch import DeviceBatch
from engine.train.data.device import InputPipeline
from engine.train.data.plan import InputPlan, choose_pipeline
from engine.train.data.sampler import BatchRequest, DistributedBatchSampler
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from support.data.device_batches import CPU, assert_the_same, batches
from support.data.photo_folder import AUGMENT_OVERRIDES, write_photo_folder
from support.messages import raises_problem

pytestmark = pytest.mark.usefixtures("cache")
TWO_SIZES = "data.size_schedule=[12@1,20@2]"
SMALL = DistributedBatchSampler(48, 20, 16, 0, 1, True, 0)


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("160", "invalid-value", ["160 "]),
        ("160@0", "invalid-value", ["'160@0'"]),
        ("0@1", "invalid-value", ["'0@1'"]),
        ("{1: 160}", "invalid-value", ["{1: 160}"]),
        ("160@2", "invalid-value", [" 160@1, ", " 2"]),
        ("[16@1, 24@3, 32@3]", "invalid-value", []),
        ("16@1,24@9", "conflict", [" 9 ", "run.epochs is 8; "]),
    ],
)
def test_size_schedule_rejects_malformed_schedules(text: str, code: str, values: list[str]) -> None:
    with raises_problem(code, "data.size_schedule", *values):
        resolve_config(None, ["run.epochs=8", f"data.size_schedule={text}"])


@pytest.mark.parametrize(
    ("overrides", "described"),
    [
        ([], "train 12 to 20 (12@1, 20@2), evaluate 20 bilinear"),
        (["data.image_size=16"], "train 12 to 20 (12@1, 20@2), evaluate 16 bilinear"),
        (
            ["data.val_crop=24", "data.val_resize=28"],
            "train 12 to 20 (12@1, 20@2), evaluate resize 28 crop 24 bilinear",
        ),
    ],
)
def test_size_schedule_does_not_change_evaluation_size(overrides: list[str], described: str) -> None:
    config = resolve_config(None, [TWO_SIZES, *overrides]).config
    image_format = model_input_format(config, open_source(config))
    assert image_format.describe() == described
    assert [image_format.at_epoch(epoch).size for epoch in (1, 2, 3, 99)] == [12, 20, 20, 20]
    assert {image_format.at_epoch(epoch).val_size for epoch in (1, 2)} == {image_format.val_size}


@pytest.mark.parametrize(
    "overrides",
    [[], ["data.channels=3"], ["data.dataset=fake", "data.fake_train=48"]],
)
def test_memory_pipeline_resizes_each_epoch_like_stream(overrides: list[str]) -> None:
    config = resolve_config(None, [*AUGMENT_OVERRIDES, TWO_SIZES, *overrides]).config
    source = open_source(config)
    assert_the_same(batches("memory", config, source, SMALL), batches("stream", config, source, SMALL))


def test_epoch_of_size_schedule_equals_run_of_that_size() -> None:
    def second_epoch(size: str) -> list[DeviceBatch]:
        config = resolve_config(None, ["augment.resized_crop=true", "augment.erasing=0.7", size]).config
        return batches("stream", config, open_source(config), SMALL)[5:8]

    assert_the_same(second_epoch(TWO_SIZES), second_epoch("data.image_size=20"))


def test_folder_decodes_each_epoch_at_its_size(tmp_path: Path) -> None:
    overrides = [
        "data.dataset=folder",
        f"data.path={write_photo_folder(tmp_path / 'photos')}",
        "data.mean=[0,0,0]",
        "data.std=[1,1,1]",
    ]
    config = resolve_config(None, [*overrides, TWO_SIZES]).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    requests = [BatchRequest("train", epoch, np.arange(3)) for epoch in (1, 2)]
    loader = InputPipeline(InputPlan("stream", ""), source, config, image_format, requests).device_loader(CPU)
    for size in (12, 20):
        plain = resolve_config(None, [*overrides, f"data.image_size={size}"]).config
        preprocessing = model_input_format(plain, source).preprocessing(training=True)
        expected = source.load("train", np.arange(3), preprocessing)[0]
        assert torch.equal(next(loader).images.mul(255).round().byte(), torch.from_numpy(expected))


def test_folder_streams_with_size_schedule(tmp_path: Path) -> None:
    overrides = ["data.dataset=folder", f"data.path={write_photo_folder(tmp_path / 'photos')}", TWO_SIZES]
    config = resolve_config(None, overrides).config
    choice = choose_pipeline(config, open_source(config), 1)
    assert choice == InputPlan("stream", "data.size_schedule resizes images from their original size")
