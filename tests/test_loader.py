"""Batches: the same numbers whoever prepares them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from engine.data import image_format, open_source
from engine.data.loader import Batch, Batches
from engine.data.sampler import Shares
from engine.data.source import ImageFormat
from engine.data.transforms import augment, crop, fit, flip, normalise
from engine.resolve import resolve

CONFIG = resolve(None, ["augment.crop_padding=2", "augment.flip=true", "data.batch_size=16"]).config


def batches(workers: int, first_batch: int = 0) -> list[Batch]:
    source = open_source(CONFIG)
    shares = Shares(96, 37, 16, 0, 1, True, CONFIG.run.seed)
    requests = shares.run(2, 1, first_batch)
    return list(Batches(source, CONFIG, image_format(CONFIG, source), requests, workers))


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_for_any_number_of_workers(workers: int) -> None:
    alone, helped = batches(0), batches(workers)
    assert len(alone) == len(helped) == 2 * (6 + 3)
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_batches_after_a_resume_are_those_that_were_left() -> None:
    whole, rest = batches(0), batches(2, first_batch=4)
    assert all(torch.equal(one.images, other.images) for one, other in zip(whole[4:], rest, strict=True))


def test_an_image_is_augmented_alike_in_any_batch() -> None:
    images = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8)
    together = augment(images, CONFIG.data, 0, 3, np.arange(6))
    alone = augment(images[4:5], CONFIG.data, 0, 3, np.array([4]))
    assert torch.equal(together[4:5], alone)
    assert not torch.equal(together, augment(images, CONFIG.data, 0, 4, np.arange(6)))


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    images = torch.randint(0, 256, (3, 2, 5, 5), dtype=torch.uint8)
    cropped = crop(images, 2, torch.tensor([0, 2, 4]), torch.tensor([4, 2, 1]))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for row, (top, left) in enumerate([(0, 4), (2, 2), (4, 1)]):
        assert torch.equal(cropped[row], padded[row, :, top : top + 5, left : left + 5])
    assert torch.equal(cropped[1], images[1])


def test_a_flip_mirrors_the_chosen_images() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(2, 1, 2, 3)
    flipped = flip(images, torch.tensor([False, True]))
    assert torch.equal(flipped[0], images[0])
    assert torch.equal(flipped[1], reference.horizontal_flip(images[1]))


def test_normalising_agrees_with_torchvision() -> None:
    images = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    expected = reference.normalize(reference.to_dtype(images, torch.float32, scale=True), mean.tolist(), std.tolist())
    torch.testing.assert_close(normalise(images, mean.view(1, 3, 1, 1), std.view(1, 3, 1, 1)), expected)


def test_resizing_agrees_with_torchvision() -> None:
    images = torch.randint(0, 256, (4, 3, 20, 20), dtype=torch.uint8)
    expected = reference.resize(images, [12, 12], antialias=True)
    made = fit(images, ImageFormat(12, 3, (0.5,), (0.5,)))
    assert (made.int() - expected.int()).abs().max() <= 1


def test_channels_are_copied_or_weighed() -> None:
    grey = torch.full((1, 1, 4, 4), 77, dtype=torch.uint8)
    assert torch.equal(fit(grey, ImageFormat(4, 3, (0.5,), (0.5,))), grey.expand(1, 3, 4, 4))
    colour = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    made = fit(colour, ImageFormat(4, 1, (0.5,), (0.5,)))
    assert (made.int() - reference.rgb_to_grayscale(colour).int()).abs().max() <= 1
