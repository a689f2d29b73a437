"""The input of the model: its size, channels and normalization, and how an image of any size becomes it.

`ImageFormat` belongs to a run and its checkpoint. `Preprocessing` is its crop and resize in training or evaluation, and
plans those of one image. Pillow and torch apply the plan (`engine.train.data.sources.image`); images that are tensors
(`engine.train.data.augment.batch_ops`) and exported models (`engine.train.inference.preprocess_script`) follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

from engine.base.codec import Count, Number, Positive, Side
from engine.base.errors import UsageError
from engine.config.data_sections import DataConfig, Fit, Interpolation
from engine.config.rules import val_resize_problem
from engine.config.schema import Config

if TYPE_CHECKING:
    from engine.train.data.sources.base import ImageSource

# Left, top, right and bottom in pixels, as in Pillow's Image.crop.
Box = tuple[int, int, int, int]
# A longer image is not resized as a whole: most of the result would be cropped off, and it can exceed the memory.
MAX_WHOLE_ASPECT_RATIO = 8


@dataclass(frozen=True)
class ResizePlan:
    """Crop `box`, resize it to `width` x `height`, then crop `size` x `size` pixels at `left`, `top`."""

    box: Box
    width: int
    height: int
    left: int
    top: int
    size: int
    interpolation: Interpolation

    @property
    def is_elongated(self) -> bool:
        """Whether the resized image is much longer than the crop."""
        long, short = max(self.width, self.height), min(self.width, self.height)
        return long > MAX_WHOLE_ASPECT_RATIO * short

    def min_source_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the smallest width and height to which an image may be decoded without a loss of resolution."""
        left, top, right, bottom = self.box
        return ceil(width * self.width / (right - left)), ceil(height * self.height / (bottom - top))

    def scaled(self, scale_x: float, scale_y: float) -> ResizePlan:
        """Return the plan for an image that was decoded at reduced scale."""
        left, top, right, bottom = self.box
        box = round(left * scale_x), round(top * scale_y), round(right * scale_x), round(bottom * scale_y)
        return replace(self, box=box)


@dataclass(frozen=True)
class Preprocessing:
    """How an image of any size becomes a square of `size` x `size` pixels, for training or for evaluation.

    With `resize`, the shorter edge (`fit` crop) or both edges (squash) become `resize` pixels long, and the center is
    cropped: torchvision's Resize and CenterCrop, and timm's crop modes. Without, the largest center square (crop) or
    the whole image (squash) is resized. `draft` permits to decode a large JPEG at reduced scale. With `random_box`,
    the box that it returns for the index, height and width of an image is resized instead.
    """

    size: int
    resize: int | None
    fit: Fit
    interpolation: Interpolation
    draft: bool
    random_box: Callable[[int, int, int], Box] | None = None

    @property
    def resized_size(self) -> int:
        """Side of a square image after the resize, before the center crop."""
        return self.resize or self.size

    def plan(self, index: int, height: int, width: int) -> ResizePlan:
        """Return what to crop and resize in an image of a part."""
        size, resize, whole = self.size, self.resize, (0, 0, width, height)
        if self.random_box is not None or resize is None:
            box = whole if self.fit == "squash" else center_box(height, width)
            if self.random_box is not None:
                box = self.random_box(index, height, width)
            return ResizePlan(box, size, size, 0, 0, size, self.interpolation)
        new_width, new_height = resize, resize
        if self.fit == "crop":
            # torchvision truncates the longer edge, and rounds the offset of the center crop to the even neighbor.
            shorter = min(height, width)
            edges = (int(resize * edge / shorter) if edge > shorter else resize for edge in (width, height))
            new_width, new_height = edges
        left, top = round((new_width - size) / 2), round((new_height - size) / 2)
        return ResizePlan(whole, new_width, new_height, left, top, size, self.interpolation)


def center_box(height: int, width: int) -> Box:
    """Return the largest center square."""
    side = min(height, width)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


@dataclass(frozen=True)
class ImageFormat:
    """Preprocessing, channels and normalization of square images.

    `mean` and `std` are per channel, on a scale of 0 to 1. `size` is the side of the input in training, `val_size`
    (default: `size`) in evaluation. `val_resize` is `Preprocessing.resize` of the evaluation. Images of dtype float32
    have any number of channels; they reach the model as the user's dataset returns them. With `epoch_sizes`
    (`DataConfig.epoch_sizes`), the size in training depends on the epoch, and `size` is the largest.
    """

    size: Side
    channels: Side
    mean: tuple[Number, ...]
    std: tuple[Positive, ...]
    val_size: Count = 0
    val_resize: Side | None = None
    fit: Fit = "crop"
    interpolation: Interpolation = "bilinear"
    dtype: Literal["uint8", "float32"] = "uint8"
    epoch_sizes: tuple[tuple[Side, Side], ...] = ()

    def __post_init__(self) -> None:
        if self.val_size == 0:
            object.__setattr__(self, "val_size", self.size)

    @property
    def is_float(self) -> bool:
        return self.dtype == "float32"

    @property
    def train_sizes(self) -> tuple[int, ...]:
        """The sizes of the training images without repetition, in the order of the epochs."""
        return tuple(dict.fromkeys(size for _, size in self.epoch_sizes)) or (self.size,)

    def at_epoch(self, epoch: int) -> ImageFormat:
        """Return the format of the training images in an epoch, counted from 1: their size follows the schedule."""
        size = next((size for first, size in reversed(self.epoch_sizes) if first <= epoch), self.size)
        return self if size == self.size else replace(self, size=size)

    def describe(self) -> str:
        """Return sizes and filter of training and evaluation: "train 176, evaluate resize 232 crop 224 bicubic".

        With sizes by epoch: "train 160 to 192 (160@1, 192@13), evaluate 224 bilinear"."""
        train = str(self.size)
        if self.epoch_sizes:
            first, last = self.epoch_sizes[0][1], self.epoch_sizes[-1][1]
            train = f"{first} to {last} ({', '.join(f'{size}@{epoch}' for epoch, size in self.epoch_sizes)})"
        return f"train {train}, evaluate {self.describe_evaluation()}"

    def describe_evaluation(self) -> str:
        size = str(self.val_size) if self.val_resize is None else f"resize {self.val_resize} crop {self.val_size}"
        return f"{size} {self.interpolation}{' squash' if self.fit == 'squash' else ''}"

    def preprocessing(self, *, training: bool) -> Preprocessing:
        """Return the preprocessing of evaluation and prediction, or of training images that no random crop resizes."""
        if training:
            return Preprocessing(self.size, None, self.fit, self.interpolation, draft=True)
        return Preprocessing(self.val_size, self.val_resize, self.fit, self.interpolation, draft=False)


def format_from_config(data: DataConfig, base: ImageFormat) -> ImageFormat:
    """Return the format of a dataset with the sizes, channels and preprocessing that the config sets.

    Raises UsageError if the center crop does not fit into the resized image.
    """
    if base.is_float:
        return base
    size = data.max_train_size or base.size
    image_format = replace(
        base,
        size=size,
        channels=data.channels or base.channels,
        val_size=data.val_crop or data.image_size or size,
        val_resize=data.val_resize,
        fit=data.fit or base.fit,
        interpolation=data.interpolation or base.interpolation,
        epoch_sizes=data.epoch_sizes,
    )
    if problem := val_resize_problem(data.val_resize, image_format.val_size):
        raise UsageError.one("data.val_resize", problem, code="conflict")
    return image_format


def model_input_format(config: Config, source: ImageSource) -> ImageFormat:
    """Return the input format of the model: the source's format with the overrides of the config."""
    data, base = config.data, source.format
    if base.is_float:
        return base
    channels = data.channels or base.channels
    mean, std = base.mean, base.std
    if channels != base.channels:
        # Grayscale copied to three channels keeps its statistics; those of RGB converted to grayscale are close to the
        # mean over the channels.
        mean = mean * 3 if channels == 3 else (sum(mean) / 3,)
        std = std * 3 if channels == 3 else (sum(std) / 3,)
    return replace(format_from_config(data, base), mean=data.mean or mean, std=data.std or std)
