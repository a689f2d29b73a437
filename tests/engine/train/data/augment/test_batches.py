"""CPU batches: equality for any number of DataLoader workers, and the batch transforms against torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from engine.config.loader import resolve_config
from engine.train.data.augment.augmentation import apply_batch_params
from engine.train.data.augment.batch_ops import convert_to_format, normalize, pad_and_crop
from engine.train.data.sampler import DistributedBatchSampler, epoch_permutation
from engine.train.data.sources.base import ImageFormat
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.data.stream import BatchLoader

# Everything that draws random numbers, except the crop.
RANDOM_OVERRIDES = ["augment.flip=true", "augment.policy=randaugment", "augment.brightness=0.4", "augment.contrast=0.4"]
RANDOM_OVERRIDES += ["augment.vertical_flip=true", "augment.rotation=20", "augment.grayscale=0.2", "augment.blur=0.3"]
RANDOM_OVERRIDES += [
    "augment.policy_magnitude_std=1.5",
    "augment.hue=0.1",
    "augment.erasing=0.5",
    "data.channels=3",
    "data.batch_size=16",
]


@pytest.mark.parametrize("crop", ["augment.crop_padding=2", "augment.resized_crop=true"])
def test_batches_vary_by_epoch_only_for_training(crop: str) -> None:
    config = resolve_config(None, [*RANDOM_OVERRIDES, crop]).config
    source, sampler = open_source(config), DistributedBatchSampler(96, 37, 16, 0, 1, True, config.run.seed)
    image_format = model_input_format(config, source)
    images = [
        batch.images if batch.augment_params is None else apply_batch_params(batch.images, batch.augment_params)
        for batch in BatchLoader(source, config, image_format, sampler.requests(2), 0)
    ]
    plain = convert_to_format(torch.from_numpy(source.load("val", np.arange(37))[0]), image_format)
    for first in (6, 15):
        assert torch.equal(torch.cat(images[first : first + 3]), plain)
    epochs = [torch.cat(images[first : first + 6]).flatten(1) for first in (0, 9)]
    orders = [np.argsort(epoch_permutation(96, config.run.seed, epoch)) for epoch in (1, 2)]
    same = (epochs[0][orders[0]] == epochs[1][orders[1]]).all(1)
    assert same.float().mean() < 0.05


def test_pad_and_crop_returns_window_of_padded_image() -> None:
    images = torch.randint(0, 256, (3, 2, 5, 5), dtype=torch.uint8)
    cropped = pad_and_crop(images, 2, torch.tensor([[0, 4], [2, 2], [4, 1]]))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for row, (top, left) in enumerate([(0, 4), (2, 2), (4, 1)]):
        assert torch.equal(cropped[row], padded[row, :, top : top + 5, left : left + 5])
    assert torch.equal(cropped[1], images[1])


def test_normalize_matches_torchvision() -> None:
    images = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    expected = reference.normalize(reference.to_dtype(images, torch.float32, scale=True), mean.tolist(), std.tolist())
    torch.testing.assert_close(normalize(images, mean.view(1, 3, 1, 1), std.view(1, 3, 1, 1)), expected)


def test_convert_to_format_converts_channels() -> None:
    gray = torch.full((1, 1, 4, 4), 77, dtype=torch.uint8)
    assert torch.equal(convert_to_format(gray, ImageFormat(4, 3, (0.5,), (0.5,))), gray.expand(1, 3, 4, 4))
    color = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    converted = convert_to_format(color, ImageFormat(4, 1, (0.5,), (0.5,)))
    assert (converted.int() - reference.rgb_to_grayscale(color).int()).abs().max() <= 1
