"""The config sections about input: `data` and `augment`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config.section import FloatPair, Floats, Section, Text, UserCodePath

IMAGE_FILE_DATASETS = ("mnist", "fashion-mnist", "cifar10", "cifar100")


DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder", "fake"]


class DataConfig(Section):
    dataset: DatasetName | UserCodePath = Field(
        "digits",
        description="Digits (shipped), mnist, fashion-mnist, cifar10, cifar100, a folder of images, fake ones, or your "
        "own code (module:name): called with the text train and then val, it gives a dataset of (image, label) pairs.",
    )
    path: Text | None = Field(None, description="Folder that the data lies in; digits and fake need none.")
    download: bool = Field(False, description="Fetch a missing torchvision dataset into data.path.")
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = Field(
        64,
        description="Images that a rank takes at once, or each GPU with device.parallel dp; auto is the most that fit.",
    )
    drop_last: bool = Field(True, description="Leave out the last, partial batch of a training epoch.")
    pipeline: Literal["auto", "memory", "stream", "fixed"] = Field(
        "auto",
        description="How images reach the model: decoded once and held in memory, the GPU's own where they fit "
        "(memory), read by loader processes again in each epoch (stream), memory where it fits and is faster (auto), "
        "or one batch again and again (fixed), which shows how fast the rest of the machine is.",
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Loader processes a rank in the stream pipeline; auto finds out how many it takes.",
    )
    prefetch: int = Field(4, ge=1, description="Batches that a loader process prepares ahead.")
    image_size: int | None = Field(
        None, ge=1, description="Height and width that images are brought to; the dataset's own when left out."
    )
    channels: Literal[1, 3] | None = Field(
        None, description="1 for grey, 3 for colour; the dataset's own when left out."
    )
    num_classes: int | None = Field(
        None, ge=2, description="Classes; must agree with the data where given, and says how many for fake."
    )
    val_split: float = Field(
        0.2, gt=0, lt=1, description="Share of each class kept for validation where the data has no validation part."
    )
    mean: Floats | None = Field(
        None,
        min_length=1,
        max_length=3,
        description="Mean of each channel, on 0 to 1; the dataset's own when left out.",
    )
    std: Floats | None = Field(
        None,
        min_length=1,
        max_length=3,
        description="Standard deviation of each channel, on 0 to 1; the dataset's own when left out.",
    )
    on_bad: Literal["fail", "skip"] = Field(
        "fail",
        description="An image that can no longer be read while training: fail, or skip it and count it. What is broken "
        "at the start is left out, and named.",
    )
    fake_train: int = Field(1024, ge=1, le=10**9, description="Training images that fake makes.")
    fake_val: int = Field(256, ge=1, le=10**9, description="Validation images that fake makes.")

    @property
    def numeric_batch_size(self) -> int:
        """`batch_size` as a number; what `auto` begins with, until the most that fit is known."""
        return 64 if self.batch_size == "auto" else self.batch_size


class AugmentConfig(Section):
    crop_padding: int = Field(0, ge=0, description="Pixels of border for random crops in training; 0 for no crop.")
    resized_crop: bool = Field(
        False, description="Cut a part of random size and shape out of each training image, and bring it to its size."
    )
    crop_scale: FloatPair = Field((0.08, 1.0), description="Least and greatest area of resized_crop, as shares.")
    crop_ratio: FloatPair = Field((0.75, 4 / 3), description="Least and greatest width by height of resized_crop.")
    flip: bool = Field(False, description="Mirror training images left to right, each with probability one half.")
    brightness: float = Field(0.0, ge=0, le=10, description="Colour jitter: change the brightness by up to this share.")
    contrast: float = Field(0.0, ge=0, le=10, description="Colour jitter: change the contrast by up to this share.")
    saturation: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Colour jitter: change the saturation by up to this share; grey images have none.",
    )
    hue: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Colour jitter: turn the hue by up to this share of the circle; grey images have none.",
    )
    policy: Literal["none", "randaugment", "trivialaugment"] = Field(
        "none", description="Random distortions of training images: none, randaugment or trivialaugment."
    )
    policy_ops: int = Field(2, ge=1, le=14, description="Distortions that randaugment makes of each image.")
    policy_magnitude: int = Field(9, ge=0, le=30, description="Strength of randaugment's distortions, 0 to 30.")
    erasing: float = Field(
        0.0, ge=0, le=1, description="Probability that a random rectangle of an image is set to the mean colour."
    )
    mixup: float = Field(
        0.0, ge=0, le=1000, description="Alpha of mixup, which blends pairs of images and their labels; 0 for none."
    )
    cutmix: float = Field(
        0.0, ge=0, le=1000, description="Alpha of cutmix, which cuts a part of one image into another; 0 for none."
    )
    transform: UserCodePath | None = Field(
        None,
        description="Your own transform (module:name), called with each training image as a C x H x W tensor of uint8, "
        "which gives one of the same form.",
    )
