"""Training images varied at random. What is drawn for an image depends on the seed, the epoch and the image alone, not
on its batch or the process that prepares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config.data_sections import Augment
from engine.config.schema import Config
from engine.config.user_code import in_words, kind_of, load_own
from engine.data.augment.batch_ops import crop, erase, flip
from engine.data.augment.crops import cut_box, cut_rectangles, erased_rectangles
from engine.data.rng import library_draws, one_thread, own_draws
from engine.data.sampler import Indices, Stream, random_below, random_bits
from engine.data.sources.base import Box, Crop, ImageFormat
from engine.utils.errors import UsageError

# An image, C x H x W of uint8, to another of that form.
Change = Callable[[Tensor], Tensor]


class OwnTransformError(Exception):
    """The user's own transform failed, or gave no image; the text names it."""


@dataclass(frozen=True)
class Draws:
    """What was drawn for N images that is done to whole batches; None is not done at all."""

    corners: Tensor | None
    """Row and column that a crop begins at in the image with its border: N x 2."""
    flips: Tensor | None
    """Whether to mirror the image: N, bool."""
    erased: Tensor | None
    """Left, top, right and bottom of what is erased: N x 4."""
    padding: int
    colour: tuple[int, ...]
    """What erased pixels become, in each channel."""

    def to(self, device: torch.device) -> Draws:
        """On a device, without waiting for it."""
        if device.type == "cpu":
            return self
        return self._each(lambda drawn: drawn.pin_memory().to(device, non_blocking=True))

    def __getitem__(self, rows: slice) -> Draws:
        """Those of some of the images."""
        return self._each(lambda drawn: drawn[rows])

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes they go by value, and not as files of shared memory."""
        drawn = [None if one is None else one.numpy() for one in (self.corners, self.flips, self.erased)]
        return _unpacked, (drawn, self.padding, self.colour)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Draws:
        corners, flips, erased = (
            None if drawn is None else change(drawn) for drawn in (self.corners, self.flips, self.erased)
        )
        return replace(self, corners=corners, flips=flips, erased=erased)


def _unpacked(drawn: Sequence[NDArray[Any] | None], padding: int, colour: tuple[int, ...]) -> Draws:
    corners, flips, erased = (None if one is None else torch.from_numpy(one) for one in drawn)
    return Draws(corners, flips, erased, padding, colour)


def vary(images: Tensor, draws: Draws) -> Tensor:
    """A batch, N x C x H x W of uint8, cropped, mirrored and erased on the device that it lies on, as the draws on that
    device say. Each image is changed alike in any batch and on any device, bit for bit."""
    if draws.corners is not None:
        images = crop(images, draws.padding, draws.corners)
    if draws.flips is not None:
        images = flip(images, draws.flips)
    if draws.erased is not None:
        images = erase(images, draws.erased, draws.colour)
    return images


class Augmentation:
    """All that a config asks for, made once in a process: `before` the batch comes to the device and then, there, by
    its `draws` (`vary`). Raises UsageError where the user's own transform cannot be had."""

    def __init__(self, config: Config, image_format: ImageFormat) -> None:
        self._augment, self._seed = config.augment, config.run.seed
        self._size = image_format.size
        # Which is 0 to the model.
        self._colour = tuple(min(max(round(255 * value), 0), 255) for value in image_format.mean)
        self._changes = list(_changes(config, image_format))
        self._libraries = library_draws if config.augment.transform is None else own_draws

    @property
    def one_by_one(self) -> bool:
        """Whether anything is done to one image after another, on the CPU."""
        return bool(self._changes)

    def crop(self, epoch: int) -> Crop | None:
        """Where to cut the training images of an epoch when they are loaded; None to leave them whole."""
        if not self._augment.resized_crop:
            return None
        return Crop(self._size, partial(_box, self._augment, self._seed, epoch))

    def boxes(self, epoch: int, indices: Indices, size: int) -> Tensor | None:
        """The same for images that are all of one size, N x 4 on the host: left, top, right, bottom."""
        augment = self._augment
        if not augment.resized_crop:
            return None
        found = cut_rectangles(augment.crop_scale, augment.crop_ratio, size, size, self._seed, epoch, indices)
        return torch.from_numpy(found)

    def __call__(self, images: Tensor, epoch: int, indices: Indices) -> Tensor:
        """A training batch, N x C x H x W, changed where it lies."""
        return vary(self.before(images, epoch, indices), self.draws(epoch, indices))

    def before(self, images: Tensor, epoch: int, indices: Indices) -> Tensor:
        """A training batch on the CPU with that done which is done to one image after another. The crop and the flip
        come before it, and are done here where there is any such thing."""
        if not self._changes:
            return images
        images = vary(images, self._crops(epoch, indices))
        bits = [random_bits(self._seed, stream, epoch, indices) for stream, _ in self._changes]
        changed = []
        with one_thread(), self._libraries() as seeded:
            # Grey that was spread over three channels is one image in memory.
            for row, image in enumerate(images.contiguous()):
                for (_, change), drawn in zip(self._changes, bits, strict=True):
                    seeded(drawn[row])
                    image = change(image)
                changed.append(image)
        return torch.stack(changed)

    def draws(self, epoch: int, indices: Indices) -> Draws:
        """What is left for the device to do to those training images, on the host."""
        draws = Draws(None, None, None, 0, self._colour) if self._changes else self._crops(epoch, indices)
        if not self._augment.erasing:
            return draws
        erased = erased_rectangles(self._augment.erasing, self._size, self._seed, epoch, indices)
        return replace(draws, erased=torch.from_numpy(erased))

    def _crops(self, epoch: int, indices: Indices) -> Draws:
        """Crop and flip."""
        padding, seed = self._augment.crop_padding, self._seed
        corners = flips = None
        if padding:
            drawn = [
                random_below(2 * padding + 1, seed, stream, epoch, indices)
                for stream in (Stream.CROP_ROW, Stream.CROP_COLUMN)
            ]
            corners = torch.from_numpy(np.stack(drawn, 1))
        if self._augment.flip:
            flips = torch.from_numpy(random_below(2, seed, Stream.FLIP, epoch, indices)).bool()
        return Draws(corners, flips, None, padding, self._colour)


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


def _box(augment: Augment, seed: int, epoch: int, index: int, height: int, width: int) -> Box:
    """What is cut out of one image."""
    return cut_box(augment.crop_scale, augment.crop_ratio, height, width, seed, epoch, index)


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
