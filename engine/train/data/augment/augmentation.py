"""Augmentation of training images as the config's `augment` section describes it.

Both input pipelines use it. The random parameters of an image depend only on seed, epoch and image index, not on its
batch or on the process that loads it. Transforms and user code draw from the global random generators, which are seeded
and then restored, so that the model's dropout does not depend on the input pipeline.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import SupportsInt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config.data_sections import MAX_POLICY_MAGNITUDE, AugmentConfig
from engine.config.rules import key_of_image_transform
from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.config.user_code import describe_value, load_user_function
from engine.config.user_errors import UserCodeError, describe_exception
from engine.train.data.augment.batch_ops import erase, flip, pad_and_crop, to_device
from engine.train.data.augment.crops import random_erasing_boxes, random_resized_crop_box, random_resized_crop_boxes
from engine.train.data.sampler import Indices, RandomStream, random_bits, random_integers
from engine.train.data.sources.formats import Box, ImageFormat, Preprocessing

# Seeds the random generators that a context has forked.
SeedFunction = Callable[[SupportsInt], None]
# Maps a C x H x W uint8 image to one of the same shape and dtype.
ImageTransform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AugmentParams:
    """Random parameters of the batch transforms for N images; None disables a transform."""

    crop_offsets: Indices | None
    """Top row and left column of each crop in the padded image, N x 2."""
    flip_mask: NDArray[np.bool_] | None
    """Images to flip horizontally, N."""
    vertical_flip_mask: NDArray[np.bool_] | None
    """Images to flip vertically, N."""
    erase_boxes: Indices | None
    """Rectangle to erase in each image (left, top, right, bottom), N x 4."""
    crop_padding: int
    erase_value: tuple[int, ...]
    """Value of erased pixels per channel, 0 to 255."""

    def __getitem__(self, rows: slice) -> AugmentParams:
        """Return the parameters of a slice of the images."""
        drawn = {key: getattr(self, key) for key in ("crop_offsets", "flip_mask", "vertical_flip_mask", "erase_boxes")}
        return replace(self, **{key: values[rows] for key, values in drawn.items() if values is not None})


def apply_batch_params(images: Tensor, params: AugmentParams, *, may_overwrite: bool = False) -> Tensor:
    """Crop, flip and erase a batch, N x C x H x W uint8, on its device. With `may_overwrite`, it may change `images`.

    The result for an image is bitwise identical in any batch and on any device.
    """
    device = images.device
    if params.crop_offsets is not None:
        images = pad_and_crop(images, params.crop_padding, to_device(torch.from_numpy(params.crop_offsets), device))
    if params.flip_mask is not None:
        mask = to_device(torch.from_numpy(params.flip_mask), device)
        images = flip(images, mask, may_overwrite=may_overwrite)
    if params.vertical_flip_mask is not None:
        mask = to_device(torch.from_numpy(params.vertical_flip_mask), device)
        images = flip(images, mask, -2, may_overwrite=may_overwrite)
    if params.erase_boxes is not None:
        images = erase(images, to_device(torch.from_numpy(params.erase_boxes), device), params.erase_value)
    return images


@contextmanager
def fork_rngs() -> Iterator[SeedFunction]:
    """Fork the global generators of torch (CPU), Python and NumPy, and yield a function that seeds them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield _seed_rngs
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _seed_rngs(bits: SupportsInt) -> None:
    # torch.manual_seed would also seed the CUDA generators.
    torch.default_generator.manual_seed(int(bits))
    random.seed(int(bits))
    np.random.seed(int(bits) % 2**32)


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, as in a DataLoader worker: the last bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Augmentation:
    """Augmentation of a config, built once per process.

    `apply_image_transforms` transforms single images on the CPU. `draw_batch_params` draws the parameters with which
    `apply_batch_params` transforms a batch on the device. Raises UsageError if the user's transform cannot be loaded.
    """

    def __init__(self, config: Config, image_format: ImageFormat) -> None:
        self._augment, self._seed = config.augment, config.run.seed
        self._format = image_format
        # The mean is 0 after normalization.
        self._erase_value = tuple(min(max(round(255 * value), 0), 255) for value in image_format.mean)
        self._transforms = list(_image_transforms(config, image_format, self._erase_value))

    @property
    def has_image_transforms(self) -> bool:
        """Whether any transform runs per image on the CPU."""
        return bool(self._transforms)

    def preprocessing(self, epoch: int, random_offset: int = 0) -> Preprocessing:
        """Return how the images of an epoch are cropped and resized when they are loaded. `random_offset` is that of
        their `BatchRequest`."""
        augment, preprocessing = self._augment, self._format.at_epoch(epoch).preprocessing(training=True)
        if not augment.resized_crop:
            return preprocessing

        def box(index: int, height: int, width: int) -> Box:
            scale, ratio, drawn = augment.crop_scale, augment.crop_ratio, index + random_offset
            return random_resized_crop_box(scale, ratio, self._seed, epoch, drawn, height, width)

        return replace(preprocessing, random_box=box)

    def crop_boxes(self, epoch: int, indices: Indices, image_size: int) -> Indices | None:
        """Return the boxes of the random resized crop for square images of `image_size`; None if it is disabled.

        N x 4: left, top, right, bottom.
        """
        augment, size = self._augment, image_size
        if not augment.resized_crop:
            return None
        return random_resized_crop_boxes(
            augment.crop_scale,
            augment.crop_ratio,
            image_height=size,
            image_width=size,
            seed=self._seed,
            epoch=epoch,
            indices=indices,
        )

    def apply_image_transforms(self, images: Tensor, epoch: int, indices: Indices) -> Tensor:
        """Apply the per-image transforms to a training batch, N x C x H x W uint8 on the CPU.

        Crop and flip come first in the order of transforms, so they are applied here too if any per-image transform is
        enabled. Otherwise the batch is returned unchanged.
        """
        if not self._transforms:
            return images
        images = apply_batch_params(images, self._draw_crop_and_flip(epoch, indices))
        bits = [random_bits(self._seed, stream, epoch, indices) for stream, _ in self._transforms]
        transformed = []
        with single_torch_thread(), fork_rngs() as seed_rng:
            # Grayscale expanded to three channels shares one channel in memory, which in-place transforms would break.
            for row, image in enumerate(images.contiguous()):
                for (_, transform), image_bits in zip(self._transforms, bits, strict=True):
                    seed_rng(image_bits[row])
                    image = transform(image)
                transformed.append(image)
        return torch.stack(transformed)

    def draw_batch_params(self, epoch: int, indices: Indices) -> AugmentParams:
        """Draw the parameters of the batch transforms that `apply_image_transforms` has not applied, on the CPU."""
        params = (
            AugmentParams(None, None, None, None, 0, self._erase_value)
            if self._transforms
            else self._draw_crop_and_flip(epoch, indices)
        )
        if not self._augment.erasing:
            return params
        size = self._format.at_epoch(epoch).size
        boxes = random_erasing_boxes(self._augment.erasing, size, self._seed, epoch, indices)
        return replace(params, erase_boxes=boxes)

    def _draw_crop_and_flip(self, epoch: int, indices: Indices) -> AugmentParams:
        padding, seed = self._augment.crop_padding, self._seed
        crop_offsets = None
        if padding:
            rows_and_columns = [
                random_integers(2 * padding + 1, seed, stream, epoch, indices)
                for stream in (RandomStream.CROP_ROW, RandomStream.CROP_COLUMN)
            ]
            crop_offsets = np.stack(rows_and_columns, 1)

        def flip_mask(stream: RandomStream) -> NDArray[np.bool_]:
            return random_integers(2, seed, stream, epoch, indices).astype(np.bool_)

        horizontal = flip_mask(RandomStream.FLIP) if self._augment.flip else None
        vertical = flip_mask(RandomStream.VERTICAL_FLIP) if self._augment.vertical_flip else None
        return AugmentParams(crop_offsets, horizontal, vertical, None, padding, self._erase_value)


def _image_transforms(
    config: Config, image_format: ImageFormat, fill: Sequence[int]
) -> Iterator[tuple[RandomStream, ImageTransform]]:
    """Yield the enabled per-image transforms in order, each with its random stream. `fill` is the color of pixels that
    an affine transform moves in from outside the image."""
    if key_of_image_transform(config) is None:
        return
    from torchvision.transforms import InterpolationMode, v2

    augment, is_rgb = config.augment, image_format.channels == 3
    if augment.rotation or augment.translate or augment.shear or augment.scale != (1.0, 1.0):
        yield (
            RandomStream.AFFINE,
            v2.RandomAffine(
                augment.rotation,
                (augment.translate, augment.translate),
                augment.scale,
                augment.shear,
                InterpolationMode.BILINEAR,
                list(fill),
            ),
        )
    if augment.policy != "none":
        yield RandomStream.POLICY, _policy_transform(augment)
    saturation, hue = (augment.saturation, augment.hue) if is_rgb else (0.0, 0.0)
    if any((augment.brightness, augment.contrast, saturation, hue)):
        yield RandomStream.COLOR_JITTER, v2.ColorJitter(augment.brightness, augment.contrast, saturation, hue)
    if augment.grayscale and is_rgb:
        yield RandomStream.GRAYSCALE, v2.RandomGrayscale(augment.grayscale)
    if augment.blur:
        # SimCLR's: a tenth of the image.
        kernel_size = max(image_format.size // 20 * 2 + 1, 3)
        yield RandomStream.BLUR, v2.RandomApply([v2.GaussianBlur(kernel_size, (0.1, 2.0))], augment.blur)
    if augment.transform is not None:
        yield RandomStream.USER_TRANSFORM, _user_transform(augment.transform, config.run)


def _policy_transform(augment: AugmentConfig) -> ImageTransform:
    """Build RandAugment or TrivialAugmentWide with bilinear interpolation, as torchvision's reference training does."""
    from torchvision.transforms import InterpolationMode, v2

    bilinear = InterpolationMode.BILINEAR
    if augment.policy == "trivialaugment":
        trivial: ImageTransform = v2.TrivialAugmentWide(interpolation=bilinear)
        return trivial
    if not augment.policy_magnitude_std:
        fixed: ImageTransform = v2.RandAugment(augment.policy_ops, augment.policy_magnitude, interpolation=bilinear)
        return fixed
    operation = v2.RandAugment(1, interpolation=bilinear)

    def randaugment(image: Tensor) -> Tensor:
        # As timm does, which draws a magnitude for each operation.
        for _ in range(augment.policy_ops):
            magnitude = round(random.gauss(augment.policy_magnitude, augment.policy_magnitude_std))
            operation.magnitude = min(max(magnitude, 0), MAX_POLICY_MAGNITUDE)
            image = operation(image)
        return image

    return randaugment


def _user_transform(name: str, run: RunConfig) -> ImageTransform:
    transform = load_user_function("augment.transform", name, run)

    def checked_transform(image: Tensor) -> Tensor:
        shape = image.shape
        try:
            result = transform(image)
        except Exception as error:
            reason = describe_exception(error, run.code, run.code_packages)
            raise UserCodeError(f"augment.transform {name} failed: {reason}") from error
        if isinstance(result, Tensor) and result.dtype == image.dtype and result.shape == shape:
            return result
        dtype = str(image.dtype).removeprefix("torch.")
        expected = f"a Tensor of {dtype}, {' x '.join(map(str, shape))}, like its input"
        raise UserCodeError(
            f"augment.transform {name} returned {describe_value(result)}; it must return {expected}",
        )

    return checked_transform
