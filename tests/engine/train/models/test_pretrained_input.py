"""The input transform of pretrained weights as defaults of the input keys."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.data_sections import DataConfig
from engine.config.schema import Config
from engine.config.training_sections import ModelConfig
from engine.train.data.sources.base import ItemFormat
from engine.train.data.sources.open import expected_input_format
from engine.train.models.pretrained_input import (
    PretrainedInput,
    describe_pretrained_input,
    find_pretrained_input,
    with_pretrained_input,
)

RESNET50 = PretrainedInput(
    weights="ResNet50_Weights.IMAGENET1K_V2",
    image_size=224,
    val_crop=224,
    val_resize=232,
    crop_ratio=224 / 232,
    fit="crop",
    interpolation="bilinear",
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
NFNET = PretrainedInput(
    weights="dm_nfnet_f0.dm_in1k",
    image_size=192,
    val_crop=256,
    val_resize=284,
    crop_ratio=0.9,
    fit="squash",
    interpolation="bicubic",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def filled(pretrained: PretrainedInput, items: ItemFormat | None = None, **data: Any) -> Config:
    config = Config(data=DataConfig(**{"dataset": "folder", "path": "/photos"} | data))
    once = with_pretrained_input(config, pretrained, items)
    assert with_pretrained_input(once, pretrained, items) == once
    return once


@pytest.mark.parametrize(
    ("pretrained", "data", "expected"),
    [
        (RESNET50, {}, "train 224, evaluate resize 232 crop 224 bilinear"),
        (NFNET, {}, "train 192, evaluate resize 284 crop 256 bicubic squash"),
        (RESNET50, {"image_size": 160}, "train 160, evaluate resize 165 crop 160 bilinear"),
        (RESNET50, {"val_crop": 288}, "train 224, evaluate resize 298 crop 288 bilinear"),
        (RESNET50, {"val_resize": 256}, "train 224, evaluate resize 256 crop 224 bilinear"),
        (RESNET50, {"interpolation": "lanczos"}, "train 224, evaluate resize 232 crop 224 lanczos"),
        (RESNET50, {"fit": "squash"}, "train 224, evaluate 224 bilinear squash"),
        (NFNET, {"fit": "crop", "val_crop": 224}, "train 192, evaluate 224 bicubic"),
        (RESNET50, {"dataset": "digits", "path": None}, "train 8, evaluate 8 bilinear"),
        (RESNET50, {"dataset": "cifar10"}, "train 32, evaluate 32 bilinear"),
        (RESNET50, {"dataset": "cifar10", "image_size": 64}, "train 64, evaluate 64 bilinear"),
    ],
)
def test_weights_supply_sizes_that_are_not_set(
    pretrained: PretrainedInput, data: dict[str, Any], expected: str
) -> None:
    assert expected_input_format(filled(pretrained, **data)).describe() == expected


def test_weights_supply_normalization_that_is_not_set() -> None:
    assert filled(RESNET50).data.mean == RESNET50.mean
    assert filled(RESNET50, dataset="digits", path=None).data.std == pytest.approx((0.226,))
    assert filled(RESNET50, dataset="digits", path=None, channels=3).data.mean == RESNET50.mean
    data = filled(NFNET, channels=1, mean=(0.1,)).data
    assert (data.mean, data.std) == ((0.1,), (0.5,))


def test_user_dataset_of_square_items_keeps_their_size_and_channels() -> None:
    gray = filled(NFNET, ItemFormat(32, 1), dataset="photos:Dataset").data
    assert (gray.image_size, gray.val_crop, gray.val_resize, gray.mean) == (None, None, None, (0.5,))
    photos = filled(NFNET, ItemFormat(None, 3), dataset="photos:Dataset").data
    assert (photos.image_size, photos.val_crop, photos.val_resize, photos.fit) == (192, 256, 284, "squash")


@pytest.mark.parametrize(
    "model",
    [
        {"name": "resnet50"},
        {"name": "resnet50", "weights": "/tmp/file.pt"},
        {"name": "cnn", "weights": "pretrained"},
        {"name": "mine:build", "weights": "pretrained"},
    ],
)
def test_models_without_pretrained_weights_of_a_library_have_no_input(model: dict[str, str]) -> None:
    assert find_pretrained_input(ModelConfig(**model)) is None  # type: ignore[arg-type]


def test_description_says_which_values_are_those_of_the_weights() -> None:
    assert describe_pretrained_input(filled(RESNET50), RESNET50) == "mean/std of ResNet50_Weights.IMAGENET1K_V2"
    assert describe_pretrained_input(filled(NFNET, mean=(0.1, 0.2, 0.3), val_crop=192), NFNET) == (
        "not the mean/std of dm_nfnet_f0.dm_in1k, whose own input is "
        "train 192, evaluate resize 284 crop 256 bicubic squash"
    )
    assert describe_pretrained_input(filled(RESNET50), None) == ""
