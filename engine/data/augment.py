"""Training images varied at random. What is drawn for an image depends on the seed, the epoch and the image alone, not
on its batch or the process that prepares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.config import Augment, Config
from engine.data.draws import library_draws, one_thread, own_draws
from engine.data.sampler import Indices, Stream, random_below, random_bits
from engine.data.source import Box, Crop, ImageFormat
from engine.data.transforms import crop, flip
from engine.own import in_words, kind_of, load_own
from engine.problems import UsageError

# An image, C x H x W of uint8, to another of that form.
Change = Callable[[Tensor], Tensor]


class OwnTransformError(Exception):
    """The user's own transform failed, or gave no image; the text names it."""


class Augmentation:
    """All that a config asks for, made once in a process. Raises UsageError where the user's own transform cannot be
    had."""

    def __init__(self, config: Config, image_format: ImageFormat) -> None:
        self._augment, self._seed = config.augment, config.run.seed
        self._size = image_format.size
        self._boxes = _boxes(config.augment) if config.augment.resized_crop else None
        self._changes = list(_changes(config, image_format))
        self._draws = library_draws if config.augment.transform is None else own_draws

    def crop(self, epoch: int) -> Crop | None:
        """Where to cut the training images of an epoch when they are loaded; None to leave them whole."""
        if self._boxes is None:
            return None
        return Crop(self._size, partial(_box, self._boxes, self._seed, epoch))

    def __call__(self, images: Tensor, epoch: int, indices: Indices) -> Tensor:
        """A training batch, N x C x H x W, changed."""
        augment, seed = self._augment, self._seed
        if augment.crop_padding:
            span = 2 * augment.crop_padding + 1
            top, left = (
                torch.from_numpy(random_below(span, seed, stream, epoch, indices))
                for stream in (Stream.CROP_ROW, Stream.CROP_COLUMN)
            )
            images = crop(images, augment.crop_padding, top, left)
        if augment.flip:
            images = flip(images, torch.from_numpy(random_below(2, seed, Stream.FLIP, epoch, indices)).bool())
        if not self._changes:
            return images
        bits = [random_bits(seed, stream, epoch, indices) for stream, _ in self._changes]
        changed = []
        with one_thread(), self._draws() as seeded:
            # Grey that was spread over three channels is one image in memory.
            for row, image in enumerate(images.contiguous()):
                for (_, change), drawn in zip(self._changes, bits, strict=True):
                    seeded(drawn[row])
                    image = change(image)
                changed.append(image)
        return torch.stack(changed)


def _changes(config: Config, image_format: ImageFormat) -> Iterator[tuple[Stream, Change]]:
    """What is done to one image after another, each with its stream of random numbers."""
    augment, colour = config.augment, image_format.channels == 3
    if augment.policy != "none":
        yield Stream.POLICY, _policy(augment)
    saturation, hue = (augment.saturation, augment.hue) if colour else (0.0, 0.0)
    if any((augment.brightness, augment.contrast, saturation, hue)):
        from torchvision.transforms import v2

        yield Stream.JITTER, v2.ColorJitter(augment.brightness, augment.contrast, saturation, hue)
    if augment.transform is not None:
        yield Stream.OWN_TRANSFORM, _own_transform(augment.transform, config.run.code)
    if augment.erasing:
        from torchvision.transforms import v2

        # Which is 0 to the model.
        mean = [float(min(max(round(255 * value), 0), 255)) for value in image_format.mean]
        yield Stream.ERASING, v2.RandomErasing(augment.erasing, value=mean)


def _policy(augment: Augment) -> Change:
    """As torchvision's reference training has them, which interpolates."""
    from torchvision.transforms import InterpolationMode, v2

    bilinear = InterpolationMode.BILINEAR
    policy: Change = (
        v2.RandAugment(augment.policy_ops, augment.policy_magnitude, interpolation=bilinear)
        if augment.policy == "randaugment"
        else v2.TrivialAugmentWide(interpolation=bilinear)
    )
    return policy


def _boxes(augment: Augment) -> Callable[[list[Tensor]], dict[str, int]]:
    """Draws a box of an image, of which only the height and width count."""
    from torchvision.transforms import v2

    # Its own size is not used: what is cut out is resized where it is loaded.
    draw: Callable[[list[Tensor]], dict[str, int]] = v2.RandomResizedCrop(
        1, augment.crop_scale, augment.crop_ratio
    ).make_params
    return draw


def _box(
    boxes: Callable[[list[Tensor]], dict[str, int]], seed: int, epoch: int, index: int, height: int, width: int
) -> Box:
    with library_draws() as seeded:
        seeded(random_bits(seed, Stream.RESIZED_CROP, epoch, np.array([index]))[0])
        drawn = boxes([torch.empty(0, height, width)])
    return drawn["left"], drawn["top"], drawn["left"] + drawn["width"], drawn["top"] + drawn["height"]


def _own_transform(name: str, code: str | None) -> Change:
    transform = load_own("augment.transform", name, code)
    if not callable(transform):
        raise UsageError.one("augment.transform", f"{name} is {kind_of(transform)}, and must be called with an image")

    def checked(image: Tensor) -> Tensor:
        shape = image.shape
        try:
            made = transform(image)
        except Exception as error:
            raise OwnTransformError(f"augment.transform {name} failed: {in_words(error)}") from error
        if isinstance(made, Tensor) and made.dtype == torch.uint8 and made.shape == shape:
            return made
        wanted = f"a Tensor of uint8, {' x '.join(map(str, shape))}, as it gets"
        raise OwnTransformError(f"augment.transform {name} gives {kind_of(made)}, and must give {wanted}")

    return checked
